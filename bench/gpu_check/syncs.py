"""The host never waits for the device unasked: with a static capacity not at all, with an exact one once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.gpu_check.cases import planned_case
from bench.gpu_check.journal import Journal, require
from symm_a2a import SymmTokenDispatcher, VirtualWorld
from symm_a2a.check.inputs import draw_inputs, place
from symm_a2a.testing import OpGuard

ASLEEP = 1_000_000_000
"""Cycles that the device is kept busy: half a second, many times what the launches take the host."""


def run(journal: Journal, device: str) -> None:
    """Check a world's exchanges in halves, and the operators of a group of one."""
    planned = planned_case("padded-bf16" if device != "cpu" else "drops-fp32", device)
    step = planned.steps[0]
    inputs = draw_inputs(planned.case, step)
    leaves = [place(rank, step, i, torch.device(device)) for i, rank in enumerate(inputs)]
    x, scores, ids, grad_out = leaves[0].x, leaves[0].scores, leaves[0].ids, leaves[0].grad_out
    with contextlib.ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))
        world = stack.enter_context(VirtualWorld(planned.config(), planned.world_size, device))
        alone = stack.enter_context(SymmTokenDispatcher(planned.config(), device=device))

        def in_halves() -> None:
            every = (
                [rank.x for rank in leaves],
                [rank.scores for rank in leaves],
                [rank.ids for rank in leaves],
            )
            rows, _, handles = world.dispatch(*every)
            outs = world.combine(rows, handles)
            torch.autograd.grad(outs, [*every[0], *every[1]], [rank.grad_out for rank in leaves])

        def as_operators() -> None:
            rows, _, handle = alone.dispatch(x, scores, ids)
            torch.autograd.grad(alone.combine(rows, handle), [x, scores], grad_out)

        for form, forward_backward in (("halves", in_halves), ("operators", as_operators)):
            # What is compiled, or loaded, for the first time may wait.
            forward_backward()
            with journal.check(f"no hidden wait, {form}: no operator waits") as notes, OpGuard() as guard:
                forward_backward()
                notes["launches"], notes["operators"] = dict(guard.launches), dict(guard.compute_ops)
            if device != "cpu":
                with journal.check(f"no hidden wait, {form}: sync debug mode"), _no_sync():
                    forward_backward()
                with journal.check(f"no hidden wait, {form}: the host is ahead") as notes:
                    notes["seconds"] = _ahead(forward_backward)
        with journal.check("an exact capacity makes the host wait once") as notes:
            config = planned_case("odd-bf16", device).config()
            notes["syncs"] = syncs = _exact_syncs(SymmTokenDispatcher(config, device=device), device)
            require([f"{syncs} waits in 3 dispatches"] if syncs != 3 else [])


@contextlib.contextmanager
def _no_sync() -> Iterator[None]:
    """Raise where torch makes the host wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _ahead(forward_backward: Callable[[], None]) -> float:
    """Return the seconds of launching while the GPU is busy with something else.

    Raises:
        AssertionError: the GPU was done with it first.
    """
    torch.cuda.synchronize()
    asleep = torch.cuda.Event()
    torch.cuda._sleep(ASLEEP)
    asleep.record()
    begin = time.perf_counter()
    forward_backward()
    seconds, waited = time.perf_counter() - begin, asleep.query()
    torch.cuda.synchronize()
    require([f"the host came back after {seconds:.3f} s, when the device was done"] if waited else [])
    return seconds


def _exact_syncs(dispatcher: SymmTokenDispatcher, device: str) -> int:
    """Return how often three dispatches say that the host waited."""
    cfg = dispatcher.cfg
    x = torch.ones(5, cfg.hidden_dim, dtype=cfg.dtype, device=device)
    scores, ids = torch.ones(5, cfg.top_k, device=device), torch.zeros(5, cfg.top_k, dtype=torch.int64)
    with dispatcher:
        for _ in range(3):
            dispatcher.dispatch(x, scores, ids.to(device))
        return dispatcher.stats().host_syncs
