"""`python -m bench train`: train with both dispatchers, compare, and show what happened."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping

from torch import Tensor

from bench.dispatchers import DISPATCHERS, DispatcherFactory
from bench.host import interpreted
from bench.outputs import prepare
from bench.trace import write_trace
from bench.train import corpus
from bench.train.agreement import compare
from bench.train.options import Options
from bench.train.picture import draw
from bench.train.ranks import train_rank
from bench.train.results import figures_of, merge, trace_of
from bench.train.table import format_table
from symm_a2a.testing import run_ranks

SECONDS_PER_STEP = 60.0
"""What a step may take before the ranks are given up; generous, for a machine with much else to do."""


def run(options: Options, factories: Mapping[str, DispatcherFactory] = DISPATCHERS) -> int:
    """Train, print a table, write a picture; return the exit code.

    Args:
        options: what to do.
        factories: the dispatchers, by the names "symm" and "all_to_all".

    Returns:
        0; or 1 if the trainings differ by more than rounding, 2 if the options do not fit or a file cannot be
        written.
    """
    picture = options.out / "train.png"
    files = [picture, *(file for file in (options.json, options.trace) if file)]
    try:
        options.check()
        prepare(*files)
        corpus_N = corpus.load_corpus()
    except (ValueError, RuntimeError) as error:
        print(f"bench train: {error}", file=sys.stderr)
        return 2
    print(_introduction(options, len(corpus_N)), flush=True)

    begin = time.perf_counter()
    with interpreted():
        reports = run_ranks(
            train_rank,
            options.ranks,
            options,
            dict(factories),
            timeout=120 + SECONDS_PER_STEP * options.steps,
        )
    seconds = time.perf_counter() - begin

    trainings = merge(reports)
    verdict = compare(*trainings.values()) if len(trainings) == 2 else None
    figures = figures_of(options, trainings, verdict, seconds)
    print("", format_table(trainings, figures), "", *([verdict.text] if verdict else []), sep="\n")

    draw(picture, options, trainings, _landmarks(corpus_N), verdict)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.trace:
        write_trace(options.trace, trace_of(options, reports))
    print("Wrote " + " and ".join(map(str, files)))
    return 0 if verdict is None or verdict.agree else 1


def _introduction(options: Options, num_bytes: int) -> str:
    local = options.experts // options.ranks
    return (
        f"{options.ranks} ranks, processes on this machine's CPUs; kernels run in Triton's interpreter.\n"
        f"{options.layers} layers of {options.experts} experts, {local} on each rank; each token's "
        f"{options.dim} numbers go to its best {options.top_k}.\n"
        f"{options.steps} steps of {options.ranks} x {options.tokens} tokens, "
        f"out of {num_bytes // 1000} kB of text that Python ships: its help topics."
    )


def _landmarks(corpus_N: Tensor) -> list[tuple[str, float]]:
    """Return the losses of models that know less than this one can learn."""
    return [
        ("a blind guess, ln 256", math.log(256)),
        ("how often each byte occurs", corpus.entropy(corpus_N, 1)),
        ("how often each pair occurs", corpus.entropy(corpus_N, 2)),
    ]
