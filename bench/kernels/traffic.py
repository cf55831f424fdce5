"""How many of a tile's rows there are: the others are masked, and load nothing.

A tile of three dimensions runs over the peers of a token, or over the slots of a copy, and not all of them
are there. What is expected here is uniform routing: K different experts, each set as likely as another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.routing import distinct_ranks

if TYPE_CHECKING:
    from bench.shapes import Shape

TILES_OVER = {
    "_scatter_kernel": "peers",
    "_expand_kernel": "slots",
    "_expand_again_kernel": "slots",
    "_expand_grad_kernel": "slots",
    "_gather_kernel": "pairs of slots",
    "_finish_kernel": "peers",
}
"""What the middle dimension of a kernel's tiles runs over.

All peers of a token, copies or not. Or the slots of a copy: those that are there come first, and the loop
ends at the last of any copy in the tile. Or a tile is loaded for each of two slots of every copy.
"""


def slots_in_copy(ranks: int, experts: int, top_k: int) -> list[float]:
    """Return how likely a copy is to have no slot (never), one slot, two, and so on up to K.

    Example: two experts of eight on four ranks: of 52 copies 48 have one slot, 4 have two.
        >>> [round(52 * share, 9) for share in slots_in_copy(ranks=4, experts=8, top_k=2)]
        [0.0, 48.0, 4.0]
    """
    local = experts // ranks
    ways = [math.comb(local, s) * math.comb(experts - local, top_k - s) for s in range(1, top_k + 1)]
    return [0.0, *(way / sum(ways) for way in ways)]


def valid_share(shape: Shape, kernel: str, tile: Sequence[int], access: str = "load") -> float:
    """Return the mean share of a tile's rows that are there.

    Args:
        shape: sizes of the exchange.
        kernel: its name.
        tile: elements; the middle dimension of three runs over what `TILES_OVER` says.
        access: "load" or "store".

    Example: OLMoE on 8 ranks has 5.43 copies of a token, 1.47 slots in a copy; in twos, 68 % are there.
        >>> from bench.shapes import SHAPES
        >>> round(valid_share(SHAPES["olmoe"], "_finish_kernel", (1, 8, 1024)), 3)
        0.679
        >>> round(valid_share(SHAPES["olmoe"], "_gather_kernel", (1, 1024)), 3)
        0.681
    """
    over = TILES_OVER.get(kernel)
    pairs = over == "pairs of slots" and access == "load"
    if len(tile) < 3 and not pairs:
        return 1.0
    sizes = shape.ranks, shape.experts, shape.top_k
    rows, step = tile[0], 2 if pairs else tile[1]
    match over:
        case "peers":
            return distinct_ranks(*sizes) / (math.ceil(shape.ranks / step) * step)
        case "slots" | "pairs of slots":
            shares = slots_in_copy(*sizes)
            at_most = [share**rows for share in itertools.accumulate(shares)]
            rounds = sum(
                math.ceil(most / step) * (at_most[most] - at_most[most - 1])
                for most in range(1, shape.top_k + 1)
            )
            return sum(slots * share for slots, share in enumerate(shares)) / (rounds * step)
    raise ValueError(f"expected {kernel} in bench/kernels/traffic.py, got tiles over what is not known")
