"""The synchronous operators: launch and join in one, for graphs and plain training.

They are functional and the lane is idle at every operator's boundary, so a compiler may place
them as it likes. Two one-element tensors keep it from dropping one, which would leave the
peers waiting: the anchor, a leaf that requires a gradient, enters every dispatch, and a token
leaves every operator and enters the matching backward. Zero tokens make zero-size results,
which compilers fold away; the token is never empty.

Sizes are arguments, though the lane knows them: they are part of a graph's identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from symm_a2a.exchange import (
    EXACT,
    Routing,
    join_combine,
    join_combine_backward,
    join_dispatch,
    join_dispatch_again,
    join_dispatch_again_backward,
    join_dispatch_backward,
    launch_combine,
    launch_combine_backward,
    launch_dispatch,
    launch_dispatch_again,
    launch_dispatch_again_backward,
    launch_dispatch_backward,
)
from symm_a2a.ops.table import lane_of


@torch.library.custom_op("symm_a2a::dispatch", mutates_args=())
def dispatch(
    x: Tensor, scores: Tensor, ids: Tensor, anchor: Tensor, ledger: Tensor, table: Tensor | None, lane: int,
    world_size: int, num_local_experts: int, max_tokens: int, capacity: int, pad_multiple: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Dispatch in lane `lane`: rows, counts, the five tensors of `Routing`, and a token.

    The ledger is an address: what is added there is no compiler's business, as the lane is none.
    """
    flight = launch_dispatch(lane_of(lane), x, scores, ids, capacity, pad_multiple, table, ledger)
    rows, counts, routing, token = join_dispatch(flight)
    copy_of_peer, copy_of_slot, row_of_copy, score_of_copy, tally = routing
    return rows, counts, copy_of_peer, copy_of_slot, row_of_copy, score_of_copy, tally, token


@dispatch.register_fake
def _(
    x: Tensor, scores: Tensor, ids: Tensor, anchor: Tensor, ledger: Tensor, table: Tensor | None, lane: int,
    world_size: int, num_local_experts: int, max_tokens: int, capacity: int, pad_multiple: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    T, K = ids.shape
    num_rows = torch.library.get_ctx().new_dynamic_size() if capacity == EXACT else capacity
    score_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.new_empty((num_rows, x.shape[1])),
        x.new_empty(num_local_experts, dtype=torch.int32),
        x.new_empty((T, world_size), dtype=torch.int32),
        x.new_empty((T, K), dtype=torch.int32),
        x.new_empty((world_size, max_tokens, K), dtype=torch.int32),
        x.new_empty((world_size, max_tokens, K), dtype=score_dtype),
        x.new_empty(2 * world_size + num_local_experts + 1, dtype=torch.int32),
        x.new_empty(1, dtype=torch.float32),
    )


