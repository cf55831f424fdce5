"""`python -m bench a2av`: check and time the exchanges, print a table, write the figures."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist
import triton

from bench.a2av.cases import Case, Mode, plan
from bench.a2av.figures import Result, merge
from bench.a2av.links import link_peak
from bench.a2av.options import PLACED, Options
from bench.a2av.ranks import RankReport, Work, measure_rank, runs
from bench.a2av.records import Setting, to_rows, write_csv, write_json
from bench.a2av.table import format_table, notes
from bench.dispatchers import DISPATCHERS, DispatcherFactory
from bench.host import interpreted
from bench.outputs import prepare
from bench.shapes import SHAPES
from bench.trace import read_trace
from symm_a2a.kernels.blocks import INTERPRETED
from symm_a2a.testing import run_ranks

RANKS = 4
"""Processes without torchrun."""

RUNS: dict[Mode, tuple[int, int]] = {"gpu": (50, 10), "interpreted": (3, 1)}
"""Timed runs and those before them."""

SECONDS_PER_RUN = 10.0
"""What a run in the interpreter may take before the ranks are given up; generous, for a busy machine."""


def run(options: Options, factories: Mapping[str, DispatcherFactory] = DISPATCHERS) -> int:
    """Check, time, report; return the exit code.

    Args:
        options: what to do.
        factories: the dispatchers, by the names of the backends.

    Returns:
        0; or 1 if results were wrong, 2 if the options do not fit or a file cannot be written.
    """
    try:
        options.check()
        mode, ranks = _where(options)
        trace = read_trace(options.trace) if options.trace else None
        cases = plan(options, ranks, mode, trace)
        if not any(runs(name, case) for case in cases for name in options.backend):
            raise ValueError(
                f"expected a backend that has one of the cases, got {', '.join(options.backend)} for "
                f"{', '.join(case.title for case in cases)}; only {', '.join(sorted(PLACED))} have placements"
            )
        leads = mode == "interpreted" or os.environ["RANK"] == "0"
        if leads:
            prepare(options.csv, options.json)
    except (ValueError, RuntimeError) as error:
        print(f"bench a2av: {error}", file=sys.stderr)
        return 2
    iterations, warmup = RUNS[mode]
    iterations = options.iterations or iterations
    warmup = warmup if options.warmup is None else options.warmup
    work = Work(cases, options, iterations, warmup, trace, factories)
    if leads:
        print(_introduction(options, cases, mode, ranks, work), flush=True)
    reports = _run_under_torchrun(work) if mode == "gpu" else _run_on_host(work, ranks)
    device = torch.cuda.get_device_name() if mode == "gpu" else f"CPU, {os.cpu_count()} cores"
    results = merge(reports, link_peak(device) if mode == "gpu" and ranks > 1 else None)
    if leads:
        _report(options, results, mode, device)
    return 1 if any(result.error for result in results) else 0


def _where(options: Options) -> tuple[Mode, int]:
    """Return where the ranks run, and how many they are.

    Raises:
        ValueError: the options ask for what there is only elsewhere.
        RuntimeError: torchrun started ranks that have no GPUs for compiled kernels.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if options.graph:
            raise ValueError(
                "expected GPUs under torchrun for --graph, got ranks on CPUs, which have no CUDA graphs; "
                "leave --graph out"
            )
        return "interpreted", options.ranks or RANKS
    if not torch.cuda.is_available():
        raise RuntimeError(
            "expected a GPU for each rank under torchrun, got none; without torchrun, "
            "`python -m bench a2av --ranks 4` runs on CPUs"
        )
    if INTERPRETED:
        raise RuntimeError("expected compiled kernels on GPUs, got TRITON_INTERPRET=1; unset it")
    ranks = int(os.environ["WORLD_SIZE"])
    if options.ranks not in (None, ranks):
        raise ValueError(f"expected no --ranks under torchrun, which started {ranks}, got {options.ranks}")
    return "gpu", ranks


def _run_on_host(work: Work, ranks: int) -> list[list[RankReport]]:
    count = len(work.cases) * len(work.options.backend) * (work.iterations + work.warmup + 4)
    with interpreted():
        return run_ranks(measure_rank, ranks, work, timeout=120 + SECONDS_PER_RUN * count)


def _run_under_torchrun(work: Work) -> list[list[RankReport]]:
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


def _introduction(options: Options, cases: list[Case], mode: Mode, ranks: int, work: Work) -> str:
    where = "a GPU each" if mode == "gpu" else "processes on this machine's CPUs"
    lines = [
        f"{ranks} ranks, {where}; {len(cases)} cases with {' and '.join(options.backend)}, "
        f"{work.iterations} timed runs of each after {work.warmup} to warm up."
    ]
    if mode == "interpreted":
        lines.append(
            "Kernels run in Triton's interpreter: right, not fast. No time below is the library's speed."
        )
    for label, case in {case.shape: case for case in cases if case.routing not in ("even", "none")}.items():
        text = (
            f"{label}: {case.tokens} tokens of a rank x {case.hidden} hidden in {case.dtype}, "
            f"top-{case.top_k} of {case.experts} experts"
        )
        shape = SHAPES.get(label.split()[0])
        if shape is not None and label != shape.name:
            text += (
                f"; NOT the published size, {shape.tokens} x {shape.hidden}, top-{shape.top_k} of "
                f"{shape.experts}"
            )
        lines.append(text + ".")
    return "\n".join(lines)


def _report(options: Options, results: list[Result], mode: Mode, device: str) -> None:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    setting = Setting(device, torch.__version__, triton.__version__, now, mode)
    rows = to_rows(results, setting)
    print("", format_table(results, mode), "", notes(results, mode), sep="\n")
    for result in results:
        if result.error:
            print(f"WRONG: {result.case.title}, {result.backend}: {result.error}")
    write_csv(options.csv, rows)
    if options.json:
        write_json(options.json, rows)
    print(f"Wrote {options.csv}" + (f" and {options.json}" if options.json else ""))
