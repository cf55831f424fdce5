"""What a dispatcher is built from: sizes, capacities, limits."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import torch

from symm_a2a.errors import ConfigError
from symm_a2a.layout import MAX_INDEX, ArenaLayout
from symm_a2a.placement import Placement

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


MAX_PAD = 1 << 16
"""Rows that an expert's may be padded to a multiple of; grouped GEMMs want 16 to 128."""


def debugging() -> bool:
    """Whether sections are checked before they are read, and poisoned before they are freed.

    The environment variable `SYMM_A2A_DEBUG` says so, read when an arena is made; ranks may differ in it.

    Raises:
        ConfigError: it is neither "1", nor "0", empty or unset.
    """
    value = os.environ.get("SYMM_A2A_DEBUG", "")
    if value not in ("", "0", "1"):
        raise ConfigError(f'expected SYMM_A2A_DEBUG to be "0" or "1", got {value!r}')
    return value == "1"


@dataclass(frozen=True, kw_only=True)
class EPConfig:
    """Sizes and policies of an expert-parallel exchange; equal on every rank.

    Args:
        num_experts: E, the experts of all ranks together; without a placement a multiple of the ranks.
        top_k: K, the experts each token is routed to.
        hidden_dim: D, the elements of a token row.
        max_tokens_per_rank: C, the most tokens a rank may dispatch at once. Symmetric
            memory is sized by it; the row buffers are not.
        dtype: of token rows: bfloat16, float16, float32, or float64 (gradient checks).
        num_lanes: independent exchanges that can be in flight at once. Two are the
            double buffer.
        capacity: rows a rank can receive. `"exact"` allocates what arrived, for one read
            of the row count by the host; an `int`, a multiple of `pad_multiple`, allocates
            that many rows (1 is one row, 1.0 the mean) and never makes the host wait. So does
            a `float`, the capacity factor:
            that many times `max_tokens_per_rank * top_k`, the mean over ranks that are full,
            and what padding can add; `capacity_rows` says how many.
        pad_multiple: each expert's rows start at a multiple of this many rows and are
            padded with zero rows to the next one.
        overflow: what happens to rows past a static capacity. They are always dropped,
            the last experts' first; `"raise"` also raises `CapacityError` at the next
            call, `"drop"` only counts them.
        timeout: seconds a rank waits for a peer before it raises `PeerTimeoutError`.
        num_programs: the most programs that a kernel may have on a GPU, each of 16 warps and so at home
            on one multiprocessor; None for as many as fill the GPU. With a budget the others are left to
            what runs beside the exchange. Has no effect in the interpreter.
        placement: which rank holds which experts, replicas included; None for equal, contiguous parts. It
            costs one launch in a dispatch.

    Raises:
        ConfigError: a value is out of range; the message says what was expected.

    Example:
        >>> cfg = EPConfig(num_experts=64, top_k=8, hidden_dim=7168, max_tokens_per_rank=4096)
        >>> round(cfg.symmetric_bytes(world_size=8) / 2**30, 2)
        1.76
    """

    num_experts: int
    top_k: int
    hidden_dim: int
    max_tokens_per_rank: int
    dtype: torch.dtype = torch.bfloat16
    num_lanes: int = 2
    capacity: int | float | Literal["exact"] = "exact"
    pad_multiple: int = 1
    overflow: Literal["raise", "drop"] = "raise"
    timeout: float = 60.0
    num_programs: int | None = None
    # Shown by its mark, where ranks are compared: it may be long.
    placement: Placement | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        counts = ("num_experts", "top_k", "hidden_dim", "max_tokens_per_rank", "num_lanes", "pad_multiple")
        for name in (*counts, *(() if self.num_programs is None else ("num_programs",))):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"expected {name} to be a positive int, got {value!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"expected dtype to be one of {DTYPES}, got {self.dtype!r}")
        if self.pad_multiple >= MAX_PAD:
            raise ConfigError(f"expected pad_multiple < {MAX_PAD}, got {self.pad_multiple}")
        self._check_capacity(self.capacity)
        if self.overflow not in ("raise", "drop"):
            raise ConfigError(f'expected overflow to be "raise" or "drop", got {self.overflow!r}')
        if not isinstance(self.placement, (Placement, type(None))):
            raise ConfigError(f"expected placement to be a Placement, got {self.placement!r}")
        if self.placement is not None and self.placement.num_experts != self.num_experts:
            raise ConfigError(
                f"expected a placement of num_experts = {self.num_experts}, got one of "
                f"{self.placement.num_experts} experts"
            )
        number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        if not number or not 0 < self.timeout < math.inf:
            raise ConfigError(f"expected timeout to be a positive number of seconds, got {self.timeout!r}")

    @property
    def mark(self) -> str:
        """What ranks compare: all that must be equal on them, the placement by its own mark."""
        placement = None if self.placement is None or self.placement.is_contiguous else self.placement.mark
        return f"{self} placement={placement}"

    def _check_capacity(self, capacity: object) -> None:
        if isinstance(capacity, str) and capacity == "exact":
            return
        if isinstance(capacity, float) and 0 < capacity < math.inf:
            return
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(
                'expected capacity to be "exact", a positive int, or a positive float for a capacity '
                f"factor, got {capacity!r}"
            )
        if capacity >= MAX_INDEX:
            raise ConfigError(f"expected capacity < {MAX_INDEX}, got {capacity}")
        if capacity % self.pad_multiple:
            raise ConfigError(
                f"expected capacity to be a multiple of pad_multiple = {self.pad_multiple}, so that clamped "
                f"counts stay multiples, got {capacity}"
            )

    def capacity_rows(self, world_size: int) -> int | Literal["exact"]:
        """Return the rows that a dispatch gives in a group of `world_size` ranks, or `"exact"`.

        Of a capacity factor that is `ceil(factor * C * K)`, with the factor as it is written, at most the
        `W * C * K` that can arrive, plus `pad_multiple - 1` for each local expert, up to the next multiple of
        `pad_multiple`.

        Raises:
            ConfigError: a factor for sizes that do not fit the ranks, or of more rows than 32-bit indices can
                address.

        Example:
            >>> sizes = dict(num_experts=4, top_k=2, hidden_dim=8, max_tokens_per_rank=10, pad_multiple=8)
            >>> EPConfig(**sizes, capacity=1.25).capacity_rows(world_size=2)  # 25 rows and 2 * 7 to pad
            40
        """
        if not isinstance(self.capacity, float):
            return self.capacity
        num_local, pad = self._layout(world_size).num_local_experts, self.pad_multiple
        mean = self.max_tokens_per_rank * self.top_k
        # 1.1 * 100 are 110 rows, of which binary fractions make 111.
        rows = math.ceil(Fraction(repr(float(self.capacity))) * mean)
        rows = min(rows, world_size * mean) + num_local * (pad - 1)
        rows = -(-rows // pad) * pad
        if rows >= MAX_INDEX:
            raise ConfigError(f"expected a capacity factor of fewer than {MAX_INDEX} rows, got {rows}")
        return rows

    def layout(self, world_size: int) -> ArenaLayout:
        """Return the arena's layout for a group of `world_size` ranks.

        Raises:
            ConfigError: the experts do not divide among the ranks, the placement is for another number of
                ranks, or a size, or the rows of a capacity factor, exceed what the device's 32-bit indices
                can address.
        """
        layout = self._layout(world_size)
        self.capacity_rows(world_size)
        return layout

    def _layout(self, world_size: int) -> ArenaLayout:
        placement = self.placement
        if placement is not None and placement.world_size != world_size:
            raise ConfigError(
                f"expected a placement for {world_size} ranks, got one for {placement.world_size}"
            )
        return ArenaLayout(
            world_size=world_size,
            num_experts=self.num_experts if placement is None else placement.num_places,
            top_k=self.top_k,
            hidden_dim=self.hidden_dim,
            max_tokens=self.max_tokens_per_rank,
            dtype=self.dtype,
            num_lanes=self.num_lanes,
        )

    def symmetric_bytes(self, world_size: int) -> int:
        """Return the symmetric memory one rank will allocate, in bytes, exactly."""
        return self.layout(world_size).nbytes
