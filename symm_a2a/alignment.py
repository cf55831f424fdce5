"""Blocks of one expert each, as fused mixture-of-experts kernels take their rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from symm_a2a.eager import eager
from symm_a2a.errors import InputError
from symm_a2a.kernels import align as kernel
from symm_a2a.layout import MAX_INDEX


class Alignment(NamedTuple):
    """Slots sorted by expert, in blocks of one expert each; what such kernels take.

    Attributes:
        sorted_row_ids: int32 `(M,)`: slots, each expert's in their order and padded to whole blocks; N, one
            more than the last slot, for a pad.
        expert_of_block: int32 `(M / block_size,)`; -1 for a block past the last one, and for one whose expert
            the map says is not here.
        padded_total: int32 `(1,)`, the places up to the end of the last block.
    """

    sorted_row_ids: torch.Tensor
    expert_of_block: torch.Tensor
    padded_total: torch.Tensor


@eager
def align_blocks(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    expert_map_E: torch.Tensor | None = None,
) -> Alignment:
    """Sort slots by expert, and pad each expert's to whole blocks.

    The order is stable, whatever the number of programs; the host waits for nothing. Of rows that a dispatch
    brought, expert by expert, the ids are `arange(L).repeat_interleave(tokens_per_expert_L)`.

    Args:
        topk_ids: int32 or int64 of any shape, N elements: the expert of each slot. Slots of ids
            outside `[0, E)` are left out, as -1 is.
        num_experts: E.
        block_size: slots of a block, any positive number.
        expert_map_E: int32 `(E,)`, the number of each expert on this rank, -1 for one that is elsewhere: its
            slots are sorted all the same, and its blocks marked -1, for the kernel to fill with zeros.

    Returns:
        An alignment with M = `N + E * (block_size - 1)`, at most `N * block_size`, up to a multiple of
        `block_size`: the most there can be.

    Raises:
        InputError: a dtype, device or size that does not fit.

    Example:
        >>> align_blocks(torch.tensor([[1, 0], [1, -1]]), num_experts=2, block_size=2)[:2]
        (tensor([1, 4, 0, 2, 4, 4], dtype=torch.int32), tensor([ 0,  1, -1], dtype=torch.int32))
    """
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"expected topk_ids of dtype int32 or int64, got {topk_ids.dtype}")
    for name, value in (("num_experts", num_experts), ("block_size", block_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"expected {name} to be a positive int, got {value!r}")
    if topk_ids.numel() + num_experts * block_size >= MAX_INDEX:
        raise InputError(
            f"expected slots + num_experts * block_size < {MAX_INDEX}, got {topk_ids.numel()} + "
            f"{num_experts} * {block_size}"
        )
    if expert_map_E is not None and (
        expert_map_E.shape != (num_experts,)
        or expert_map_E.dtype != torch.int32
        or expert_map_E.device != topk_ids.device
    ):
        raise InputError(
            f"expected expert_map_E of shape ({num_experts},), dtype int32, on {topk_ids.device}, got "
            f"{tuple(expert_map_E.shape)}, {expert_map_E.dtype}, {expert_map_E.device}"
        )
    ids_N = topk_ids.reshape(-1).contiguous()
    N = len(ids_N)
    most = min(N + num_experts * (block_size - 1), N * block_size)
    M = -(-most // block_size) * block_size
    new = {"dtype": torch.int32, "device": ids_N.device}
    found = Alignment(torch.empty(M, **new), torch.empty(M // block_size, **new), torch.empty(1, **new))
    sums = torch.empty((max(1, -(-N // kernel.BLOCK)), num_experts), **new)
    contiguous_map = None if expert_map_E is None else expert_map_E.contiguous()
    kernel.align(ids_N, contiguous_map, block_size, sums, *found)
    return found
