"""What `python -m bench kernels` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ShapeName = Literal["all", "olmoe", "dsv3", "qwen3", "kraken", "small"]
Arch = Literal["sm_80", "sm_90", "sm_100", "gfx942"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compile every kernel for every target, read the machine code, and check it against the rules.

    No GPU is needed. A row per kernel says what it costs (registers, spills, instructions) and what it can
    keep going (warps, bytes of loads in flight); the rules, bench/kernels/rules.py, say what these must be.
    Where one is broken the exit code is 1.
    """

    arch: tuple[Arch, ...] = ("sm_80", "sm_90", "sm_100", "gfx942")
    """Targets. gfx942 is compiled, no more: what is read is the machine code of NVIDIA GPUs."""
    shape: tuple[ShapeName, ...] = ("olmoe",)
    """Sizes of a layer, on which block sizes and grids depend. One shape by default, for a table that can be
    read; its code differs little from that of the others."""
    programs: int | None = None
    """A budget, as `EPConfig.num_programs`: the kernels are compiled in programs of 16 warps then, and what
    is said of a multiprocessor is said of one that is given a program. None for a whole GPU."""
    json: Path | None = None
    """File to write all figures to, and the broken rules, as one JSON object."""

    @property
    def shapes(self) -> tuple[str, ...]:
        """The shapes to compile for, each once."""
        names = ("olmoe", "dsv3", "qwen3", "kraken", "small")
        return names if "all" in self.shape else tuple(dict.fromkeys(self.shape))
