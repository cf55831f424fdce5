"""Sum the rows of each copy and send the sum back to the copy's origin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.addresses import copies_in_turn, peer_regions, slots_of
from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell, Channel, Kind
from symm_a2a.kernels.flags import dispatch_in, healthy, last_program
from symm_a2a.kernels.phases import announce, may_launch
from symm_a2a.kernels.rounding import narrow, widen

_DONE = tl.constexpr(int(Cell.DONE_GATHER))
_LAUNCHED = tl.constexpr(int(Cell.GATHER_LAUNCHED))
_DISPATCH_BACKWARD = tl.constexpr(int(Kind.DISPATCH_BACKWARD))


@triton.jit(do_not_specialize=["rank", "C", "polls"])
def _gather_kernel(
    y_ptr, row_of_copy_ptr, score_of_copy_ptr, tally_ptr,
    peers_ptr, ready_ptr, free_ptr, abort_ptr, state_ptr, status_ptr, rank, C, polls,
    ROWS: tl.constexpr, SCORES: tl.constexpr, READY: tl.constexpr,
    WEIGHTED: tl.constexpr, HAS_SCORES: tl.constexpr, SPINS: tl.constexpr, KIND: tl.constexpr,
    SCORE: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, L: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row back for each received copy: the sum over its slots of `[score *] y[row]`.

    Sums are fp32 (fp64 for fp64 rows). Without `WEIGHTED` (a dispatch's backward) the sums are
    plain; of a first dispatch the slots' values, which are score gradients then, go along.

    Example: a copy has rows 3 and 7 here with scores 0.5 and 0.25: `0.5 y[3] + 0.25 y[7]`.
    """
    program = tl.program_id(0)
    w = tl.arange(0, W_PAD)
    epoch = tl.load(state_ptr + _LAUNCHED) + 1
    if may_launch(free_ptr, state_ptr, status_ptr, epoch, KIND, W, W_PAD):
        received = tl.load(tally_ptr + W + w, mask=w < W, other=0)
        for first in tl.range(program * BLOCK_R, tl.max(received, 0) * W, tl.num_programs(0) * BLOCK_R):
            origin, place = copies_in_turn(first, rank, W, BLOCK_R)
            came = place < tl.load(tally_ptr + W + origin)
            copy = origin * C + place
            target = (rank * C + place).to(tl.int64)
            slots = slots_of(row_of_copy_ptr, copy, came, K, K_PAD)
            most = tl.max(slots, 0)
            section = peer_regions(peers_ptr, origin, came, ROWS, y_ptr.dtype.element_ty)
            for c in tl.range(0, P, BLOCK_N):
                column = c + tl.arange(0, BLOCK_N)
                total = tl.full((BLOCK_R, BLOCK_N), 0, SCORE)
                for k in tl.range(0, most, 2):
                    row0 = tl.load(row_of_copy_ptr + copy * K + k, mask=k < slots, other=-1)
                    row1 = tl.load(row_of_copy_ptr + copy * K + k + 1, mask=k + 1 < slots, other=-1)
                    if WEIGHTED:
                        # A slot without a row has y = 0; an Inf score must not make it NaN.
                        score0 = tl.load(score_of_copy_ptr + copy * K + k, mask=row0 >= 0, other=0.0)
                        score1 = tl.load(score_of_copy_ptr + copy * K + k + 1, mask=row1 >= 0, other=0.0)
                    # Both are on their way before either is used.
                    at0 = y_ptr + row0[:, None].to(tl.int64) * D + column[None, :]
                    at1 = y_ptr + row1[:, None].to(tl.int64) * D + column[None, :]
                    y0 = tl.load(at0, mask=(row0 >= 0)[:, None] & (column < D)[None, :], other=0.0)
                    y1 = tl.load(at1, mask=(row1 >= 0)[:, None] & (column < D)[None, :], other=0.0)
                    if WEIGHTED:
                        total += widen(y0, SCORE) * score0[:, None]
                        total += widen(y1, SCORE) * score1[:, None]
                    else:
                        total += widen(y0, SCORE)
                        total += widen(y1, SCORE)
                tl.store(
                    section[:, None] + target[:, None] * P + column[None, :],
                    narrow(total, y_ptr.dtype.element_ty),
                    mask=came[:, None] & (column < P)[None, :],
                )  # fmt: skip
            if KIND == _DISPATCH_BACKWARD:
                scores = peer_regions(peers_ptr, origin, came, SCORES, SCORE)
                for k0 in tl.range(0, K, BLOCK_K):
                    k = k0 + tl.arange(0, BLOCK_K)
                    mask = came[:, None] & (k < K)[None, :]
                    if HAS_SCORES:
                        grad = tl.load(
                            score_of_copy_ptr + copy[:, None] * K + k[None, :], mask=mask, other=0.0
                        )
                    else:
                        grad = tl.full((BLOCK_R, BLOCK_K), 0, SCORE)
                    tl.store(scores[:, None] + target[:, None] * K + k[None, :], grad, mask=mask)
    if last_program(state_ptr + _DONE):
        if healthy(state_ptr):
            follows = dispatch_in(tally_ptr, 2 * W + L)
            copies = tl.load(tally_ptr + W + w, mask=w < W, other=0).to(tl.int64)
            announce(
                peers_ptr, ready_ptr, abort_ptr, state_ptr, status_ptr, rank, epoch, follows, copies, polls,
                READY, _LAUNCHED, SPINS, KIND, W, W_PAD,
            )  # fmt: skip


