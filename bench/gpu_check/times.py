"""Times every kernel of a forward and backward, all ranks of a shape on one device, and their rates."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu_check.clocks import clock_for, copy_bandwidth, median_seconds
from bench.gpu_check.journal import Journal
from bench.gpu_check.launches import Arguments, seen_by, traffic_name, without_running
from bench.gpu_check.rates import LOCAL, ORDER, bytes_of, gigabytes_per_second, target_of, verdict
from bench.gpu_check.workload import FULL, VARIANTS, Variant, Workload, shape_for
from bench.shapes import Shape

WARMUP, ITERATIONS = 2, 10
Samples = dict[str, list[tuple[int, float]]]
"""Of each kernel: rank, seconds."""


def run(journal: Journal, device: str, name: str) -> None:
    """Measure a plain copy, then each variant of a shape: checked first, then timed."""
    shape = shape_for(name, device)
    copy = copy_bandwidth(device, gibibytes=2 if device != "cpu" else 0.001) / 1e9
    empty = 1e6 * median_seconds(clock_for(device), lambda: None, times=15)
    journal.figure("copy", shape=name, gb_s=copy, empty_us=empty, interpreted=device == "cpu")
    print(f"{name} with {shape.tokens} tokens a rank; a plain copy: {copy:.1f} GB/s", flush=True)
    for variant in VARIANTS if device != "cpu" else VARIANTS[:1]:
        with journal.check(f"times {name}, {variant.name}: right, and timed") as notes:
            for fields in _checked_and_timed(shape, variant, device, copy, notes):
                journal.figure("kernel", **fields)
        if device != "cpu":
            torch.cuda.empty_cache()


def _checked_and_timed(
    shape: Shape, variant: Variant, device: str, copy: float, notes: dict[str, Any]
) -> list[dict[str, Any]]:
    workload = Workload(shape, variant, device)
    workload.check()
    samples, notes["host seconds"] = measure(workload, device)
    workload.close()
    return figures(workload, samples, copy if device != "cpu" else None, variant)


def compile_only(journal: Journal, device: str, name: str) -> None:
    """Compile what `run` will launch, and launch nothing."""
    shape = shape_for(name, device)
    for variant in VARIANTS[:2]:
        with journal.check(f"compile {name}, {variant.name}"), seen_by(without_running):
            workload = Workload(shape, variant, device)
            workload.step()
            workload.close()


def measure(workload: Workload, device: str) -> tuple[Samples, float]:
    """Return the times of each launch, and the host's time for one iteration.

    Between two launches of one rank those of all other ranks run, whose rows leave nothing of its own in
    the caches.
    """
    clock, samples, names = clock_for(device), defaultdict(list), []

    def see(kernel: Any, arguments: Arguments, launch: Callable[..., Any]) -> Any:
        names.append((traffic_name(kernel, arguments), arguments.get("rank")))
        return clock.timed(launch)

    with seen_by(see):
        if device != "cpu":
            # The first run through here may still compile, and does not say how long the host takes.
            workload.step()
            clock.seconds()
        begin = time.perf_counter()
        workload.step()
        host = time.perf_counter() - begin
        clock.seconds()
        for iteration in range(WARMUP + ITERATIONS if device != "cpu" else 1):
            names.clear()
            clock.hold(2 * host + 0.002)
            workload.step()
            for (kernel, rank), seconds in zip(names, clock.seconds(), strict=True):
                if iteration >= WARMUP or device == "cpu":
                    samples[kernel].append((rank, seconds))
    return samples, host


def figures(
    workload: Workload, samples: Samples, copy: float | None, variant: Variant
) -> list[dict[str, Any]]:
    """Return a figure for each kernel, in order: medians over iterations and ranks.

    Args:
        workload: that was run.
        samples: as measured.
        copy: GB/s of a plain copy; None where kernels were interpreted, and rates mean nothing.
        variant: of the workload.
    """
    shape: Shape = workload.shape
    moved = [bytes_of(load) for load in workload.loads()]
    result = []
    for kernel in [kernel for kernel in ORDER if kernel in samples]:
        times = sorted(seconds for _, seconds in samples[kernel])
        rates = sorted(gigabytes_per_second(moved[rank][kernel], s) for rank, s in samples[kernel])
        rate = statistics.median(rates)
        percent = None if copy is None else 100 * rate / copy
        target = target_of(kernel, shape.hidden) if variant == FULL else None
        result.append(
            dict(
                shape=shape.name, variant=variant.name, kernel=kernel, local=kernel in LOCAL,
                tokens=shape.tokens, hidden=shape.hidden, ranks=shape.ranks, capacity=workload.capacity,
                launches=len(times), bytes=statistics.mean(rank[kernel] for rank in moved),
                us=1e6 * statistics.median(times), us_p20=1e6 * times[len(times) // 5],
                us_p80=1e6 * times[-1 - len(times) // 5], gb_s=None if copy is None else rate,
                percent=percent, target=target, verdict=verdict(percent, target),
                interpreted=copy is None,
            )
        )  # fmt: skip
    return result
