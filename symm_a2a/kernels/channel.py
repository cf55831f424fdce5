"""What the kernels see of a lane, and the numbers that kernels and host share.

A lane keeps its epochs on the device, in `state`, so that recorded launches can be
replayed; it reports what went wrong through `status`, which the host can read without
waiting for the device. Flags, counts, headers and rows lie in symmetric memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from symm_a2a.kernels.blocks import Blocks
from symm_a2a.layout import ArenaLayout


class Kind(IntEnum):
    """The operations, three bits of a ready word; those that move rows come first.

    A barrier is a scatter of nothing, and a broadcast of counts one of counts alone.
    """

    DISPATCH = 0
    COMBINE = 1
    DISPATCH_BACKWARD = 2
    COMBINE_BACKWARD = 3
    DISPATCH_AGAIN = 4
    DISPATCH_AGAIN_BACKWARD = 5
    BARRIER = 6
    COUNTS = 7

    @property
    def scatters(self) -> bool:
        """Whether rows go from origins to experts; otherwise from experts to origins."""
        return self not in (Kind.COMBINE, Kind.DISPATCH_BACKWARD, Kind.DISPATCH_AGAIN_BACKWARD)

    @property
    def moves_rows(self) -> bool:
        """Whether copies of rows go from rank to rank."""
        return self < Kind.BARRIER

    @property
    def follows(self) -> bool:
        """Whether it belongs to a dispatch before it."""
        return self.moves_rows and self != Kind.DISPATCH

    @property
    def direction(self) -> str:
        """Whose flags it raises: "scatter" or "gather", as the regions are named."""
        return "scatter" if self.scatters else "gather"

    @property
    def title(self) -> str:
        """The operation's name in messages."""
        return self.name.lower().replace("_", " ")


class Cell(IntEnum):
    """Places in a lane's `state`: int64, device memory, written by this rank alone.

    `ROWS` counts the rows that dispatches brought here; from `EXCHANGES` on stand the numbers
    of exchanges launched, by `Kind`, and from `COPIES` on `(6, W)` counts of copies sent, by kind and peer.
    """

    SCATTER_LAUNCHED = 0
    SCATTER_JOINED = 1
    GATHER_LAUNCHED = 2
    GATHER_JOINED = 3
    COUNTED = 4
    FAILED = 5
    DONE_COUNT = 8
    DONE_SCATTER = 9
    DONE_EXPAND = 10
    DONE_EXPAND_GRAD = 11
    DONE_GATHER = 12
    DONE_FINISH = 13
    ROWS = 14
    DONE_EXPAND_AGAIN = 15
    EXCHANGES = 16
    COPIES = 24

    @classmethod
    def launched(cls, *, scatters: bool) -> Cell:
        """Return the cell that counts the launches of a direction."""
        return cls.SCATTER_LAUNCHED if scatters else cls.GATHER_LAUNCHED

    @classmethod
    def joined(cls, *, scatters: bool) -> Cell:
        """Return the cell that counts the joins of a direction."""
        return cls.SCATTER_JOINED if scatters else cls.GATHER_JOINED


class Wait(IntEnum):
    """What a kernel, or the host, was waiting for when it gave up; or what came, and was wrong."""

    COPIES = 1
    CREDIT = 2
    COUNTS = 3
    PLACEMENT = 4


class Report(IntEnum):
    """Places in a lane's `status`: int64, readable by the host at any time.

    `FAILURE` is `kind << 4 | wait`, written last. From `WORDS` on stand the `W` flag words
    as they were seen, or the marks of the placements; `OWN` is the detail of this rank's word, or its mark.
    """

    FAILURE = 0
    EPOCH = 1
    OWN = 2
    OVERFLOW_ROWS = 3
    INVALID_IDS = 4
    WORDS = 8


def state_cells(world_size: int) -> int:
    """Return the length of a lane's `state`."""
    return Cell.COPIES + Kind.BARRIER * world_size


@dataclass
class HostCounts:
    """What the host has done in a lane so far.

    Attributes:
        launches: kernels launched.
        syncs: times that the host waited for a number of the device's.
        blocked: seconds spent waiting, for peers or for such a number.
        exchanges: launched, gathers and scatters.
    """

    launches: int = 0
    syncs: int = 0
    blocked: float = 0.0
    exchanges: list[int] = field(default_factory=lambda: [0, 0])


REGISTERS = 65536
"""32-bit registers of a multiprocessor."""

# A flag word is `epoch << 26 | kind << 23 | detail`. The detail of a dispatch is its copies for the peer;
# of what follows a dispatch, that one's epoch modulo 2**23; else 0. Free flags have only the epoch.
EPOCH_SHIFT = 26
KIND_SHIFT = 23
KIND_MASK = 7
DETAIL_MASK = (1 << 23) - 1


@dataclass(frozen=True)
class Channel:
    """The device side of a lane on one rank.

    Attributes:
        rank: this rank.
        layout: sizes and offsets, equal on every rank.
        peers_W: int64, the address of this lane in every rank's arena.
        abort_W: int64, this rank's abort words.
        local: this rank's regions by name, as typed views.
        state: int64 `(state_cells(W),)`, see `Cell`.
        status: int64 `(Report.WORDS + W,)`, see `Report`.
        ledger: int64 `(2,)`, where exchanges that no dispatcher makes are recorded; see `expand`.
        polls: how often a wait looks before it gives up; 0 where the host has waited.
        spins: whether a launch ends only when every peer's copies have arrived.
        programs: the most programs that a kernel may have; None for as many as fill the device.
        multiprocessors: of the device; what fills it is a number of programs for each of them.
        blocks: tile sizes.
        counts: what the host has done.
        holds: whether joins leave it to the host to free the sections, see `free`.
    """

    rank: int
    layout: ArenaLayout
    peers_W: torch.Tensor
    abort_W: torch.Tensor
    local: dict[str, torch.Tensor]
    state: torch.Tensor
    status: torch.Tensor
    ledger: torch.Tensor
    polls: int
    spins: bool
    programs: int | None
    multiprocessors: int
    blocks: Blocks
    counts: HostCounts
    holds: bool = False

    def offset(self, region: str) -> int:
        """Return where a region starts, in bytes from the lane's address on any rank."""
        return self.layout.regions[region].offset

    def launch(self, kernel: Any, work: int = 1, residency: int | None = None) -> Any:
        """Return what launches a kernel in a persistent grid, to be called with the kernel's arguments.

        The grid is never 0, which Triton would silently skip. The compiler may use as many registers as
        leave room for the programs that fill a multiprocessor, and is told so: left to itself it spills
        to get more programs there than there are.

        Args:
            kernel: decorated with `triton.jit`.
            work: the most programs that have something to do.
            residency: how many programs fill a multiprocessor; None for a kernel of one program.
        """
        self.counts.launches += 1
        if residency is None:
            return kernel[(1,)]
        most = self.multiprocessors * residency if self.programs is None else self.programs
        threads = 32 * self.blocks.warps
        registers = REGISTERS // (residency * threads) // 8 * 8
        return functools.partial(
            kernel[(max(1, min(work, most)),)], num_warps=self.blocks.warps, maxnreg=registers
        )
