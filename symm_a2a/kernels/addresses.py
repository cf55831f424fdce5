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
def peer_region(peers_ptr, peer, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Typed start of one region at one peer, known to be 16-byte aligned."""
    lane = tl.load(peers_ptr + peer).to(tl.pointer_type(dtype))
    return tl.multiple_of(lane, 16) + OFFSET // (dtype.primitive_bitwidth // 8)


@triton.jit
def section_of(index, rank, W: tl.constexpr):
    """Split a running index into a section and a block within it, all sections in turn.

    Sections start from `rank` and turn by one with every block, so that programs next to each
    other are at different peers, and one program is not always at the same.

    Example: `W = 4`, rank 1: indices 0 to 5 are sections 1, 2, 3, 0 of block 0, then sections
    2 and 3 of block 1.
    """
    block = index // W
    return (rank + block + index % W) % W, block
