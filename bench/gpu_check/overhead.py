"""What the host costs: a decoding step's forward and backward launched eagerly, and replayed as a graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bench.gpu_check.clocks import clock_for
from bench.gpu_check.journal import Journal
from bench.gpu_check.launches import repeatable
from bench.gpu_check.workload import shape_for
from symm_a2a import SymmTokenDispatcher

TIMES = 40


def run(journal: Journal, device: str) -> None:
    """Time a group of one, which launches what a rank of many does, and waits for nobody."""
    shape = replace(shape_for("small", device), ranks=1)
    times = TIMES if device != "cpu" else 2
    x = torch.randn(shape.tokens, shape.hidden, dtype=shape.dtype, device=device, requires_grad=True)
    scores = torch.rand(shape.tokens, shape.top_k, device=device, requires_grad=True)
    ids = torch.rand(shape.tokens, shape.experts, device=device).topk(shape.top_k).indices
    grad = torch.randn_like(x)
    config = shape.config(num_lanes=1, capacity=shape.tokens * shape.top_k)
    with (
        journal.check("overhead of the host, small"),
        SymmTokenDispatcher(config, device=device) as dispatcher,
    ):

        def forward_backward() -> Any:
            rows, _, handle = dispatcher.dispatch(x, scores, ids)
            out = dispatcher.combine(rows, handle)
            return out, *torch.autograd.grad(out, [x, scores], grad)

        before = dispatcher.stats()
        forward_backward()
        launches = (dispatcher.stats() - before).launches
        host, whole = _wall(forward_backward, times, device)
        fields = dict(shape=shape.name, launches=launches, interpreted=device == "cpu")
        journal.figure("overhead", what="eager: the host, launching", us=1e6 * host, **fields)
        journal.figure("overhead", what="eager: until the device is done", us=1e6 * whole, **fields)
        _, again = repeatable(device, forward_backward)
        host, whole = _wall(again, times, device)
        journal.figure("overhead", what="replayed: the host", us=1e6 * host, **fields)
        journal.figure("overhead", what="replayed: until the device is done", us=1e6 * whole, **fields)
        journal.figure(
            "overhead", what="replayed: the device", us=1e6 * _device(again, times, device), **fields
        )


def _wall(work: Callable[[], Any], times: int, device: str) -> tuple[float, float]:
    """Return median seconds until the host is done, and until the device is, from rest to rest."""
    issued, done = [], []
    for _ in range(times + 3):
        if device != "cpu":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        issued.append(time.perf_counter() - begin)
        if device != "cpu":
            torch.cuda.synchronize()
        done.append(time.perf_counter() - begin)
    return statistics.median(issued[3:]), statistics.median(done[3:])


def _device(work: Callable[[], Any], times: int, device: str) -> float:
    """Return the seconds of one run among many that are queued at once."""
    clock = clock_for(device)
    clock.hold(0.02)
    clock.timed(lambda: [work() for _ in range(times)])
    return clock.seconds()[0] / times
