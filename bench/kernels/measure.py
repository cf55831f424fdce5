"""Compile and read kernels in processes of their own.

Where there is no GPU, importing the library turns Triton's interpreter on for the whole process, and what is
interpreted cannot be compiled: processes that compile are started with it turned off. Nothing here imports
the library or Triton before a task runs.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, TypeVar

from bench.host import compiled
from bench.kernels.figures import Figures, measure
from bench.kernels.gpus import GPUS

if TYPE_CHECKING:
    from bench.shapes import Shape

Result = TypeVar("Result")


def measure_named(shape: str, target: str, num_programs: int | None = None) -> list[Figures]:
    """Measure every form of every kernel, as one of the named shapes launches them."""
    from bench.shapes import SHAPES

    return measure_shape(SHAPES[shape], target, num_programs=num_programs)


def measure_shape(
    shape: Shape, target: str, pad_multiple: int = 1, num_programs: int | None = None
) -> list[Figures]:
    """Measure every form of every kernel, as a shape launches them.

    Args:
        shape: sizes of the exchange.
        target: one of `bench.compile.TARGETS`.
        pad_multiple: of each expert's rows.
        num_programs: as of `EPConfig`.
    """
    from bench.compile import launches_of

    # Of Triton 3.9, about the defaults of 3.10; it is not for who runs this.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    # What has no figures of residency is given a grid all the same.
    gpu = GPUS.get(target, GPUS["sm_90"])
    cfg = shape.config(num_lanes=1, pad_multiple=pad_multiple, num_programs=num_programs)
    launches = launches_of(cfg, shape.ranks, shape.tokens, gpu.multiprocessors)
    return [measure(launch, shape, target) for launch in launches]


def in_processes(
    tasks: Sequence[tuple[Callable[..., Result], tuple]], processes: int = 2
) -> Iterator[tuple[int, Result]]:
    """Run tasks where kernels can be compiled; yield their numbers and results as they come.

    Args:
        tasks: functions of a module, and their arguments.
        processes: at most.
    """
    spawn = multiprocessing.get_context("spawn")
    with compiled(), ProcessPoolExecutor(min(processes, len(tasks)), mp_context=spawn) as pool:
        waiting = {pool.submit(function, *given): number for number, (function, given) in enumerate(tasks)}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)
