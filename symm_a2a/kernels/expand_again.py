"""Copy each received row to where an earlier dispatch put the rows of its slots."""

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.addresses import copies_in_turn
from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell, Channel, Kind
from symm_a2a.kernels.flags import dispatch_in
from symm_a2a.kernels.gaps import zero_gaps
from symm_a2a.kernels.phases import may_join, release_sections
from symm_a2a.kernels.unpack import unpack_copies

_DONE = tl.constexpr(int(Cell.DONE_EXPAND_AGAIN))
_JOINED = tl.constexpr(int(Cell.SCATTER_JOINED))
_KIND = tl.constexpr(int(Kind.DISPATCH_AGAIN))


@triton.jit(do_not_specialize=["rank", "C", "capacity"])
def _expand_again_kernel(
    rows_ptr, row_of_copy_ptr, tally_ptr, token_ptr,
    payload_ptr, peers_ptr, ready_ptr, state_ptr, status_ptr, rank, C, capacity,
    FREE: tl.constexpr, HOLDS: tl.constexpr,
    PAD: tl.constexpr, D: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    K_PAD: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Expand the copies of all sections by the rows that are known, and free the sections."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    w = tl.arange(0, W_PAD)
    epoch = tl.load(state_ptr + _JOINED) + 1
    follows = dispatch_in(tally_ptr, 2 * W + L)
    _, here = may_join(ready_ptr, state_ptr, status_ptr, epoch, follows, _KIND, W, W_PAD)
    if here:
        received = tl.load(tally_ptr + W + w, mask=w < W, other=0)
        for first in tl.range(program * BLOCK_R, tl.max(received, 0) * W, programs * BLOCK_R):
            source, place = copies_in_turn(first, rank, W, BLOCK_R)
            came = place < tl.load(tally_ptr + W + source)
            unpack_copies(
                rows_ptr, payload_ptr, row_of_copy_ptr, source * C + place, came,
                D, P, K, K_PAD, BLOCK_R, BLOCK_K, BLOCK_N,
            )  # fmt: skip
        e = tl.arange(0, L_PAD)
        expert_rows = tl.load(tally_ptr + 2 * W + e, mask=e < L, other=0)
        zero_gaps(rows_ptr, expert_rows, capacity, program, programs, PAD, D, L, L_PAD, BLOCK_R, BLOCK_N)
        if program == 0:
            tl.store(token_ptr, 0.0)
    release_sections(peers_ptr, state_ptr, rank, epoch, _DONE, _JOINED, FREE, HOLDS, W, W_PAD)


def expand_again(
    channel: Channel,
    rows_RD: torch.Tensor,
    row_of_copy: torch.Tensor,
    tally: torch.Tensor,
    token: torch.Tensor,
    *,
    pad_multiple: int,
) -> None:
    """Take the copies of a second dispatch out of symmetric memory, into the rows of the first.

    Needs every peer's `DISPATCH_AGAIN` copies to have arrived; reports the lane as failed where they have
    not, or where they are another operation's. When the kernel has run, every peer may overwrite its
    section here.

    Args:
        channel: the lane.
        rows_RD: written whole, with as many rows as the first dispatch gave; zeros where a row belongs to no
            slot.
        row_of_copy: int32 `(W, C, K)`, of the first dispatch.
        tally: int32 `(2 W + L + 1,)`, of the first dispatch.
        token: float32 `(1,)`, set to zero.
        pad_multiple: of the first dispatch.

    Example:
        >>> import symm_a2a
        >>> from symm_a2a import exchange
        >>> sizes = dict(num_experts=2, top_k=2, hidden_dim=2, max_tokens_per_rank=2)
        >>> world = symm_a2a.VirtualWorld(symm_a2a.EPConfig(**sizes, dtype=torch.float32), 2, "cpu")
        >>> lanes = [dispatcher.arena.lanes[0] for dispatcher in world.dispatchers]
        >>> x, scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 0.25], [1.0, 1.0]])
        >>> ids = torch.tensor([[1, 1], [0, -1]])
        >>> flights = [exchange.launch_dispatch(lane, x, scores, ids, 6, 1) for lane in lanes]
        >>> done = [exchange.join_dispatch(flight) for flight in flights]
        >>> _ = [exchange.launch_dispatch_again(l, -x, d.routing) for l, d in zip(lanes, done, strict=True)]
        >>> rows, route = torch.ones(6, 2), done[1].routing
        >>> where = route.row_of_copy, route.tally
        >>> expand_again(lanes[1].channel, rows, *where, torch.ones(1), pad_multiple=1)
        >>> rows.tolist()
        [[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [0.0, 0.0], [0.0, 0.0]]
    """
    layout = channel.layout
    blocks = channel.blocks
    W, L = layout.world_size, layout.num_local_experts
    work = triton.cdiv(W * layout.max_tokens, blocks.copy_rows)
    channel.launch(_expand_again_kernel, work, blocks.residency.expand_again)(
        rows_RD, row_of_copy, tally, token,
        channel.local["scatter_rows"], channel.peers_W, channel.local["scatter_ready"],
        channel.state, channel.status, channel.rank, layout.max_tokens, rows_RD.shape[0],
        FREE=channel.offset("scatter_free"), HOLDS=channel.holds,
        PAD=pad_multiple,
        D=layout.hidden_dim, P=layout.padded_hidden, K=layout.top_k, K_PAD=padded(layout.top_k),
        L=L, L_PAD=padded(L), W=W, W_PAD=padded(W),
        BLOCK_R=blocks.copy_rows, BLOCK_K=blocks.slots, BLOCK_N=blocks.columns,
    )  # fmt: skip
