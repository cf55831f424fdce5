"""Sum, for each token, the rows that the ranks of its experts have sent back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell, Channel, Kind
from symm_a2a.kernels.flags import dispatch_in
from symm_a2a.kernels.phases import may_join, release_sections
from symm_a2a.kernels.rounding import narrow, widen

_DONE = tl.constexpr(int(Cell.DONE_FINISH))
_JOINED = tl.constexpr(int(Cell.GATHER_JOINED))


@triton.jit(do_not_specialize=["rank", "T", "C"])
def _finish_kernel(
    out_ptr, grad_scores_ptr, token_ptr, copy_of_peer_ptr, copy_of_slot_ptr, tally_ptr,
    payload_ptr, scores_ptr, peers_ptr, ready_ptr, state_ptr, status_ptr, rank, T, C,
    FREE: tl.constexpr, HOLDS: tl.constexpr,
    HAS_SCORES: tl.constexpr, KIND: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, L: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`out[t] = sum over peers q of payload[q, copy of t at q]`, in rank order, in fp32.

    With `HAS_SCORES` each slot's score gradient is fetched from its copy's record. A token
    without copies, all of its slots masked, gets zeros.

    Example: token 2 went to rank 0 as copy 1 and to rank 3 as copy 0:
    `out[2] = payload[0, 1] + payload[3, 0]`.
    """
    program = tl.program_id(0)
    k = tl.arange(0, K_PAD)
    score_dtype = scores_ptr.dtype.element_ty
    epoch = tl.load(state_ptr + _JOINED) + 1
    follows = dispatch_in(tally_ptr, 2 * W + L)
    _, here = may_join(ready_ptr, state_ptr, status_ptr, epoch, follows, KIND, W, W_PAD)
    if here:
        for block in tl.range(program, (T + BLOCK_R - 1) // BLOCK_R, tl.num_programs(0)):
            t = block * BLOCK_R + tl.arange(0, BLOCK_R)
            for c in tl.range(0, D, BLOCK_N):
                column = c + tl.arange(0, BLOCK_N)
                total = tl.full((BLOCK_R, BLOCK_N), 0, score_dtype)
                for first in tl.range(0, W, BLOCK_W):
                    q = first + tl.arange(0, BLOCK_W)
                    place = tl.load(
                        copy_of_peer_ptr + t[:, None] * W + q[None, :],
                        mask=(t < T)[:, None] & (q < W)[None, :], other=-1,
                    )  # fmt: skip
                    row = (q[None, :] * C + place).to(tl.int64) * P
                    part = tl.load(
                        payload_ptr + row[:, :, None] + column[None, None, :],
                        mask=(place >= 0)[:, :, None] & (column < D)[None, None, :], other=0.0,
                    )  # fmt: skip
                    total += tl.sum(widen(part, score_dtype), 1)
                tl.store(
                    out_ptr + t[:, None].to(tl.int64) * D + column[None, :],
                    narrow(total, out_ptr.dtype.element_ty),
                    mask=(t < T)[:, None] & (column < D)[None, :],
                )
            if HAS_SCORES:
                mask = (t < T)[:, None] & (k < K)[None, :]
                copy = tl.load(copy_of_slot_ptr + t[:, None] * K + k[None, :], mask=mask, other=-1)
                # A copy's record has the slots that went with it, in their order.
                earlier = (copy[:, :, None] == copy[:, None, :]) & (k[None, None, :] < k[None, :, None])
                index = tl.sum(earlier.to(tl.int32), 2)
                grad = tl.load(scores_ptr + copy.to(tl.int64) * K + index, mask=copy >= 0, other=0.0)
                tl.store(grad_scores_ptr + t[:, None] * K + k[None, :], grad, mask=mask)
        if program == 0:
            tl.store(token_ptr, 0.0)
    release_sections(peers_ptr, state_ptr, rank, epoch, _DONE, _JOINED, FREE, HOLDS, W, W_PAD)


def finish(
    channel: Channel,
    kind: Kind,
    out_TD: torch.Tensor,
    token: torch.Tensor,
    copy_of_peer_TW: torch.Tensor,
    copy_of_slot_TK: torch.Tensor,
    tally: torch.Tensor,
    grad_scores_TK: torch.Tensor | None = None,
) -> None:
    """Take the rows of a gather out of symmetric memory, summed for each token.

    Needs every peer's rows to have arrived. When the kernel has run, every peer may overwrite
    its section here.

    Args:
        channel: the lane.
        kind: `COMBINE`, `DISPATCH_BACKWARD` or `DISPATCH_AGAIN_BACKWARD`.
        out_TD: written whole.
        token: float32 `(1,)`, set to zero.
        copy_of_peer_TW: int32, of the dispatch.
        copy_of_slot_TK: int32, of the dispatch.
        tally: int32 `(2 W + L + 1,)`, of the dispatch.
        grad_scores_TK: of the score dtype, written whole; with `DISPATCH_BACKWARD` only.

    Example:
        >>> import symm_a2a
        >>> from symm_a2a import exchange
        >>> sizes = dict(num_experts=2, top_k=2, hidden_dim=2, max_tokens_per_rank=2)
        >>> world = symm_a2a.VirtualWorld(symm_a2a.EPConfig(**sizes, dtype=torch.float32), 2, "cpu")
        >>> lanes = [dispatcher.arena.lanes[0] for dispatcher in world.dispatchers]
        >>> x, scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 0.25], [1.0, 1.0]])
        >>> ids = torch.tensor([[1, 1], [0, -1]])
        >>> flights = [exchange.launch_dispatch(lane, x, scores, ids, 4, 1) for lane in lanes]
        >>> done = [exchange.join_dispatch(flight) for flight in flights]
        >>> _ = [exchange.launch_combine(l, d.rows_RD, d.routing) for l, d in zip(lanes, done, strict=True)]
        >>> out, route = torch.empty(2, 2), done[0].routing
        >>> of_peer, of_slot = route.copy_of_peer_TW, route.copy_of_slot_TK
        >>> finish(lanes[0].channel, Kind.COMBINE, out, torch.ones(1), of_peer, of_slot, route.tally)
        >>> out.tolist()
        [[0.75, 1.5], [3.0, 4.0]]
    """
    layout = channel.layout
    blocks = channel.blocks
    W, L = layout.world_size, layout.num_local_experts
    T = out_TD.shape[0]
    channel.launch(_finish_kernel, triton.cdiv(T, blocks.rows), blocks.residency.finish)(
        out_TD, channel.local["gather_scores"] if grad_scores_TK is None else grad_scores_TK, token,
        copy_of_peer_TW, copy_of_slot_TK, tally,
        channel.local["gather_rows"], channel.local["gather_scores"], channel.peers_W,
        channel.local["gather_ready"], channel.state, channel.status, channel.rank, T, layout.max_tokens,
        FREE=channel.offset("gather_free"), HOLDS=channel.holds,
        HAS_SCORES=grad_scores_TK is not None, KIND=int(kind),
        D=layout.hidden_dim, P=layout.padded_hidden, K=layout.top_k, K_PAD=padded(layout.top_k),
        L=L, W=W, W_PAD=padded(W),
        BLOCK_R=blocks.rows, BLOCK_W=blocks.peers, BLOCK_N=blocks.columns,
    )  # fmt: skip
