"""What `python -m bench a2av` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.shapes import SHAPES

Op = Literal["dispatch", "combine", "forward-backward", "counts", "flags", "even"]
BackendName = Literal["symm", "all_to_all", "all_gather", "replicated", "local"]
RoutingName = Literal["balanced", "uniform", "zipf", "one-hot", "one-rank", "trace"]
PlacementName = Literal["contiguous", "worst", "best", "replicas"]
DtypeName = Literal["bfloat16", "float16", "float32"]

ROUTED: tuple[Op, ...] = ("dispatch", "combine", "forward-backward")

OPS: dict[BackendName, tuple[Op, ...]] = {
    "symm": (*ROUTED, "counts", "flags", "even"),
    "all_to_all": (*ROUTED, "counts", "flags", "even"),
    "all_gather": (*ROUTED, "counts"),
    "replicated": ROUTED,
    "local": ROUTED,
}
"""What each backend does in a way of its own."""

PLACED: tuple[BackendName, ...] = ("symm", "all_to_all", "all_gather")
"""Backends to which it matters which rank has which expert."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the exchanges of this library and of the standard all-to-all.

    Under torchrun every rank has a GPU. Without it the ranks are processes on this machine's CPUs, kernels
    run in Triton's interpreter, sizes are scaled down, and every time is marked "interpreted": it says
    nothing about the library's speed. Results are checked before anything is timed; a case whose results
    are wrong is an error row, is not timed, and makes the exit code 1.
    """

    op: tuple[Op, ...] = ("dispatch", "combine", "forward-backward", "counts", "flags", "even")
    """What to measure. counts: every rank's slots of every expert, to every rank. flags: a barrier.
    even: an all-to-all of equal parts, over --sizes."""
    backend: tuple[BackendName, ...] = ("symm", "all_to_all")
    """symm: this library. The others use NCCL's (on CPUs gloo's) collectives. all_to_all: one row per slot.
    all_gather: all tokens to all ranks, and a reduce-scatter back. replicated: every rank has the tokens of
    all to begin with, and its combine is an all-reduce. local: every rank has all experts, and nothing is
    sent: what ordering the rows costs. The last three run dispatch, combine and forward-backward, all_gather
    counts too; other operations are left out."""
    routing: tuple[RoutingName, ...] = ("balanced", "uniform", "zipf", "one-hot", "one-rank")
    """How tokens choose experts. balanced: dealt out in turn; uniform: K different ones at random; zipf: the
    same, the n-th most popular expert 1/n as often as the first; one-hot: one slot a token, all of one
    expert; one-rank: experts of rank 0 alone; trace: as in --trace."""
    placement: tuple[PlacementName, ...] = ("contiguous",)
    """Which rank has which experts, made of the loads of the very ids that are sent. contiguous: equal parts,
    in order; worst: the busiest experts on one rank; best: what `symm_a2a.rebalance` proposes; replicas: the
    same with one more place on each rank, for second copies of the busiest. Any but the first are for
    dispatch, combine and forward-backward, and for symm, all_to_all and all_gather."""
    shape: tuple[str, ...] = ("olmoe",)
    """Names of `bench/shapes.py`: olmoe, dsv3, qwen3, kraken, small. Without GPUs, tokens and hidden are
    scaled down to 64 and 128."""
    tokens: int | None = None
    """Tokens of a rank, in place of the shape's."""
    hidden: int | None = None
    """Elements of a row, in place of the shape's."""
    experts: int | None = None
    """Experts of all ranks together, in place of the shape's; a multiple of the ranks."""
    top_k: int | None = None
    """Experts of a token, in place of the shape's."""
    dtype: DtypeName | None = None
    """Of rows, in place of the shape's."""
    sizes: tuple[int, ...] | None = None
    """Of "even": bytes from each rank to each other one. (4 KiB to 64 MiB; on CPUs 1 to 64 KiB)"""
    capacity: Literal["exact", "static"] = "exact"
    """Of symm: rows as they come, and the host waits once; or as many as the busiest rank gets."""
    ranks: int | None = None
    """Processes, without torchrun. (4)"""
    iterations: int | None = None
    """Timed runs of each case, the same on every rank. (50; on CPUs 3)"""
    warmup: int | None = None
    """Runs before them that are not timed. (10; on CPUs 1)"""
    graph: bool = False
    """Time replays of CUDA graphs, where an operation can be captured: symm with --capacity static."""
    trace: Path | None = None
    """Routing trace, as `python -m bench train --trace FILE` writes it."""
    trace_step: int = -1
    """Which step of the trace; negative ones count from the end."""
    trace_layer: int = 0
    """Which layer of the trace."""
    csv: Path = Path("out/a2av.csv")
    """File to write the figures to, one row per case, backend and metric."""
    json: Path | None = None
    """File to write the same rows to, as JSON."""
    seed: int = 0
    """Of the random routings and scores."""

    def check(self) -> None:
        """Check what the options must fulfil, wherever they run.

        Raises:
            ValueError: says what was expected, and what came.
        """
        for name in ("op", "backend", "routing", "placement", "shape", "sizes"):
            if getattr(self, name) == ():
                raise ValueError(f"expected at least one --{name}, got none")
        for name in self.backend:
            if not set(self.op) & set(OPS[name]):
                raise ValueError(
                    f"expected --op with any of {', '.join(OPS[name])} for --backend {name}, "
                    f"got {', '.join(self.op)}"
                )
        for name in ("tokens", "hidden", "experts", "top_k", "ranks", "iterations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected a positive --{name.replace('_', '-')}, got {value}")
        if self.warmup is not None and self.warmup < 0:
            raise ValueError(f"expected --warmup of 0 or more, got {self.warmup}")
        if self.hidden is not None and self.hidden < 4:
            raise ValueError(f"expected --hidden of at least 4, to tell all rows apart, got {self.hidden}")
        for size in self.sizes or ():
            if size < 16:
                raise ValueError(f"expected --sizes of at least 16 bytes, got {size}")
        for shape in self.shape:
            if shape not in SHAPES:
                raise ValueError(f"expected --shape to be one of {', '.join(SHAPES)}, got {shape}")
        if ("trace" in self.routing) != (self.trace is not None):
            raise ValueError(
                "expected --routing trace and --trace FILE together, got "
                + ("no file" if self.trace is None else f"routings {', '.join(self.routing)}")
            )
        if self.graph and self.capacity != "static":
            raise ValueError(
                "expected --capacity static with --graph, got exact, for which the host reads the row count "
                "in every dispatch: that cannot be captured"
            )
