"""What an exchange puts on the link, in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from symm_a2a.kernels.channel import Kind
from symm_a2a.layout import ArenaLayout

FLAG_BYTES = 8
COUNT_BYTES = 4


def copy_metadata_bytes(layout: ArenaLayout, kind: Kind) -> int:
    """Return what goes to a peer with each row besides its contents, in bytes.

    A dispatch sends a header, K records of two words; its backward K score gradients; all else, a second
    dispatch too, nothing. Each row is padded to a multiple of 16 bytes.
    """
    pad = (layout.padded_hidden - layout.hidden_dim) * layout.dtype.itemsize
    return pad + {
        Kind.DISPATCH: 2 * layout.header_dtype.itemsize * layout.top_k,
        Kind.DISPATCH_BACKWARD: layout.score_dtype.itemsize * layout.top_k,
    }.get(kind, 0)


def exchange_metadata_bytes(layout: ArenaLayout, kind: Kind) -> int:
    """Return what goes to each peer in an exchange whatever the number of rows, in bytes.

    The ready flag when it is launched, the free flag when it is joined; a scatter's counts flag; and a
    dispatch's counts of all experts and ranks and the mark of its placement, or a broadcast's.
    """
    flags = 3 if kind.scatters else 2
    counts = layout.num_experts + layout.world_size + 1 if kind in (Kind.DISPATCH, Kind.COUNTS) else 0
    return flags * FLAG_BYTES + counts * COUNT_BYTES


def bytes_to_others(layout: ArenaLayout, kind: Kind, copies_W: Sequence[int], rank: int) -> int:
    """Return the bytes of an exchange that leave a rank for other ranks.

    Args:
        layout: sizes.
        kind: of the exchange.
        copies_W: rows sent to each rank.
        rank: the sender, whose own rows take no link.
    """
    per_copy = layout.hidden_dim * layout.dtype.itemsize + copy_metadata_bytes(layout, kind)
    per_peer = exchange_metadata_bytes(layout, kind)
    return (sum(copies_W) - copies_W[rank]) * per_copy + (layout.world_size - 1) * per_peer
