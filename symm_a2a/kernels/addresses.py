"""Addresses of peer memory, and of work within a rank's received copies."""

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
def peer_region(peers_ptr, peer, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Typed start of one region at one peer, known to be 16-byte aligned."""
    lane = tl.load(peers_ptr + peer).to(tl.pointer_type(dtype))
    return tl.multiple_of(lane, 16) + OFFSET // (dtype.primitive_bitwidth // 8)


@triton.jit
def section_block(index, blocks, W_PAD: tl.constexpr):
    """Split a running block index over sections that hold `blocks[w]` blocks each.

    Returns the section, and the block within it.

    Example: `blocks = [2, 0, 3]`: index 1 is (0, 1), index 2 is (2, 0), index 4 is (2, 2).
    """
    w = tl.arange(0, W_PAD)
    section = tl.sum((tl.cumsum(blocks, 0) <= index).to(tl.int32), 0)
    return section, index - tl.sum(tl.where(w < section, blocks, 0), 0)
