"""What the kernels see of a lane, and the numbers that kernels and host share.

A lane keeps its epochs on the device, in `state`, so that recorded launches can be
replayed; it reports what went wrong through `status`, which the host can read without
waiting for the device. Flags, counts, headers and rows lie in symmetric memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from symm_a2a.kernels.blocks import Blocks
from symm_a2a.layout import ArenaLayout


class Kind(IntEnum):
    """The four operations; two bits of a ready word."""

    DISPATCH = 0
    COMBINE = 1
    DISPATCH_BACKWARD = 2
    COMBINE_BACKWARD = 3

    @property
    def scatters(self) -> bool:
        """Whether rows go from origins to experts; otherwise from experts to origins."""
        return self in (Kind.DISPATCH, Kind.COMBINE_BACKWARD)

    @property
    def title(self) -> str:
        """The operation's name in messages."""
        return self.name.lower().replace("_", " ")


class Cell(IntEnum):
    """Places in a lane's `state`: int64, device memory, written by this rank alone."""

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


class Wait(IntEnum):
    """What a kernel, or the host, was waiting for when it gave up."""

    COPIES = 1
    CREDIT = 2
    COUNTS = 3


class Report(IntEnum):
    """Places in a lane's `status`: int64, readable by the host at any time.

    `FAILURE` is `kind << 4 | wait`, written last. From `WORDS` on stand the `W` flag words
    as they were seen.
    """

    FAILURE = 0
    EPOCH = 1
    LABEL = 2
    OVERFLOW_ROWS = 3
    INVALID_IDS = 4
    WORDS = 8


STATE_CELLS = 16

# A flag word is `epoch << 30 | label << 24 | copies`, with
# `label = (dispatch epoch mod 16) << 2 | kind`; free and counts flags have only the epoch.
EPOCH_SHIFT = 30
LABEL_SHIFT = 24
LABEL_MASK = 63
COPIES_MASK = (1 << 24) - 1


@dataclass(frozen=True)
class Channel:
    """The device side of a lane on one rank.

    Attributes:
        rank: this rank.
        layout: sizes and offsets, equal on every rank.
        peers_W: int64, the address of this lane in every rank's arena.
        abort_W: int64, this rank's abort words.
        local: this rank's regions by name, as typed views.
        state: int64 `(STATE_CELLS,)`, see `Cell`.
        status: int64 `(Report.WORDS + W,)`, see `Report`.
        polls: how often a wait looks before it gives up; 0 where the host has waited.
        spins: whether a launch ends only when every peer's copies have arrived.
        programs: programs that fill the device.
        blocks: tile sizes.
    """

    rank: int
    layout: ArenaLayout
    peers_W: torch.Tensor
    abort_W: torch.Tensor
    local: dict[str, torch.Tensor]
    state: torch.Tensor
    status: torch.Tensor
    polls: int
    spins: bool
    programs: int
    blocks: Blocks

    def offset(self, region: str) -> int:
        """Return where a region starts, in bytes from the lane's address on any rank."""
        return self.layout.regions[region].offset

    def grid(self, work: int) -> tuple[int]:
        """Return a grid of at most `programs`; never 0, which Triton would silently skip."""
        return (max(1, min(work, self.programs)),)
