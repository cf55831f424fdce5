"""`python -m bench ulysses`: check and time sequence exchanges, print a table, write the figures."""

from __future__ import annotations

import csv
import datetime
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import triton
from tabulate import tabulate

from bench.a2av.figures import PERCENTILES, Metric, bandwidths, latencies, remote_bytes
from bench.a2av.links import link_peak
from bench.host import interpreted
from bench.outputs import prepare
from bench.ulysses.cases import plan
from bench.ulysses.options import Options
from bench.ulysses.ranks import RankReport, Work, measure_rank
from symm_a2a.kernels.blocks import INTERPRETED
from symm_a2a.testing import run_ranks

RANKS = 4
"""Processes without torchrun."""

RUNS = {"gpu": (50, 10), "interpreted": (3, 1)}
"""Timed runs and those before them."""

SECONDS_PER_RUN = 10.0
"""What a run in the interpreter may take before the ranks are given up; generous, for a busy machine."""

COLUMNS: tuple[str, ...] = (
    "op", "backend", "ranks", "batch", "tokens", "heads", "dim", "dtype", "metric", "value", "unit", "note",
    "device", "torch", "triton", "date", "mode",
)  # fmt: skip

NOTES = {
    "gpu": (
        "Times are those of the slowest rank. GB/s: of what crossed a link, of the busiest rank.\n"
        "launches and sent (bytes to other ranks, in one run) are of the rank with most of each."
    ),
    "interpreted": (
        "* Triton's interpreter and gloo on this machine's CPUs: interpreted times are no measure of the\n"
        "  library's speed; they show that the benchmark works. The results were checked.\n"
        "launches and sent (bytes to other ranks, in one run) are of the rank with most of each."
    ),
}


def run(options: Options, **changes: Any) -> int:
    """Check, time, report; return the exit code.

    Args:
        options: what to do.
        changes: of `Work`.

    Returns:
        0; or 1 if results were wrong, 2 if the options do not fit or a file cannot be written.
    """
    try:
        options.check()
        mode = "gpu" if "RANK" in os.environ and "WORLD_SIZE" in os.environ else "interpreted"
        ranks = _ranks(options, mode)
        cases = plan(options, ranks, mode)
        leads = mode == "interpreted" or os.environ["RANK"] == "0"
        if leads:
            prepare(options.csv)
    except (ValueError, RuntimeError) as error:
        print(f"bench ulysses: {error}", file=sys.stderr)
        return 2
    iterations, warmup = RUNS[mode]
    warmup = warmup if options.warmup is None else options.warmup
    work = Work(cases, options, options.iterations or iterations, warmup, **changes)
    if leads:
        where = "a GPU each" if mode == "gpu" else "processes on this machine's CPUs"
        print(f"{ranks} ranks, {where}; {work.iterations} timed runs of each case.", flush=True)
    reports = _under_torchrun(work) if mode == "gpu" else _on_host(work, ranks)
    results = [_merge(list(each), mode) for each in zip(*reports, strict=True)]
    if leads:
        print("", _table(results, mode), "", NOTES[mode], sep="\n")
        _write(options, results, mode)
        for first, metrics in results:
            if first.faults:
                print(f"WRONG: {first.case.title}, {first.backend}: {metrics[0].note}")
        print(f"Wrote {options.csv}")
    return 1 if any(first.faults for first, _ in results) else 0


def _ranks(options: Options, mode: str) -> int:
    """Return how many ranks there are.

    Raises:
        ValueError: the options ask for another number than torchrun started.
        RuntimeError: torchrun started ranks that have no GPUs for compiled kernels.
    """
    if mode == "interpreted":
        return options.ranks or RANKS
    if not torch.cuda.is_available() or INTERPRETED:
        raise RuntimeError(
            "expected a GPU for each rank under torchrun, and compiled kernels; without torchrun, "
            "`python -m bench ulysses --ranks 4` runs on CPUs"
        )
    ranks = int(os.environ["WORLD_SIZE"])
    if options.ranks not in (None, ranks):
        raise ValueError(f"expected no --ranks under torchrun, which started {ranks}, got {options.ranks}")
    return ranks


