"""Two ranks as processes that share the device: peers mapped through SymmetricMemory, kernels that wait.

On a CPU the same over shared memory, where the host waits.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.gpu_check.agreement import Oracle
from bench.gpu_check.cases import between_ranks, poison
from bench.gpu_check.graphs import REPLAYS, REPLAYS_ON_CPU, Buffers, numbered
from bench.gpu_check.journal import Journal
from bench.gpu_check.launches import repeatable
from symm_a2a import Domino, PeerTimeoutError, SymmTokenDispatcher, Timeline
from symm_a2a.check.cases import Round
from symm_a2a.check.flow import Outcome, experts, run_round
from symm_a2a.check.inputs import Tensors, draw_inputs, place
from symm_a2a.testing import run_ranks

W = 2
STATIC = 2 * 40 * 3
TIMEOUT = 2
"""Seconds that a rank waits for the missing one."""

Found = dict[str, Any]


def run(journal: Journal, device: str, name: str) -> None:
    """Run the ranks `"exact"`, `"static"`, `"domino"`, `"graph"` or `"missing"`, and note what they found."""
    begin, shared = time.perf_counter(), "cuda:0" if device != "cpu" else device
    results: list[dict[str, Found]] = []
    calls = {
        "exact": (against_reference, "exact"),
        "static": (against_reference, STATIC),
        "domino": (interleaved,),
        "graph": (replayed,),
        "missing": (one_is_missing,),
    }
    with journal.check(f"ranks {name}: all return") as notes:
        function, *args = calls[name]
        results = run_ranks(function, W, shared, *args, timeout=140.0, device=shared)
        inside = max(sum(one["seconds"] for one in result.values()) for result in results)
        notes["start and end"] = time.perf_counter() - begin - inside
    for title in results[0] if results else ():
        each = [result[title] for result in results]
        error = "\n".join(text for one in each for text in one["found"])
        seconds = max(one["seconds"] for one in each)
        notes = {"ranks": [one["notes"] for one in each]}
        journal.outcome(f"ranks {name}: {title}", error, seconds, notes)


def against_reference(rank: int, group: dist.ProcessGroup, device: str, capacity: int | str) -> Found:
    """Be a rank that runs synchronous and split exchanges, a barrier, and a broadcast of counts."""
    planned = between_ranks(capacity)
    steps, result = planned.steps, {}
    rounds = {
        "synchronous": Round("sync", "each", steps[:1]),
        "launch and join": Round("async", "each", steps[1:2]),
        "two lanes in flight": Round("pipelined", "together", steps[1:]),
    }
    with SymmTokenDispatcher(planned.config(), group, device=device) as dispatcher:
        dispatcher.warmup()
        for title, one in rounds.items():
            begin = time.perf_counter()
            oracles = [Oracle(planned, step) for step in one.steps]
            leaves = [
                place(oracle.inputs[rank], step, rank, torch.device(device))
                for oracle, step in zip(oracles, one.steps, strict=True)
            ]
            poison(device)
            outcomes = run_round(one, [dispatcher] * len(leaves), leaves, lambda: None)
            pairs = zip(oracles, outcomes, strict=True)
            found = [text for o, outcome in pairs for text in o.differences(rank, outcome)]
            result[title] = _found(found, begin)
        begin = time.perf_counter()
        for _ in range(5):
            dispatcher.barrier()
        if device != "cpu":
            torch.cuda.synchronize()
        result["5 barriers"] = _found([], begin)
        begin = time.perf_counter()
        ids = [inputs.ids for inputs in draw_inputs(planned.case, steps[0])]
        counts_WE = dispatcher.broadcast_counts(ids[rank].to(device)).cpu()
        experts = planned.config().num_experts
        expected = torch.stack([torch.bincount(i[i >= 0], minlength=experts) for i in ids]).int()
        wrong = not torch.equal(counts_WE, expected)
        result["counts of all ranks"] = _found([f"rank {rank}: {counts_WE}, not {expected}"] * wrong, begin)
    return result


def interleaved(rank: int, group: dist.ProcessGroup, device: str) -> Found:
    """Be a rank that interleaves three micro-batches over two lanes, on streams of their own on a GPU."""
    planned, result = between_ranks(STATIC), {}
    with SymmTokenDispatcher(planned.config(), group, device=device) as dispatcher:
        dispatcher.warmup()

        def layer(leaf: Tensors) -> Generator[Any, Any, Outcome]:
            rows, counts, handle = yield dispatcher.dispatch_async(leaf.x, leaf.scores, leaf.ids)
            out = yield dispatcher.combine_async(experts(rows, counts, leaf, constant=False), handle)
            return Outcome(leaf, rows.detach(), counts, out)

        for title in ("micro-batches interleaved", "micro-batches interleaved, recorded"):
            begin = time.perf_counter()
            oracles = [Oracle(planned, step) for step in planned.steps]
            leaves = [
                place(oracle.inputs[rank], step, rank, torch.device(device))
                for oracle, step in zip(oracles, planned.steps, strict=True)
            ]
            poison(device)
            with dispatcher.record() if "recorded" in title else nullcontext() as recording:
                outcomes = Domino(dispatcher, len(leaves)).run(layer, leaves)
                torch.autograd.backward([o.out for o in outcomes], [leaf.grad_out for leaf in leaves])
            pairs = zip(oracles, outcomes, strict=True)
            found = [text for o, outcome in pairs for text in o.differences(rank, outcome)]
            notes = {} if recording is None else _flights(recording.timeline)
            result[title] = _found(found, begin, **notes)
    return result


def _flights(timeline: Timeline) -> dict[str, float]:
    """Return the milliseconds in flight and exposed; ranks that share a device take turns on it."""
    stats = timeline.stats().items()
    in_flight = {f"ms in flight, {name}": round(found.in_flight * 1e3, 3) for name, found in stats}
    return in_flight | {f"ms exposed, {name}": round(found.exposed * 1e3, 3) for name, found in stats}


def replayed(rank: int, group: dist.ProcessGroup, device: str) -> Found:
    """Be a rank that replays a captured forward and backward; on a CPU, where the host waits, runs it."""
    planned, replays = between_ranks(STATIC, lanes=1), REPLAYS if device != "cpu" else REPLAYS_ON_CPU
    begin, step, found = time.perf_counter(), planned.steps[0], []
    buffers = Buffers(planned, step, rank, device)
    leaves = buffers.leaves
    with SymmTokenDispatcher(planned.config(), group, device=device) as dispatcher, np.errstate(all="ignore"):
        dispatcher.warmup()

        def once() -> tuple[Any, ...]:
            rows, counts, handle = dispatcher.dispatch(leaves.x, leaves.scores, leaves.ids)
            out = dispatcher.combine(rows, handle)
            return rows, counts, out, torch.autograd.grad(out, [leaves.x, leaves.scores], leaves.grad_out)

        result, again = repeatable(device, once) if device != "cpu" else (None, once)
        for replay in range(replays):
            oracle = Oracle(planned, numbered(step, replay), plain=True)
            buffers.fill(oracle.inputs)
            result = again() or result
            assert result is not None
            found += oracle.differences(rank, buffers.outcome(*result))
        exchanges = dispatcher.stats().exchanges["dispatch_backward"]
    return {f"{replays} replays": _found(found, begin, exchanges=exchanges)}


def one_is_missing(rank: int, group: dist.ProcessGroup, device: str) -> Found:
    """Be a rank that waits for a peer which does not take part; or be that peer."""
    planned = between_ranks(STATIC)
    inputs = draw_inputs(planned.case, planned.steps[0])[rank]
    x, scores, ids = (tensor.to(device) for tensor in (inputs.x, inputs.scores, inputs.ids))
    dispatcher = SymmTokenDispatcher(planned.case.config(0, timeout=TIMEOUT), group, device=device)
    dispatcher.warmup()
    dist.barrier(group)
    begin, message = time.perf_counter(), ""
    if rank == 0:
        try:
            dispatcher.dispatch(x, scores, ids)
            if device != "cpu":
                torch.cuda.synchronize()
            # What a kernel reports, the next call raises.
            dispatcher.dispatch(x, scores, ids)
        except PeerTimeoutError as error:
            message = str(error)
    seconds = time.perf_counter() - begin
    dist.barrier(group)
    found = (
        [] if rank or "peer 1" in message else [f"expected PeerTimeoutError about peer 1, got {message!r}"]
    )
    if seconds > 20 * TIMEOUT:
        found.append(f"expected an error after about {TIMEOUT} s, got it after {seconds:.1f} s")
    return {"a missing peer is named in time": _found(found, begin, message=message, waited=seconds)}


def _found(found: list[str], begin: float, **notes: Any) -> Found:
    """Return what a rank reports of a check that began then."""
    return {"found": found, "notes": notes, "seconds": time.perf_counter() - begin}
