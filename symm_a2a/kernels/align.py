"""Sort slots by expert, each expert's padded to whole blocks: what fused expert kernels read rows by."""

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.blocks import INTERPRETED, padded
from symm_a2a.kernels.gaps import expert_starts

BLOCK = 256 if INTERPRETED else 128
"""Slots that a program counts, and compares in pairs, at once."""


@triton.jit
def _experts_of(ids_ptr, slot, N, E: tl.constexpr):
    """The experts of slots as int32; -1 where masked, out of range, or past the last slot."""
    ids = tl.load(ids_ptr + slot, mask=slot < N, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)


@triton.jit(do_not_specialize=["N"])
def _count_slots_kernel(sums_ptr, ids_ptr, N, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Count one block's slots of each expert.

    Example: ids `[1, 0, 1, -1]`, `E = 2`: `[1, 2]`.
    """
    block = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    expert = _experts_of(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), N, E)
    counts = tl.histogram(tl.maximum(expert, 0), E_PAD, mask=expert >= 0)
    tl.store(sums_ptr + block * E + e, counts, mask=e < E)


@triton.jit(do_not_specialize=["N", "M", "num_blocks"])
def _align_kernel(
    sorted_ptr, expert_of_block_ptr, total_ptr, ids_ptr, map_ptr, sums_ptr, N, M, num_blocks,
    SIZE: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_MAP: tl.constexpr,
):  # fmt: skip
    """Put one block's slots where they belong, and fill one stretch of what no slot takes.

    Each program adds up all blocks' counts for itself: the starts of the experts, and its own slots'
    predecessors in earlier blocks. Every place is written by exactly one program.

    Example: ids `[1, 0, 1, -1]`, `SIZE = 2`: expert 0 has places 0 and 1, expert 1 has 2 and 3. Sorted
    `[1, 4, 0, 2, 4, ...]`, experts of blocks `[0, 1, -1, ...]`, total 4.
    """
    program = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    before = tl.full((E_PAD,), 0, tl.int32)
    counts = tl.full((E_PAD,), 0, tl.int32)
    for first in tl.range(0, num_blocks, BLOCK_S):
        b = first + tl.arange(0, BLOCK_S)
        mask = (b < num_blocks)[:, None] & (e < E)[None, :]
        sums = tl.load(sums_ptr + b[:, None] * E + e[None, :], mask=mask, other=0)
        counts += tl.sum(sums, 0)
        before += tl.sum(tl.where((b < program)[:, None], sums, 0), 0)
    starts, sizes = expert_starts(counts, SIZE)
    total = tl.sum(sizes, 0)

    i = tl.arange(0, BLOCK)
    slot = program * BLOCK + i
    expert = _experts_of(ids_ptr, slot, N, E)
    ahead = tl.full((BLOCK,), 0, tl.int32)
    for first in tl.range(0, BLOCK, 16):
        j = first + tl.arange(0, 16)
        other = _experts_of(ids_ptr, program * BLOCK + j, N, E)
        ahead += tl.sum(((expert[:, None] == other[None, :]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    place = tl.gather(starts + before, tl.maximum(expert, 0), 0) + ahead
    tl.store(sorted_ptr + place, slot, mask=expert >= 0)

    for first in tl.range(program * BLOCK, M, tl.num_programs(0) * BLOCK):
        at = first + i
        # Whose stretch a place lies in: the experts that end at or before it are counted.
        owner = tl.sum(((starts + sizes)[None, :] <= at[:, None]).to(tl.int32), 1)
        owner = tl.minimum(owner, E - 1)
        is_pad = (at >= total) | (at >= tl.gather(starts + counts, owner, 0))
        tl.store(sorted_ptr + at, tl.broadcast_to(N, (BLOCK,)), mask=is_pad & (at < M))
        label = owner
        if HAS_MAP:
            label = tl.load(map_ptr + owner)
        tl.store(
            expert_of_block_ptr + at // SIZE,
            tl.where(at < total, label, -1),
            mask=(at % SIZE == 0) & (at < M),
        )
    if program == 0:
        tl.store(total_ptr, total)


def align(
    ids_N: torch.Tensor,
    expert_map_E: torch.Tensor | None,
    block_size: int,
    sums: torch.Tensor,
    sorted_M: torch.Tensor,
    expert_of_block: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """Sort slots by expert into blocks of one expert each; two launches, and nothing is waited for.

    Args:
        ids_N: int32 or int64, contiguous; an expert of each slot, others are left out.
        expert_map_E: int32, what blocks of each expert are marked with; None for its own number.
        block_size: slots of a block.
        sums: int32 `(ceil(N / BLOCK), E)`, written.
        sorted_M: int32, written whole: slots, and N where there is none. M is a multiple of `block_size`, at
            least `N + E * (block_size - 1)` rounded down to one.
        expert_of_block: int32 `(M / block_size,)`, written whole; -1 past the last block.
        total: int32 `(1,)`, written: places up to the end of the last block.

    Example:
        >>> ids = torch.tensor([1, 0, 1, -1])
        >>> sums, blocks, total = (torch.zeros(n, dtype=torch.int32) for n in ((1, 2), 3, 1))
        >>> places = torch.zeros(6, dtype=torch.int32)
        >>> align(ids, None, 2, sums, places, blocks, total)
        >>> places.tolist(), blocks.tolist(), total.tolist()
        ([1, 4, 0, 2, 4, 4], [0, 1, -1], [4])
    """
    num_blocks, E = sums.shape
    N, M = len(ids_N), len(sorted_M)
    _count_slots_kernel[(num_blocks,)](sums, ids_N, N, E=E, E_PAD=max(2, padded(E)), BLOCK=BLOCK)
    _align_kernel[(num_blocks,)](
        sorted_M, expert_of_block, total, ids_N, total if expert_map_E is None else expert_map_E, sums,
        N, M, num_blocks,
        SIZE=block_size, E=E, E_PAD=max(2, padded(E)), BLOCK=BLOCK, BLOCK_S=16,
        HAS_MAP=expert_map_E is not None,
    )  # fmt: skip
