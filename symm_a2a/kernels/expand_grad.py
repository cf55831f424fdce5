"""Gradients of a combine at the experts: of each row, and of each score."""

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.addresses import copies_in_turn, slots_of
from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell, Channel, Kind
from symm_a2a.kernels.flags import dispatch_in
from symm_a2a.kernels.gaps import zero_gaps
from symm_a2a.kernels.phases import may_join, release_sections
from symm_a2a.kernels.rounding import narrow, widen

_DONE = tl.constexpr(int(Cell.DONE_EXPAND_GRAD))
_JOINED = tl.constexpr(int(Cell.SCATTER_JOINED))
_KIND = tl.constexpr(int(Kind.COMBINE_BACKWARD))


@triton.jit
def _zero_absent(
    grad_score_ptr, tally_ptr, rank, C,
    K: tl.constexpr, BLOCK_K: tl.constexpr, W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Zero the score gradients of copies that did not come: sums over handles read them all."""
    for first in tl.range(tl.program_id(0) * BLOCK_C, C * W, tl.num_programs(0) * BLOCK_C):
        source, place = copies_in_turn(first, rank, W, BLOCK_C)
        absent = (place >= tl.load(tally_ptr + W + source)) & (place < C)
        for k0 in tl.range(0, K, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            tl.store(
                grad_score_ptr + (source * C + place)[:, None] * K + k[None, :],
                tl.full((BLOCK_C, BLOCK_K), 0, grad_score_ptr.dtype.element_ty),
                mask=absent[:, None] & (k < K)[None, :],
            )


@triton.jit(do_not_specialize=["rank", "C", "capacity"])
def _expand_grad_kernel(
    grad_y_ptr, grad_score_ptr, y_ptr, row_of_copy_ptr, score_of_copy_ptr, tally_ptr, token_ptr,
    payload_ptr, peers_ptr, ready_ptr, state_ptr, status_ptr, rank, C, capacity,
    FREE: tl.constexpr, HOLDS: tl.constexpr,
    PAD: tl.constexpr, D: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    K_PAD: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """For each copy's row `g` and each of its slots: `grad_y = score * g`, `grad_score = <y, g>`.

    Products and sums are fp32 (fp64 for fp64 rows). Slots without a row, masked or dropped by
    a static capacity, get a zero score gradient.

    Example: `score = 0.5`, `y = [1, 2]`, `g = [3, 4]`: `grad_y = [1.5, 2]`, `grad_score = 11`.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    w = tl.arange(0, W_PAD)
    score_dtype = score_of_copy_ptr.dtype.element_ty
    epoch = tl.load(state_ptr + _JOINED) + 1
    follows = dispatch_in(tally_ptr, 2 * W + L)
    _, here = may_join(ready_ptr, state_ptr, status_ptr, epoch, follows, _KIND, W, W_PAD)
    if here:
        received = tl.load(tally_ptr + W + w, mask=w < W, other=0)
        for first in tl.range(program * BLOCK_R, tl.max(received, 0) * W, programs * BLOCK_R):
            source, place = copies_in_turn(first, rank, W, BLOCK_R)
            came = place < tl.load(tally_ptr + W + source)
            copy = source * C + place
            slots = slots_of(row_of_copy_ptr, copy, came, K, K_PAD)
            for k0 in tl.range(0, tl.max(slots, 0), BLOCK_K):
                k = k0 + tl.arange(0, BLOCK_K)
                mask = k[None, :] < slots[:, None]
                row = tl.load(row_of_copy_ptr + copy[:, None] * K + k[None, :], mask=mask, other=-1)
                score = tl.load(score_of_copy_ptr + copy[:, None] * K + k[None, :], mask=mask, other=0.0)
                products = tl.full((BLOCK_R, BLOCK_K, BLOCK_N // VECTOR), 0, score_dtype)
                for c in tl.range(0, D, BLOCK_N):
                    column = c + tl.arange(0, BLOCK_N)
                    g = tl.load(
                        payload_ptr + copy[:, None].to(tl.int64) * P + column[None, :],
                        mask=came[:, None] & (column < D)[None, :], other=0.0,
                    )  # fmt: skip
                    where = row[:, :, None].to(tl.int64) * D + column[None, None, :]
                    there = (row >= 0)[:, :, None] & (column < D)[None, None, :]
                    y = tl.load(y_ptr + where, mask=there, other=0.0)
                    # Both loads are on their way before either is used.
                    g = widen(g, score_dtype)[:, None, :]
                    y = widen(y, score_dtype)
                    tl.store(
                        grad_y_ptr + where, narrow(g * score[:, :, None], y_ptr.dtype.element_ty), mask=there
                    )
                    # A slot without a row has y = 0 here; 0 * g is not 0 where g is Inf or NaN.
                    product = tl.where(there, y * g, 0.0)
                    products += tl.sum(tl.reshape(product, [BLOCK_R, BLOCK_K, BLOCK_N // VECTOR, VECTOR]), 3)
                tl.store(grad_score_ptr + copy[:, None] * K + k[None, :], tl.sum(products, 2), mask=mask)
            every = tl.arange(0, K_PAD)
            tl.store(
                grad_score_ptr + copy[:, None] * K + every[None, :],
                tl.full((BLOCK_R, K_PAD), 0, score_dtype),
                mask=(came[:, None] & (every < K)[None, :]) & (every[None, :] >= slots[:, None]),
            )  # fmt: skip
        _zero_absent(grad_score_ptr, tally_ptr, rank, C, K, BLOCK_K, W, BLOCK_C)
        e = tl.arange(0, L_PAD)
        expert_rows = tl.load(tally_ptr + 2 * W + e, mask=e < L, other=0)
        zero_gaps(grad_y_ptr, expert_rows, capacity, program, programs, PAD, D, L, L_PAD, BLOCK_R, BLOCK_N)
        if program == 0:
            tl.store(token_ptr, 0.0)
    release_sections(peers_ptr, state_ptr, rank, epoch, _DONE, _JOINED, FREE, HOLDS, W, W_PAD)


def expand_grad(
    channel: Channel,
    grad_y_RD: torch.Tensor,
    grad_score_of_copy: torch.Tensor,
    y_RD: torch.Tensor,
    row_of_copy: torch.Tensor,
    score_of_copy: torch.Tensor,
    tally: torch.Tensor,
    token: torch.Tensor,
    *,
    pad_multiple: int,
) -> None:
    """Take the gradients of a combine's output, and turn them into those of its inputs.

    Needs every peer's `COMBINE_BACKWARD` copies to have arrived. When the kernel has run,
    every peer may overwrite its section here.

    Args:
        channel: the lane.
        grad_y_RD: written whole; zeros where a row belongs to no slot.
        grad_score_of_copy: `(W, C, K)` of the score dtype, written whole; 0 where no copy came.
        y_RD: the rows that were combined, contiguous.
        row_of_copy: int32 `(W, C, K)`, of the dispatch.
        score_of_copy: `(W, C, K)` of the score dtype, of the dispatch.
        tally: int32 `(2 W + L + 1,)`, of the dispatch.
        token: float32 `(1,)`, set to zero.
        pad_multiple: of the dispatch.

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
        >>> _ = [exchange.launch_combine_backward(l, x, d.routing) for l, d in zip(lanes, done, strict=True)]
        >>> y, route = torch.eye(2).repeat(2, 1), done[1].routing
        >>> grad_y, grad_scores = torch.empty(4, 2), torch.empty(2, 2, 2)
        >>> where = y, route.row_of_copy, route.score_of_copy, route.tally
        >>> expand_grad(lanes[1].channel, grad_y, grad_scores, *where, torch.ones(1), pad_multiple=1)
        >>> grad_y.tolist()
        [[0.5, 1.0], [0.25, 0.5], [0.5, 1.0], [0.25, 0.5]]
        >>> grad_scores.tolist()
        [[[1.0, 2.0], [0.0, 0.0]], [[1.0, 2.0], [0.0, 0.0]]]
    """
    layout = channel.layout
    blocks = channel.blocks
    W, L = layout.world_size, layout.num_local_experts
    work = triton.cdiv(W * layout.max_tokens, blocks.grad_rows)
    channel.launch(_expand_grad_kernel, work, blocks.residency.expand_grad)(
        grad_y_RD, grad_score_of_copy, y_RD, row_of_copy, score_of_copy, tally, token,
        channel.local["scatter_rows"], channel.peers_W, channel.local["scatter_ready"],
        channel.state, channel.status, channel.rank, layout.max_tokens, grad_y_RD.shape[0],
        FREE=channel.offset("scatter_free"), HOLDS=channel.holds,
        PAD=pad_multiple,
        D=layout.hidden_dim, P=layout.padded_hidden, K=layout.top_k, K_PAD=padded(layout.top_k),
        L=L, L_PAD=padded(L), W=W, W_PAD=padded(W), VECTOR=blocks.vector,
        BLOCK_C=blocks.copies, BLOCK_R=blocks.grad_rows, BLOCK_K=blocks.slots, BLOCK_N=blocks.columns,
    )  # fmt: skip
