"""Turn expert ids into places: which rank's which expert a slot goes to, replicas chosen."""

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.channel import Channel
from symm_a2a.placement import NOWHERE, SHARE_UNITS, STRIDE

_UNITS = tl.constexpr(SHARE_UNITS)
_STRIDE = tl.constexpr(STRIDE)
_NOWHERE = tl.constexpr(NOWHERE)


@triton.jit(do_not_specialize=["rank", "N", "K"])
def _assign_kernel(
    places_ptr, ids_ptr, table_ptr, rank, N, K,
    E: tl.constexpr, PLACES: tl.constexpr, REPLICAS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Look up each slot's place; ids out of range become places out of range, for `count` to report.

    Example: expert 1 is at places 1 and 2 with equal shares, `W = 2`. At rank 0 token 0 has number 0, below
    32768: place 1. Token 1 has number 40503: place 2.
    """
    for first in tl.range(tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        slot = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + slot, mask=slot < N, other=-1)
        valid = (ids >= 0) & (ids < E)
        entry = table_ptr + tl.where(valid, ids, 0).to(tl.int32) * (2 * REPLICAS)
        token = (slot // K).to(tl.int64)
        number = (token * _STRIDE + rank * _UNITS // W) % _UNITS
        place = tl.full((BLOCK,), _NOWHERE, tl.int32)
        begin = tl.full((BLOCK,), 0, tl.int32)
        for replica in tl.range(0, REPLICAS):
            end = tl.load(entry + 2 * replica + 1, mask=valid, other=0)
            here = (begin <= number) & (number < end)
            place = tl.where(here, tl.load(entry + 2 * replica, mask=here & valid, other=_NOWHERE), place)
            begin = end
        outside = tl.where(ids < 0, tl.where(ids == -1, -1, -2), PLACES)
        tl.store(places_ptr + slot, tl.where(valid, place, outside), mask=slot < N)


def assign(channel: Channel, ids_TK: torch.Tensor, table: torch.Tensor, places_TK: torch.Tensor) -> None:
    """Write the place of every slot.

    Needs nothing and touches no peer.

    Args:
        channel: the lane, for this rank and its sizes.
        ids_TK: int32 or int64, contiguous: experts, or -1.
        table: int32 `(E, N, 2)`, a `Placement`'s for this rank.
        places_TK: int32, written; -1 where the id is -1, and out of range where it is out of range.

    Example:
        >>> import symm_a2a
        >>> placement = symm_a2a.Placement(((0, 1), (1, 2)))
        >>> cfg = symm_a2a.EPConfig(
        ...     num_experts=3, top_k=2, hidden_dim=2, max_tokens_per_rank=4, placement=placement
        ... )
        >>> world = symm_a2a.VirtualWorld(cfg, 2, "cpu")
        >>> channel = world.dispatchers[0].arena.lanes[0].channel
        >>> ids = torch.tensor([[1, 0], [1, -1], [2, 9]])
        >>> places = torch.zeros(3, 2, dtype=torch.int32)
        >>> assign(channel, ids, placement.table(0), places)
        >>> places.tolist()
        [[1, 0], [2, -1], [3, 4]]
    """
    N, (E, replicas, _) = ids_TK.numel(), table.shape
    layout, block = channel.layout, channel.blocks.assigned
    channel.launch(_assign_kernel, triton.cdiv(N, block), channel.blocks.residency.assign)(
        places_TK, ids_TK, table, channel.rank, N, layout.top_k,
        E=E, PLACES=layout.num_experts, REPLICAS=replicas, W=layout.world_size, BLOCK=block,
    )  # fmt: skip
