"""Copies of rows, as they lie in the sections, to the rows of their slots."""

import triton
import triton.language as tl

from symm_a2a.kernels.addresses import slots_of


@triton.jit
def unpack_copies(
    rows_ptr, payload_ptr, row_of_copy_ptr, copy, mask,
    D: tl.constexpr, P: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load each copy of a tile once, and store it to every row that it has; `mask` says which to look at.

    Example: a copy whose rows are `[12, 7, -1, -1]` is stored to rows 12 and 7.
    """
    slots = slots_of(row_of_copy_ptr, copy, mask, K, K_PAD)
    most = tl.max(slots, 0)
    for c in tl.range(0, D, BLOCK_N):
        column = c + tl.arange(0, BLOCK_N)
        tile = tl.load(
            payload_ptr + copy[:, None].to(tl.int64) * P + column[None, :],
            mask=(slots > 0)[:, None] & (column < P)[None, :],
        )
        for k0 in tl.range(0, most, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            row = tl.load(
                row_of_copy_ptr + copy[:, None] * K + k[None, :],
                mask=k[None, :] < slots[:, None], other=-1,
            )  # fmt: skip
            tl.store(
                rows_ptr + row[:, :, None].to(tl.int64) * D + column[None, None, :],
                tl.broadcast_to(tile[:, None, :], [BLOCK_R, BLOCK_K, BLOCK_N]),
                mask=(row >= 0)[:, :, None] & (column < D)[None, None, :],
            )