@torch.library.custom_op("symm_a2a::combine", mutates_args=())
def combine(
    y: Tensor, copy_of_peer: Tensor, copy_of_slot: Tensor, row_of_copy: Tensor, score_of_copy: Tensor,
    tally: Tensor, token: Tensor, lane: int, pad_multiple: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Combine in lane `lane`: the weighted sums `(T, D)`, and a token."""
    routing = Routing(copy_of_peer, copy_of_slot, row_of_copy, score_of_copy, tally)
    on = lane_of(lane)
    return join_combine(on, launch_combine(on, y, routing), routing)


@combine.register_fake
def _(
    y: Tensor, copy_of_peer: Tensor, copy_of_slot: Tensor, row_of_copy: Tensor, score_of_copy: Tensor,
    tally: Tensor, token: Tensor, lane: int, pad_multiple: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return y.new_empty((copy_of_peer.shape[0], y.shape[1])), torch.empty_like(token)


@torch.library.custom_op("symm_a2a::combine_backward", mutates_args=())
def combine_backward(
    grad_out: Tensor, y: Tensor, copy_of_peer: Tensor, copy_of_slot: Tensor, row_of_copy: Tensor,
    score_of_copy: Tensor, tally: Tensor, token: Tensor, lane: int, pad_multiple: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward of `combine`: gradients of the rows, of their scores, and of the token."""
    routing = Routing(copy_of_peer, copy_of_slot, row_of_copy, score_of_copy, tally)
    on = lane_of(lane)
    launch_combine_backward(on, grad_out, routing)
    return join_combine_backward(on, y, routing, pad_multiple)


@combine_backward.register_fake
def _(
    grad_out: Tensor, y: Tensor, copy_of_peer: Tensor, copy_of_slot: Tensor, row_of_copy: Tensor,
    score_of_copy: Tensor, tally: Tensor, token: Tensor, lane: int, pad_multiple: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return y.new_empty(y.shape), torch.empty_like(score_of_copy), torch.empty_like(token)


@torch.library.custom_op("symm_a2a::dispatch_backward", mutates_args=())
def dispatch_backward(
    grad_rows: Tensor, grad_score_of_copy: Tensor | None, grad_token: Tensor | None,
    copy_of_peer: Tensor, copy_of_slot: Tensor, row_of_copy: Tensor, score_of_copy: Tensor,
    tally: Tensor, token: Tensor, lane: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward of `dispatch`: gradients of the tokens, of their scores, and of the anchor."""
    routing = Routing(copy_of_peer, copy_of_slot, row_of_copy, score_of_copy, tally)
    on = lane_of(lane)
    rows = launch_dispatch_backward(on, grad_rows, grad_score_of_copy, routing)
    return join_dispatch_backward(on, rows, routing)


@dispatch_backward.register_fake
def _(
    grad_rows: Tensor, grad_score_of_copy: Tensor | None, grad_token: Tensor | None,
    copy_of_peer: Tensor, copy_of_slot: Tensor, row_of_copy: Tensor, score_of_copy: Tensor,
    tally: Tensor, token: Tensor, lane: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    T, K = copy_of_slot.shape
    grad_x = grad_rows.new_empty((T, grad_rows.shape[1]))
    return grad_x, score_of_copy.new_empty((T, K)), torch.empty_like(token)


@torch.library.custom_op("symm_a2a::dispatch_again", mutates_args=())
def dispatch_again(
    x: Tensor, copy_of_peer: Tensor, copy_of_slot: Tensor, row_of_copy: Tensor, score_of_copy: Tensor,
    tally: Tensor, token: Tensor, lane: int, num_rows: int, pad_multiple: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Dispatch in lane `lane` by a routing that is known: rows, and a token."""
    routing = Routing(copy_of_peer, copy_of_slot, row_of_copy, score_of_copy, tally)
    on = lane_of(lane)
    return join_dispatch_again(on, launch_dispatch_again(on, x, routing), routing, num_rows, pad_multiple)


@dispatch_again.register_fake
def _(
    x: Tensor, copy_of_peer: Tensor, copy_of_slot: Tensor, row_of_copy: Tensor, score_of_copy: Tensor,
    tally: Tensor, token: Tensor, lane: int, num_rows: int, pad_multiple: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty((num_rows, x.shape[1])), torch.empty_like(token)


@torch.library.custom_op("symm_a2a::dispatch_again_backward", mutates_args=())
def dispatch_again_backward(
    grad_rows: Tensor, grad_token: Tensor | None, copy_of_peer: Tensor, copy_of_slot: Tensor,
    row_of_copy: Tensor, score_of_copy: Tensor, tally: Tensor, token: Tensor, lane: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Backward of `dispatch_again`: gradients of the tokens, and of the token."""
    routing = Routing(copy_of_peer, copy_of_slot, row_of_copy, score_of_copy, tally)
    on = lane_of(lane)
    return join_dispatch_again_backward(on, launch_dispatch_again_backward(on, grad_rows, routing), routing)


@dispatch_again_backward.register_fake
def _(
    grad_rows: Tensor, grad_token: Tensor | None, copy_of_peer: Tensor, copy_of_slot: Tensor,
    row_of_copy: Tensor, score_of_copy: Tensor, tally: Tensor, token: Tensor, lane: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return grad_rows.new_empty((copy_of_peer.shape[0], grad_rows.shape[1])), torch.empty_like(token)


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.lane, ctx.rows_shape, ctx.rows_dtype = inputs[6], output[0].shape, output[0].dtype
    # Not the rows: nothing here reads them, and a caller may change them in place.
    ctx.save_for_backward(*output[2:])


def _dispatch_backward(ctx: Any, grad_rows: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
    *routing, token = ctx.saved_tensors
    if grad_rows is None:
        grad_rows = token.new_zeros(ctx.rows_shape, dtype=ctx.rows_dtype)
    grad_scores, grad_token = grads[Routing._fields.index("score_of_copy") + 1], grads[-1]
    grad_x, grad_scores, grad_anchor = torch.ops.symm_a2a.dispatch_backward(
        grad_rows, grad_scores, grad_token, *routing, token, ctx.lane
    )
    return grad_x, grad_scores, None, grad_anchor, *[None] * 8


dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_context)


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    y, *routing, _, ctx.lane, ctx.pad_multiple = inputs
    ctx.save_for_backward(y, *routing, output[1])


def _combine_backward(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    y, *routing, token = ctx.saved_tensors
    if grad_out is None:
        grad_out = y.new_zeros((routing[0].shape[0], y.shape[1]))
    grad_y, grad_scores, grad_token = torch.ops.symm_a2a.combine_backward(
        grad_out, y, *routing, token, ctx.lane, ctx.pad_multiple
    )
    return grad_y, None, None, None, grad_scores, None, grad_token, None, None


combine.register_autograd(_combine_backward, setup_context=_combine_context)


def _dispatch_again_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    _, *routing, _, ctx.lane, _, _ = inputs
    ctx.rows_shape, ctx.rows_dtype = output[0].shape, output[0].dtype
    ctx.save_for_backward(*routing, output[1])


def _dispatch_again_backward(
    ctx: Any, grad_rows: Tensor | None, grad_token: Tensor | None
) -> tuple[Any, ...]:
    *routing, token = ctx.saved_tensors
    if grad_rows is None:
        grad_rows = token.new_zeros(ctx.rows_shape, dtype=ctx.rows_dtype)
    grad_x, grad_token = torch.ops.symm_a2a.dispatch_again_backward(
        grad_rows, grad_token, *routing, token, ctx.lane
    )
    return grad_x, *[None] * 5, grad_token, None, None, None


dispatch_again.register_autograd(_dispatch_again_backward, setup_context=_dispatch_again_context)
