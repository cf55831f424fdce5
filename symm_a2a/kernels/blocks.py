"""How large each kernel's tiles are, and how many programs run: one table, nothing tuned at run time.

Ranks must agree on nothing here, but a rank that tuned for itself would be late for the
others. Under the interpreter a program costs the same whatever its size, so blocks are as
large as memory allows and the grid has one program.

On a GPU a copy runs at the speed of the memory when enough loads are in flight: at 4 TB/s and 0.7 us,
some 20 KB on each multiprocessor. A program of 4 warps loads 2 KB of a row at once, 16 bytes a thread,
and so many programs share a multiprocessor that together they reach that (`Residency`). With a budget of
programs, fewer than there are multiprocessors, each is a program of 16 warps with several rows at a time.
`python -m bench kernels` computes both from the compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from triton import knobs, next_power_of_2

from symm_a2a.layout import ArenaLayout

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether `@triton.jit` makes interpreted functions in this process."""

SMALL_TOKENS = 128
"""Most tokens of a rank whose dispatch counts them in the scatter itself, in one launch less."""

_TILE = 1 << 20
"""Elements of the largest tile that the interpreter is given."""


class Residency(NamedTuple):
    """Programs of each kernel for every multiprocessor; also what bounds their registers."""

    assign: int = 8
    count: int = 4
    scatter: int = 3
    expand: int = 10
    expand_again: int = 10
    expand_grad: int = 7
    gather: int = 8
    finish: int = 8


@dataclass(frozen=True)
class Blocks:
    """Tile sizes of a layout; powers of two.

    Attributes:
        assigned: slots whose places are looked up together.
        tokens: tokens whose slots are counted and placed together.
        small_tokens: the same where a scatter counts for itself.
        strip: slots compared at once with the slots of a block.
        sums: block counts added at once.
        counts: counts of experts and copies that are recorded together.
        copies: copies whose headers are read together.
        send_rows: rows of a tile in a scatter, one a token.
        copy_rows: rows of a tile in an expand, one a copy.
        sum_rows: rows of a tile in a gather, one a copy.
        grad_rows: rows of a tile in the expand of gradients, one a copy.
        rows: rows of a tile in a finish, one a token.
        columns: payload elements of a row in a tile.
        peers: peers a tile is stored to, or summed over, at once.
        slots: slots of a copy that are handled at once; a gather adds them up two by two.
        vector: elements that one thread reduces before threads combine.
        warps: warps of a program.
        residency: programs for every multiprocessor, where no budget is set.
    """

    assigned: int
    tokens: int
    small_tokens: int
    strip: int
    sums: int
    counts: int
    copies: int
    send_rows: int
    copy_rows: int
    sum_rows: int
    grad_rows: int
    rows: int
    columns: int
    peers: int
    slots: int
    vector: int
    warps: int
    residency: Residency = field(default_factory=Residency)


def padded(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return int(next_power_of_2(n))


def blocks_for(layout: ArenaLayout, budget: int | None = None) -> Blocks:
    """Return the tile sizes for an arena, from its sizes and from where kernels run.

    Args:
        layout: the arena's sizes.
        budget: the most programs that a kernel may have; None for as many as fill the device.
    """
    return _interpreted(layout) if INTERPRETED else _compiled(layout, wide=budget is not None)


def _interpreted(layout: ArenaLayout) -> Blocks:
    k_pad, w_pad = padded(layout.top_k), padded(layout.world_size)
    peers = min(8, w_pad)
    columns = min(4096, padded(layout.padded_hidden))
    most = _TILE // (columns * max(peers, k_pad))
    copies = max(1, min(1024, padded(layout.max_tokens * layout.world_size), most))
    tokens = max(1, min(256, padded(layout.max_tokens), _TILE // (64 * k_pad)))
    rows = max(1, min(512, padded(layout.max_tokens), most))
    return Blocks(
        assigned=min(_TILE, padded(layout.max_tokens * layout.top_k)), tokens=tokens, small_tokens=tokens,
        strip=min(tokens * k_pad, _TILE // (tokens * k_pad)), sums=16,
        counts=min(1024, padded(layout.num_experts + layout.world_size)),
        copies=copies, send_rows=min(rows, tokens), copy_rows=copies, sum_rows=copies, grad_rows=copies,
        rows=rows, columns=columns, peers=peers, slots=min(8, k_pad),
        vector=16 // layout.dtype.itemsize, warps=4,
    )  # fmt: skip


def _compiled(layout: ArenaLayout, *, wide: bool) -> Blocks:
    k_pad, w_pad = padded(layout.top_k), padded(layout.world_size)
    itemsize = layout.dtype.itemsize
    # A tile must have 16 bytes for every thread, or stores become narrower.
    rows, copy_rows, row_bytes = (2, 8, 4096) if wide else (1, 1, 2048)
    # Blocks enough for every multiprocessor, of 128 slots at most, which are compared in pairs.
    tokens = max(rows, min(128 // k_pad, padded(layout.max_tokens) // 256))
    copies = max(copy_rows, min(32, padded(layout.max_tokens * layout.world_size) // 2048))
    return Blocks(
        assigned=512, tokens=tokens, small_tokens=rows, strip=16, sums=16, counts=32, copies=copies,
        send_rows=rows, copy_rows=copy_rows, sum_rows=min(4, copy_rows), grad_rows=min(4, copy_rows),
        rows=max(rows, 8 // w_pad) if wide else 1, columns=row_bytes // itemsize, peers=min(8, w_pad),
        slots=1 if wide else min(2, k_pad), vector=16 // itemsize, warps=16 if wide else 4,
        residency=Residency(*[1] * len(Residency._fields)) if wide else Residency(),
    )  # fmt: skip
