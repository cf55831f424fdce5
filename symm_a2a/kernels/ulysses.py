"""What the kernels of a sequence exchange see: sizes, memory, and what one rank says of itself.

A tensor lies in one of two ways over the `W` ranks: every rank has all heads of a part of the sequence,
`(b, s, h, d)` with `s` its tokens, or all tokens of a part of the heads, `(b, W * s, H, d)`. Both
exchanges move rows of `H * d` elements: the row of a token and a rank's heads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch

from symm_a2a.config import DTYPES
from symm_a2a.errors import InputError
from symm_a2a.kernels.blocks import INTERPRETED, padded
from symm_a2a.kernels.channel import REGISTERS
from symm_a2a.layout import Region, aligned

WARPS = 4
"""Of a program."""

RESIDENCY = 6
"""Programs for every multiprocessor; with tiles of 4 KiB they keep 24 KiB in flight."""

TILE_BYTES = 4096 if not INTERPRETED else 1 << 20
"""Of the rows that a program moves at once. The interpreter is fastest with few, large tiles."""

MAX_TOKENS = 1 << 24
"""A card has 24 bits for the number of tokens, and as many for `d`."""

CARD_WORDS = 2
"""Words in which a rank says what it exchanges, see `Sizes.card`."""


class Kind(IntEnum):
    """What is exchanged; as in a ready word. A growth moves nothing, and shows the card alone."""

    SEQ_TO_HEAD = 0
    HEAD_TO_SEQ = 1
    GROWTH = 2

    @property
    def title(self) -> str:
        """The operation's name in messages."""
        return "growth for an exchange" if self == Kind.GROWTH else self.name.lower()


class Wait(IntEnum):
    """What a kernel reports: a peer that did not come, or one that exchanges something else."""

    PEERS = 1
    CARDS = 4


class Sizes(NamedTuple):
    """What a rank exchanges, seen from the side where it has all heads.

    Attributes:
        batch: b.
        tokens: s, of one rank.
        heads: h, of all ranks, before they are replicated.
        dim: d.
        dtype: of the elements.
        replicas: ranks that each head goes to.
    """

    batch: int
    tokens: int
    heads: int
    dim: int
    dtype: torch.dtype
    replicas: int

    @classmethod
    def of(cls, kind: Kind, shape: Sequence[int], dtype: torch.dtype, W: int, replicas: int) -> Sizes:
        """Return the sizes of what is exchanged, from the shape of one rank's input.

        Raises:
            InputError: a size that the exchange cannot say to the peers.
        """
        batch, tokens, heads, dim = shape
        if kind == Kind.HEAD_TO_SEQ:
            tokens, heads = tokens // W, heads * W // replicas
        for name, value, limit in (
            ("b * s, tokens of a rank", batch * tokens, MAX_TOKENS),
            ("b", batch, MAX_TOKENS),
            ("s", tokens, MAX_TOKENS),
            ("h, heads", heads, 1 << 16),
            ("d", dim, 1 << 24),
        ):
            if value >= limit:
                raise InputError(f"expected {name} < {limit}, got {value}")
        return cls(batch, tokens, heads, dim, dtype, replicas)

    @property
    def rows(self) -> int:
        """Rows that each rank sends to each."""
        return self.batch * self.tokens

    def local_heads(self, W: int) -> int:
        """Return H, the heads that a rank has all tokens of."""
        return self.heads * self.replicas // W

    def input_shape(self, kind: Kind, W: int) -> tuple[int, int, int, int]:
        """Return the shape of a rank's input."""
        if kind == Kind.HEAD_TO_SEQ:
            return self.batch, W * self.tokens, self.local_heads(W), self.dim
        return self.batch, self.tokens, self.heads, self.dim

    def output_shape(self, kind: Kind, W: int) -> tuple[int, int, int, int]:
        """Return the shape of a rank's result."""
        return self.input_shape(Kind.HEAD_TO_SEQ if kind == Kind.SEQ_TO_HEAD else Kind.SEQ_TO_HEAD, W)

    def nbytes(self, W: int) -> int:
        """Return the bytes that arrive at each rank."""
        return W * self.rows * self.local_heads(W) * self.dim * self.dtype.itemsize

    def card(self, kind: Kind) -> tuple[int, int]:
        """Return the words that tell peers what this rank exchanges: equal if and only if all sizes are.

        Neither fits in 32 bits, whatever the sizes: a kernel's argument has one type.
        """
        return (
            (self.batch + 1) << 32 | self.tokens,
            (DTYPES.index(self.dtype) + 1) << 56
            | kind << 52
            | self.replicas << 40
            | self.heads << 24
            | self.dim,
        )


