"""Rows that belong to no slot: they are zeros, in rows and in their gradients."""

import triton
import triton.language as tl


@triton.jit
def expert_starts(count_L, PAD: tl.constexpr):
    """Where each local expert's rows start when each is padded to a multiple of `PAD`.

    Returns the starts and the padded counts.

    Example: counts `[3, 0, 5]` with `PAD = 4`: starts `[0, 4, 4]`, padded `[4, 0, 8]`.
    """
    padded = (count_L + PAD - 1) // PAD * PAD
    return tl.cumsum(padded, 0) - padded, padded


@triton.jit
def zero_gaps(
    rows_ptr, count_L, capacity, program, programs,
    PAD: tl.constexpr, D: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store zeros to the pad rows of every expert, and to all rows past the last expert's.

    Example: counts `[3, 5]`, `PAD = 4`, capacity 16: rows 3, 9, 10, 11 and 12 to 15.
    """
    expert = tl.arange(0, L_PAD)
    start, padded = expert_starts(count_L, PAD)
    begin = tl.minimum(start + count_L, capacity)
    end = tl.where(expert == L - 1, capacity, tl.minimum(start + padded, capacity))
    gap = tl.where(expert < L, tl.maximum(end - begin, 0), 0)
    ends = tl.cumsum(gap, 0)
    shift = begin - (ends - gap)
    total = tl.sum(gap, 0)
    for first in tl.range(program * BLOCK_R, total, programs * BLOCK_R):
        index = first + tl.arange(0, BLOCK_R)
        owner = tl.sum((ends[None, :] <= index[:, None]).to(tl.int32), 1)
        row = index + tl.sum(tl.where(owner[:, None] == expert[None, :], shift[None, :], 0), 1)
        for c in tl.range(0, D, BLOCK_N):
            column = c + tl.arange(0, BLOCK_N)
            tl.store(
                rows_ptr + row[:, None].to(tl.int64) * D + column[None, :],
                tl.full((BLOCK_R, BLOCK_N), 0, rows_ptr.dtype.element_ty),
                mask=(index < total)[:, None] & (column < D)[None, :],
            )
