"""What `python -m bench ulysses` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Op = Literal["seq-to-head", "head-to-seq", "forward-backward"]
BackendName = Literal["symm", "all_to_all"]
DtypeName = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure sequence exchanges of this library, and reshape, all_to_all_single and permute.

    Under torchrun every rank has a GPU. Without it the ranks are processes on this machine's CPUs, kernels
    run in Triton's interpreter, and every time is marked "interpreted": it says nothing about the library's
    speed. Results are checked bit for bit before anything is timed; a case whose results are wrong is an
    error row, is not timed, and makes the exit code 1.
    """

    op: tuple[Op, ...] = ("seq-to-head", "head-to-seq", "forward-backward")
    """What to measure. forward-backward: to heads and back, and the backward of both."""
    backend: tuple[BackendName, ...] = ("symm", "all_to_all")
    """This library, and NCCL's (on CPUs gloo's) all_to_all_single between permutations."""
    tokens: tuple[int, ...] | None = None
    """Tokens of a rank. (4096 and 32768; on CPUs 16)"""
    batch: int = 1
    """Sequences."""
    heads: int | None = None
    """Heads of all ranks together, a multiple of the ranks. (32; on CPUs 8)"""
    dim: int | None = None
    """Elements of a head. (128; on CPUs 16)"""
    dtype: DtypeName = "bfloat16"
    """Of the elements."""
    ranks: int | None = None
    """Processes, without torchrun. (4)"""
    iterations: int | None = None
    """Timed runs of each case, the same on every rank. (50; on CPUs 3)"""
    warmup: int | None = None
    """Runs before them that are not timed. (10; on CPUs 1)"""
    csv: Path = Path("out/ulysses.csv")
    """File to write the figures to, one row per case, backend and metric."""
    seed: int = 0
    """Of the random contents."""

    def check(self) -> None:
        """Check what the options must fulfil, wherever they run.

        Raises:
            ValueError: says what was expected, and what came.
        """
        for name in ("op", "backend", "tokens"):
            if getattr(self, name) == ():
                raise ValueError(f"expected at least one --{name}, got none")
        for name in ("batch", "heads", "dim", "ranks", "iterations", *(["tokens"] if self.tokens else [])):
            value = getattr(self, name)
            for each in value if isinstance(value, tuple) else (value,):
                if each is not None and each < 1:
                    raise ValueError(f"expected a positive --{name}, got {each}")
        if self.warmup is not None and self.warmup < 0:
            raise ValueError(f"expected --warmup of 0 or more, got {self.warmup}")
