"""`python -m bench train`: train with several dispatchers or schedules, compare, and show what happened."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from bench.dispatchers import DISPATCHERS, DispatcherFactory
from bench.host import interpreted
from bench.outputs import prepare
from bench.trace import write_trace
from bench.train import corpus
from bench.train.agreement import Agreement, compare, compare_all
from bench.train.link import describe
from bench.train.options import Options
from bench.train.picture import draw
from bench.train.ranks import train_rank
from bench.train.results import Training, figures_of, merge, trace_of
from bench.train.schedule_results import ScheduleTraining, merge_schedules, schedule_figures
from bench.train.schedule_table import format_schedules
from bench.train.schedules import train_schedules
from bench.train.table import format_table
from symm_a2a import save_picture, save_trace
from symm_a2a.testing import run_ranks

SECONDS_PER_STEP = 60.0
"""What a step may take before the ranks are given up; generous, for a machine with much else to do."""


def run(options: Options, factories: Mapping[str, DispatcherFactory] = DISPATCHERS) -> int:
    """Train, print a table, write a picture; return the exit code.

    Args:
        options: what to do.
        factories: the dispatchers, by their names.

    Returns:
        0; or 1 if the trainings differ by more than rounding, 2 if the options do not fit or a file cannot be
        written.
    """
    domino = options.schedule is not None
    outputs = ("domino.png", "domino.trace.json") if domino else ("train.png",)
    files = [
        *(options.out / name for name in outputs),
        *(file for file in (options.json, options.trace) if file),
    ]
    try:
        options.check()
        prepare(*files)
        corpus_N = corpus.load_corpus()
    except (ValueError, RuntimeError) as error:
        print(f"bench train: {error}", file=sys.stderr)
        return 2
    print(_introduction(options, len(corpus_N)), flush=True)

    train: Callable[..., Any] = train_schedules if domino else train_rank
    begin = time.perf_counter()
    with interpreted():
        reports = run_ranks(
            train,
            options.ranks,
            options,
            dict(factories),
            timeout=120 + (SECONDS_PER_STEP + _in_flight(options)) * (options.steps + 1),
        )
    seconds = time.perf_counter() - begin

    if domino:
        verdict, figures = _show_schedules(options, merge_schedules(reports), seconds)
    else:
        verdict, figures = _show_dispatchers(options, merge(reports), seconds, corpus_N)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.trace:
        write_trace(options.trace, trace_of(options, reports))
    print("Wrote " + " and ".join(map(str, files)))
    return 0 if verdict is None or verdict.agree else 1


def _show_dispatchers(
    options: Options, trainings: dict[str, Training], seconds: float, corpus_N: Tensor
) -> tuple[Agreement | None, dict[str, Any]]:
    verdict = compare_all(trainings)
    figures = figures_of(options, trainings, verdict, seconds)
    print("", format_table(trainings, figures), "", *([verdict.text] if verdict else []), sep="\n")
    draw(options.out / "train.png", options, trainings, _landmarks(corpus_N), verdict)
    return verdict, figures


def _show_schedules(
    options: Options, trainings: dict[str, ScheduleTraining], seconds: float
) -> tuple[Agreement, dict[str, Any]]:
    verdict = compare(trainings["sync"], trainings["domino"])
    print("", format_schedules(options, trainings, seconds), "", verdict.text, sep="\n")
    M = options.num_micro_batches
    titles = {
        "sync": f"sync: 1 x {options.tokens} tokens",
        "domino": f"domino: {M} x {options.tokens // M} tokens",
    }
    link = options.emulated_link
    save_picture(
        options.out / "domino.png",
        {titles[name]: training.timelines[0] for name, training in trainings.items()},
        f"One training step of {options.layers} layers on rank 0 of {options.ranks}"
        + (f", over an emulated link: {describe(link)}" if link else ""),
    )
    save_trace(options.out / "domino.trace.json", trainings["domino"].timelines)
    return verdict, schedule_figures(options, trainings, verdict, seconds)


def _in_flight(options: Options) -> float:
    """Return how long the exchanges of a step of both trainings are in flight, if nothing overlaps."""
    link = options.emulated_link
    if link is None:
        return 0.0
    exchanges = 4 * options.layers * (1 + options.num_micro_batches)
    return exchanges * link.seconds(options.ranks * options.tokens * options.dim * 4)


def _introduction(options: Options, num_bytes: int) -> str:
    local = options.experts // options.ranks
    return (
        f"{options.ranks} ranks, processes on this machine's CPUs; kernels run in Triton's interpreter.\n"
        f"{options.layers} layers of {options.experts} experts, {local} on each rank; each token's "
        f"{options.dim} numbers go to its best {options.top_k}.\n"
        f"{options.steps} steps of {options.ranks} x {options.tokens} tokens, "
        f"out of {num_bytes // 1000} kB of text that Python ships: its help topics."
        + (
            f"\nDomino cuts a rank's into {options.num_micro_batches} micro-batches."
            if options.schedule is not None
            else ""
        )
    )


def _landmarks(corpus_N: Tensor) -> list[tuple[str, float]]:
    """Return the losses of models that know less than this one can learn."""
    return [
        ("a blind guess, ln 256", math.log(256)),
        ("how often each byte occurs", corpus.entropy(corpus_N, 1)),
        ("how often each pair occurs", corpus.entropy(corpus_N, 2)),
    ]
