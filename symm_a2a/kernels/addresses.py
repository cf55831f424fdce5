"""Addresses of peer memory, and of work within the sections of a rank."""

import triton
import triton.language as tl


@triton.jit
def peer_regions(peers_ptr, peer, mask, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Typed starts of one region at several peers, known to be 16-byte aligned.

    A pointer that comes out of a table carries no alignment: without the hint a row store
    would be split into stores of one element. The hint stands on the lane's address, ahead of
    the offset: a cast of an integer sum is folded, and a hint on it lost.
    """
    lane = tl.load(peers_ptr + peer, mask=mask, other=0).to(tl.pointer_type(dtype))
    return tl.multiple_of(lane, [16] * len(lane.shape)) + OFFSET // (dtype.primitive_bitwidth // 8)


@triton.jit
def copies_in_turn(first, rank, W: tl.constexpr, BLOCK: tl.constexpr):
    """Sections and places of a run of copies that takes the sections in turn.

    Copies next to each other belong to different peers, from `rank` on, and the turn starts one
    section later at every place: ranks in step write to different peers, and no program works
    for one peer alone.

    Example: `W = 4`, rank 1: copies 0 to 3 are place 0 of sections 1, 2, 3, 0; copies 4 and 5
    are place 1 of sections 2 and 3.
    """
    index = first + tl.arange(0, BLOCK)
    place = index // W
    return (rank + place + index % W) % W, place


@triton.jit
def slots_of(row_of_copy_ptr, copy, mask, K: tl.constexpr, K_PAD: tl.constexpr):
    """How many slots of each copy must be looked at: none behind the last that has a row.

    Example: rows `[12, -1, 7, -1]`, the second slot's dropped by a static capacity: 3.
    """
    k = tl.arange(0, K_PAD)
    row = tl.load(
        row_of_copy_ptr + copy[:, None] * K + k[None, :], mask=mask[:, None] & (k < K)[None, :], other=-1
    )
    return tl.max(tl.where(row >= 0, k[None, :] + 1, 0), 1)
