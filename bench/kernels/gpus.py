"""What the targets' multiprocessors hold, and how many programs of a kernel that makes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU with this instruction set.

    Attributes:
        multiprocessors: of the GPU.
        registers: of a multiprocessor.
        shared: bytes of shared memory of a multiprocessor.
        warps: that a multiprocessor holds.
        programs: that a multiprocessor holds.
    """

    multiprocessors: int
    registers: int = 65536
    shared: int = 228 << 10
    warps: int = 64
    programs: int = 32

    def resident(self, registers: int, shared: int, warps: int, grid: int) -> float:
        """Return the programs that a multiprocessor runs at once; a fraction where the grid is smaller.

        Args:
            registers: of a thread; a warp is given them in steps of 256, 8 a thread.
            shared: bytes of a program, what the hardware reserves included.
            warps: of a program.
            grid: programs in all.

        Example: 132 multiprocessors, 4 warps of 128 registers a thread: 4 programs fill the registers.
            >>> GPUS["sm_90"].resident(registers=128, shared=1024, warps=4, grid=10_000)
            4
            >>> GPUS["sm_90"].resident(registers=128, shared=1024, warps=4, grid=264)
            2.0
        """
        of_program = warps * 32 * max(8, math.ceil(registers / 8) * 8)
        fits = min(
            self.registers // of_program,
            self.shared // shared if shared else self.programs,
            self.warps // warps,
            self.programs,
        )
        return min(fits, grid / self.multiprocessors)


GPUS = {
    "sm_80": Gpu(multiprocessors=108, shared=164 << 10),
    "sm_90": Gpu(multiprocessors=132),
    "sm_100": Gpu(multiprocessors=148),
}
"""A100, H100 and B200; what is compiled for anything else has no figures of residency."""
