"""Block sizes, in one table: no kernel is tuned at run time.

Ranks must agree on nothing here, but a rank that tuned for itself would be late for the
others. Under the interpreter a program costs the same whatever its size, so blocks are as
large as memory allows and the grid has one program.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton import knobs, next_power_of_2

from symm_a2a.layout import ArenaLayout

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether `@triton.jit` makes interpreted functions in this process."""

_TILE = 1 << 20
"""Elements of the largest tile that the interpreter is given."""


@dataclass(frozen=True)
class Blocks:
    """Tile sizes of a layout; powers of two.

    Attributes:
        tokens: tokens whose slots are counted and placed together.
        strip: slots compared at once with the slots of a block.
        sums: block counts added at once.
        copies: copies whose headers are read together.
        copy_rows: payload rows of a tile at the experts, one a copy.
        rows: payload rows of a tile at the origin, one a token.
        columns: payload elements of a row in a tile.
        peers: peers a tile is stored to, or summed over, at once.
        slots: slots of a copy that are summed at once.
        vector: elements that one thread reduces before threads combine.
        warps: warps of a program.
    """

    tokens: int
    strip: int
    sums: int
    copies: int
    copy_rows: int
    rows: int
    columns: int
    peers: int
    slots: int
    vector: int
    warps: int


def padded(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return int(next_power_of_2(n))


def blocks_for(layout: ArenaLayout) -> Blocks:
    """Return the tile sizes for an arena, from its sizes and from where kernels run."""
    k_pad, w_pad = padded(layout.top_k), padded(layout.world_size)
    itemsize = layout.dtype.itemsize
    peers, slots = min(8, w_pad), min(8, k_pad)
    if INTERPRETED:
        columns = min(4096, padded(layout.padded_hidden))
        most = _TILE // (columns * max(peers, k_pad))
        copies = max(1, min(1024, padded(layout.max_tokens * layout.world_size), most))
        tokens = max(1, min(256, padded(layout.max_tokens), _TILE // (64 * k_pad)))
        return Blocks(
            tokens=tokens, strip=min(tokens * k_pad, _TILE // (tokens * k_pad)), sums=16,
            copies=copies, copy_rows=copies, rows=max(1, min(512, padded(layout.max_tokens), most)),
            columns=columns, peers=peers, slots=slots, vector=16 // itemsize, warps=4,
        )  # fmt: skip
    return Blocks(
        tokens=max(1, 128 // k_pad), strip=16, sums=16, copies=32, copy_rows=1, rows=1,
        columns=2048 // itemsize, peers=peers, slots=min(4, slots), vector=16 // itemsize, warps=4,
    )  # fmt: skip