def _on_host(work: Work, ranks: int) -> list[list[RankReport]]:
    runs = len(work.cases) * len(work.options.backend) * (work.iterations + work.warmup + 4)
    with interpreted():
        return run_ranks(measure_rank, ranks, work, timeout=120 + SECONDS_PER_RUN * runs)


def _under_torchrun(work: Work) -> list[list[RankReport]]:
    """Be the rank that torchrun started; return what all ranks report."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    try:
        group = dist.group.WORLD
        assert group is not None
        reports: list[list[RankReport]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(reports, measure_rank(dist.get_rank(group), group, work), group=group)
        return reports
    finally:
        dist.destroy_process_group()


def _merge(ranks: list[RankReport], mode: str) -> tuple[RankReport, list[Metric]]:
    """Return the first rank's report, and the figures of all: of a wrong case one "error"."""
    costs = [rank.cost for rank in ranks if rank.cost is not None]
    if len(costs) < len(ranks):
        faults = dict.fromkeys(fault for rank in ranks for fault in rank.faults)
        return ranks[0], [Metric("error", None, "", "; ".join(faults))]
    metrics = latencies([rank.seconds for rank in ranks])
    seconds = metrics[PERCENTILES.index(50)].value
    assert seconds is not None
    sent = [sum(remote_bytes(cost, rank)) for rank, cost in enumerate(costs)]
    metrics += [
        Metric("launches", max(cost.launches for cost in costs), ""),
        Metric("payload_bytes", max(sum(cost.payload_bytes_W) for cost in costs), "B"),
        Metric("metadata_bytes", max(sum(cost.metadata_bytes_W) for cost in costs), "B"),
        Metric("remote_bytes", max(sent), "B"),
        Metric("symmetric_bytes", max(cost.symmetric_bytes for cost in costs), "B"),
    ]
    if mode == "gpu":
        peak = link_peak(torch.cuda.get_device_name()) if len(ranks) > 1 else None
        metrics += bandwidths(costs, seconds * 1e-6, peak)
    return ranks[0], metrics


def _table(results: list[tuple[RankReport, list[Metric]]], mode: str) -> str:
    headers = ["case", "backend", "p50, us" if mode == "gpu" else "interpreted *, ms"]
    headers += ["GB/s"] if mode == "gpu" else []
    headers += ["launches", "sent, bytes", "symm. memory, bytes"]
    lines = []
    for first, metrics in results:
        values = {metric.name: metric.value or 0.0 for metric in metrics}
        line = [first.case.title, first.backend]
        if first.faults:
            lines.append([*line, "WRONG, not timed"])
            continue
        line.append(f"{values['latency_p50'] / (1 if mode == 'gpu' else 1e3):.1f}")
        line += [f"{values['remote_bandwidth']:.1f}"] if mode == "gpu" else []
        line += [f"{values[name]:,.0f}" for name in ("launches", "remote_bytes", "symmetric_bytes")]
        lines.append(line)
    align = ["left", "left", *["right"] * (len(headers) - 2)]
    return tabulate(lines, headers=headers, disable_numparse=True, colalign=align)


def _write(options: Options, results: list[tuple[RankReport, list[Metric]]], mode: str) -> None:
    """Write a row per case, backend and metric."""
    setting = dict(
        device=torch.cuda.get_device_name() if mode == "gpu" else f"CPU, {os.cpu_count()} cores",
        torch=torch.__version__,
        triton=triton.__version__,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        mode=mode,
    )
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for first, metrics in results:
            for metric in metrics:
                figures = dict(metric=metric.name, value=metric.value, unit=metric.unit, note=metric.note)
                writer.writerow(asdict(first.case) | dict(backend=first.backend) | figures | setting)
