"""The arena: where every region lies in a rank's symmetric memory, in one place.

Shape letters, here and everywhere: `W` ranks, `C` token capacity per rank, `D` hidden,
`P` hidden padded to 16 bytes, `K` top-k, `E` experts, `L = E / W` local experts.

Each rank owns one allocation of `ArenaLayout.nbytes` bytes. It holds one row of abort
words, then the lanes, all alike: a region sits at the same offset in every lane, and at the
same offset on every rank. Section `s` of a region (its leading index) is written by rank
`s` alone. The flags come first, so that zeroing them touches a few pages only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from symm_a2a.errors import ConfigError

ALIGNMENT = 256
"""Bytes between the starts of regions: a cache line pair, and wide enough for any store."""

STORE_BYTES = 16
"""Width of a payload store; rows are padded to a multiple of it."""

MAX_TOKENS = 1 << 23
"""A ready word has 23 bits for the number of copies."""

MAX_INDEX = 1 << 31
"""Copy, slot and position indices are int32 on the device."""

FLAGS = ("counts_ready", "scatter_ready", "scatter_free", "gather_ready", "gather_free")


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Region:
    """One region of a lane: its offset from the lane's start, and what it holds."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the region's elements take, without alignment."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, arena: torch.Tensor, lane_offset: int) -> torch.Tensor:
        """Return the region as a typed view of an arena's bytes.

        Args:
            arena: uint8 `(nbytes,)`, one rank's arena.
            lane_offset: where the lane starts in it, in bytes.
        """
        start = lane_offset + self.offset
        return arena[start : start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class ArenaLayout:
    """Sizes and offsets of an arena; equal on every rank of a group.

    Raises:
        ConfigError: the experts do not divide among the ranks, or an index would not
            fit in the 32 bits that the device uses for it.
    """

    world_size: int
    num_experts: int
    top_k: int
    hidden_dim: int
    max_tokens: int
    dtype: torch.dtype
    num_lanes: int

    def __post_init__(self) -> None:
        W, E, C, K = self.world_size, self.num_experts, self.max_tokens, self.top_k
        if isinstance(W, bool) or not isinstance(W, int) or W < 1:
            raise ConfigError(f"expected world_size to be a positive int, got {W!r}")
        if E % W:
            raise ConfigError(
                f"expected num_experts divisible by the number of ranks, got {E} experts for {W} ranks"
            )
        limits = (
            ("max_tokens_per_rank", C, MAX_TOKENS),
            ("max_tokens_per_rank * top_k * local experts", C * K * self.num_local_experts, MAX_INDEX),
            ("ranks * max_tokens_per_rank * top_k", W * C * K, MAX_INDEX),
        )
        for name, value, limit in limits:
            if value >= limit:
                raise ConfigError(f"expected {name} < {limit}, got {value}")

    @property
    def num_local_experts(self) -> int:
        """L, the experts of one rank."""
        return self.num_experts // self.world_size

    @property
    def padded_hidden(self) -> int:
        """P, the elements from one payload row to the next: `hidden_dim` up to 16 bytes."""
        per_store = STORE_BYTES // self.dtype.itemsize
        return -(-self.hidden_dim // per_store) * per_store

    @property
    def score_dtype(self) -> torch.dtype:
        """Scores travel in fp32, in fp64 where the rows are fp64."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def header_dtype(self) -> torch.dtype:
        """Half of a header record: an integer as wide as a score."""
        return torch.int64 if self.dtype == torch.float64 else torch.int32

    @cached_property
    def regions(self) -> dict[str, Region]:
        """The regions of a lane by name, in memory order."""
        W, C, K, P = self.world_size, self.max_tokens, self.top_k, self.padded_hidden
        contents: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            **{flag: ((W,), torch.int64) for flag in FLAGS},
            # Of each rank its slots for every expert, its copies for every rank, its placement's mark.
            "counts": ((W, self.num_experts + W + 1), torch.int32),
            "headers": ((W, C, K, 2), self.header_dtype),
            "scatter_rows": ((W, C, P), self.dtype),
            "gather_rows": ((W, C, P), self.dtype),
            "gather_scores": ((W, C, K), self.score_dtype),
        }
        regions, offset = {}, 0
        for name, (shape, dtype) in contents.items():
            regions[name] = Region(offset, shape, dtype)
            offset += aligned(regions[name].nbytes)
        return regions

    @cached_property
    def abort(self) -> Region:
        """The abort words, one a rank, at the start of the arena."""
        return Region(0, (self.world_size,), torch.int64)

    @cached_property
    def lane_bytes(self) -> int:
        """Bytes from one lane to the next."""
        return sum(aligned(region.nbytes) for region in self.regions.values())

    @property
    def flag_bytes(self) -> int:
        """Bytes at the start of a lane that hold its flags, and must start as zeros."""
        return self.regions["counts"].offset

    def lane_offset(self, index: int) -> int:
        """Return where lane `index` starts in the arena, in bytes."""
        return aligned(self.abort.nbytes) + index * self.lane_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that one rank allocates."""
        return self.lane_offset(self.num_lanes)
