"""What one rank has to move, in numbers: sizes of the layer, and how many copies and rows there are."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from bench.routing import distinct_ranks
from bench.shapes import Shape

SLOTS_PER_BLOCK, MOST_BLOCKS = 128, 256
"""Slots that the count kernel takes at once on a GPU, and blocks of tokens that there are then, both at
most; the tests compare both with the kernels'."""

SMALL_TOKENS = 128
"""Most tokens that the scatter counts itself, without a count kernel; the tests compare this one too."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One rank's share of a forward and backward in which no row is dropped.

    Copies and rows are counts where they were counted, means where they are expected.

    Attributes:
        ranks: W.
        experts: E.
        top_k: K.
        tokens: T.
        capacity: C, the tokens that symmetric memory and the index arrays are sized for.
        hidden: D, elements of a row.
        padded: P, elements of a row in symmetric memory.
        itemsize: bytes of an element of a row.
        score_bytes: of a score, and of each half of a header's record.
        id_bytes: of an expert id.
        token_block: tokens that are counted together.
        kept: copies that this rank sends to itself.
        sent: copies that it sends to other ranks.
        received: copies that it receives from other ranks.
        slots: slots of its tokens that are not masked.
        rows: slots of all ranks that its experts serve.
        gap_rows: rows that belong to no slot and are filled with zeros; none with an exact capacity and
            without padding.
        counted_apart: whether a kernel of its own counts; otherwise the scatter does.
    """

    ranks: int
    experts: int
    top_k: int
    tokens: int
    capacity: int
    hidden: int
    padded: int
    itemsize: int
    score_bytes: int = 4
    id_bytes: int = 8
    token_block: int
    kept: float
    sent: float
    received: float
    slots: float
    rows: float
    gap_rows: float = 0
    counted_apart: bool = True

    @property
    def others(self) -> int:
        """Ranks other than this one."""
        return self.ranks - 1

    @property
    def local_experts(self) -> int:
        """L, the experts of this rank."""
        return self.experts // self.ranks

    @property
    def token_blocks(self) -> int:
        """B, the blocks of tokens that are counted apart."""
        return max(1, ceil(self.tokens / self.token_block))

    @property
    def copies_out(self) -> float:
        """Copies of this rank's tokens, and so the rows that come back to it."""
        return self.kept + self.sent

    @property
    def copies_in(self) -> float:
        """Copies that reach this rank, and so the rows that it sends back."""
        return self.kept + self.received

    @property
    def row(self) -> int:
        """Bytes of a row in ordinary memory."""
        return self.hidden * self.itemsize

    @property
    def section_row(self) -> int:
        """Bytes of a row in symmetric memory: up to 16 bytes, so that its stores stay as wide."""
        return self.padded * self.itemsize


def _token_block(shape: Shape) -> int:
    """Return the tokens that are counted together, K and T rounded up to powers of two."""
    slots, tokens = (1 << (count - 1).bit_length() for count in (shape.top_k, shape.tokens))
    return max(1, min(SLOTS_PER_BLOCK // slots, tokens // MOST_BLOCKS))


def expected(shape: Shape) -> Load:
    """Return the mean load of a shape under uniform routing, without masks, padding or drops."""
    layout = shape.config().layout(shape.ranks)
    copies = shape.tokens * distinct_ranks(shape.ranks, shape.experts, shape.top_k)
    rows = shape.tokens * shape.top_k
    return Load(
        ranks=shape.ranks,
        experts=shape.experts,
        top_k=shape.top_k,
        tokens=shape.tokens,
        capacity=layout.max_tokens,
        hidden=shape.hidden,
        padded=layout.padded_hidden,
        itemsize=shape.dtype.itemsize,
        score_bytes=layout.score_dtype.itemsize,
        token_block=_token_block(shape),
        kept=copies / shape.ranks,
        sent=copies * (shape.ranks - 1) / shape.ranks,
        received=copies * (shape.ranks - 1) / shape.ranks,
        slots=rows,
        rows=rows,
        counted_apart=shape.tokens > SMALL_TOKENS,
    )