def gather(
    channel: Channel,
    kind: Kind,
    y_RD: torch.Tensor,
    row_of_copy: torch.Tensor,
    score_of_copy: torch.Tensor | None,
    tally: torch.Tensor,
) -> None:
    """Send one row back for every copy that a dispatch brought here, and publish them.

    Needs the rows of the last gather in this lane to have been taken by every peer (the host
    has waited, or a scatter joined since implies it). When the kernel has run, every peer can
    see its rows behind its `gather_ready` flag.

    Args:
        channel: the lane.
        kind: `COMBINE`, rows weighted by their scores; `DISPATCH_BACKWARD` or
            `DISPATCH_AGAIN_BACKWARD`, plain sums.
        y_RD: rows, contiguous, of the layout's dtype.
        row_of_copy: int32 `(W, C, K)`, of the dispatch.
        score_of_copy: `(W, C, K)` of the score dtype. For a `COMBINE` the weights, for a
            `DISPATCH_BACKWARD` the score gradients to send along, zeros where None.
        tally: int32 `(2 W + L + 1,)`, of the dispatch.

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
        >>> route = done[1].routing
        >>> y = torch.tensor([[8.0, 0.0], [0.0, 8.0], [4.0, 0.0], [0.0, 4.0]])
        >>> gather(lanes[1].channel, Kind.COMBINE, y, route.row_of_copy, route.score_of_copy, route.tally)
        >>> [lane.channel.local["gather_rows"][1, 0, :2].tolist() for lane in lanes]
        [[4.0, 2.0], [2.0, 1.0]]
    """
    layout = channel.layout
    blocks = channel.blocks
    W, L = layout.world_size, layout.num_local_experts
    work = triton.cdiv(W * layout.max_tokens, blocks.sum_rows)
    channel.launch(_gather_kernel, work, blocks.residency.gather)(
        y_RD, row_of_copy, row_of_copy if score_of_copy is None else score_of_copy, tally,
        channel.peers_W, channel.local["gather_ready"], channel.local["gather_free"],
        channel.abort_W, channel.state, channel.status, channel.rank, layout.max_tokens, channel.polls,
        ROWS=channel.offset("gather_rows"), SCORES=channel.offset("gather_scores"),
        READY=channel.offset("gather_ready"),
        WEIGHTED=kind == Kind.COMBINE, HAS_SCORES=score_of_copy is not None,
        SPINS=channel.spins, KIND=int(kind),
        SCORE=tl.float64 if layout.score_dtype == torch.float64 else tl.float32,
        D=layout.hidden_dim, P=layout.padded_hidden, K=layout.top_k, K_PAD=padded(layout.top_k),
        L=L, W=W, W_PAD=padded(W),
        BLOCK_R=blocks.sum_rows, BLOCK_K=blocks.slots, BLOCK_N=blocks.columns,
    )  # fmt: skip