def describe_card(words: Sequence[int], W: int) -> str:
    """Return what a rank's card says, in words.

    Example:
        >>> sizes = Sizes(2, 3, 8, 16, torch.float32, 1)
        >>> describe_card(sizes.card(Kind.HEAD_TO_SEQ), W=4)
        'head_to_seq of (2, 12, 2, 16) torch.float32'
    """
    first, second = map(int, words)
    sizes = Sizes(
        (first >> 32) - 1, first & 0xFFFFFFFF, second >> 24 & 0xFFFF, second & 0xFFFFFF,
        DTYPES[(second >> 56) - 1], second >> 40 & 0xFFF,
    )  # fmt: skip
    kind = Kind(second >> 52 & 15)
    text = f"{kind.title} of {sizes.input_shape(kind, W)} {sizes.dtype}"
    return text if sizes.replicas == 1 else f"{text}, each head for {sizes.replicas} ranks"


@dataclass(frozen=True)
class SequenceLayout:
    """Where everything lies in the symmetric memory of one rank; equal on every rank.

    There are two of everything but the abort words: exchanges take them in turn, see docs/ulysses.md.

    Attributes:
        world_size: W.
        max_bytes: the most that may arrive at a rank in one exchange.
    """

    world_size: int
    max_bytes: int

    @property
    def abort(self) -> Region:
        """One word a rank, as in an arena."""
        return Region(0, (self.world_size,), torch.int64)

    @cached_property
    def ready(self) -> Region:
        """Ready words, by turn and sender."""
        return Region(aligned(self.abort.nbytes), (2, self.world_size), torch.int64)

    @cached_property
    def cards(self) -> Region:
        """What the senders exchange, by turn and sender."""
        shape = (2, self.world_size, CARD_WORDS)
        return Region(self.ready.offset + aligned(self.ready.nbytes), shape, torch.int64)

    @cached_property
    def payload(self) -> Region:
        """What has arrived, by turn, in the layout of the result."""
        shape = (2, aligned(self.max_bytes))
        return Region(self.cards.offset + aligned(self.cards.nbytes), shape, torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory that one rank allocates."""
        return self.payload.offset + self.payload.nbytes


class Cell(IntEnum):
    """Places in `state` besides those of `channel.Cell` that the shared kernels' code uses."""

    EPOCH = 0
    DONE = 8


@dataclass(frozen=True)
class SequenceChannel:
    """The device side of the sequence exchanges of one rank.

    Attributes:
        rank: this rank.
        layout: sizes and offsets.
        peers_W: int64, the address of every rank's symmetric memory.
        abort_W: int64, this rank's abort words.
        ready: int64 `(2, W)`, this rank's.
        cards: int64 `(2, W, CARD_WORDS)`, this rank's.
        payload: uint8 `(2, bytes)`, this rank's.
        state: int64, as long as a lane's, see `Cell`; device memory.
        status: int64, see `channel.Report`; the host reads it at any time.
        polls: how often a wait looks before it gives up; 0 where the host has waited.
        spins: whether a launch ends only when every peer's rows have arrived.
        programs: the most that a kernel may have.
        tile_bytes: of the rows that a program moves at once.
    """

    rank: int
    layout: SequenceLayout
    peers_W: torch.Tensor
    abort_W: torch.Tensor
    ready: torch.Tensor
    cards: torch.Tensor
    payload: torch.Tensor
    state: torch.Tensor
    status: torch.Tensor
    polls: int
    spins: bool
    programs: int
    tile_bytes: int = TILE_BYTES

    def launch(self, kernel: Any, work: int) -> Any:
        """Return what launches a kernel in a persistent grid; the grid is never 0.

        The compiler may use as many registers as leave room for `RESIDENCY` programs.
        """
        registers = REGISTERS // (RESIDENCY * 32 * WARPS) // 8 * 8
        grid = (max(1, min(work, self.programs)),)
        return functools.partial(kernel[grid], num_warps=WARPS, maxnreg=registers)

    def tile(self, rows: int, width: int, itemsize: int) -> tuple[int, int]:
        """Return the rows and columns of a tile, powers of two, for rows of `width` elements.

        Compiled kernels have the same whatever the number of rows.
        """
        elements = self.tile_bytes // itemsize
        columns = min(elements, padded(max(1, width)))
        most = elements // columns
        return (min(most, padded(max(1, rows))) if INTERPRETED else most), columns
