"""Launch and join as two autograd nodes each, so that other work may run between them.

The backward of a join launches the reverse exchange and the backward of its launch joins it:
autograd runs nodes in the reverse order of their creation, so the gap between launch and join
is there in the backward too, mirrored. Eager mode only: a compiler would reorder the halves.

The nodes are tied by one-element tensors that stand for the exchange in flight. A join saves
tensors, and its backward unpacks them before it launches: under activation checkpointing the
unpacking runs the forward again, which must not happen in a busy lane.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from symm_a2a.errors import DoubleBackwardError, InputError
from symm_a2a.exchange import (
    Dispatched,
    DispatchFlight,
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
from symm_a2a.lane import Lane


class DispatchState:
    """What the nodes of one dispatch share besides tensors that autograd knows."""

    def __init__(
        self,
        lane: Lane,
        anchor: Tensor,
        capacity: int,
        pad_multiple: int,
        table: Tensor | None = None,
        ledger: Tensor | None = None,
    ) -> None:
        self.lane = lane
        self.table = table
        self.ledger = ledger
        self.anchor = anchor
        self.capacity = capacity
        self.pad_multiple = pad_multiple
        self.flight: DispatchFlight | None = None
        self.given: tuple[Tensor, ...] = ()
        self.versions: list[int] = []
        self.result: Dispatched | None = None
        self.backward: tuple[Tensor, Routing] | None = None


class CombineState:
    """What the nodes of one combine share besides tensors that autograd knows."""

    def __init__(self, lane: Lane, zero: Tensor, pad_multiple: int) -> None:
        self.lane = lane
        self.zero = zero
        self.pad_multiple = pad_multiple
        self.flight: Tensor | None = None
        self.flight_version = 0
        self.routing: Routing | None = None
        self.backward: tuple[Tensor, Tensor, Routing] | None = None


class AgainState:
    """What the nodes of a second dispatch share besides tensors that autograd knows."""

    def __init__(self, lane: Lane, zero: Tensor, routing: Routing, num_rows: int, pad_multiple: int) -> None:
        self.lane = lane
        self.zero = zero
        self.routing = routing._replace(score_of_copy=routing.score_of_copy.detach())
        self.num_rows = num_rows
        self.pad_multiple = pad_multiple
        self.flight: Tensor | None = None
        self.given: tuple[Tensor, ...] = ()
        self.versions: list[int] = []
        self.backward: Tensor | None = None


def _require_first_order() -> None:
    """Raise in a backward with `create_graph`: a second derivative would come out as zero."""
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            "expected a backward without create_graph=True, got one with it; an exchange cannot be "
            "differentiated twice"
        )


def _require_as_launched(state: DispatchState | AgainState) -> None:
    """Raise where what was dispatched was changed in place meanwhile: on a GPU it may still be read then."""
    (given, state.given), versions = (state.given, ()), state.versions
    names = ("x_TD", "scores_TK", "topk_ids_TK")[: len(given)]
    for name, tensor, version in zip(names, given, versions, strict=True):
        if _version(tensor) != version:
            raise InputError(
                f"expected {name} as it was when the dispatch was launched, got it changed in place before "
                "the join; until then the launch may read it"
            )


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not say."""
    return 0 if tensor.is_inference() else tensor._version


class _DispatchLaunch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, state: DispatchState, x: Tensor, scores: Tensor, ids: Tensor, anchor: Tensor
    ) -> Tensor:
        ctx.state = state
        state.given, state.versions = (x, scores, ids), [_version(t) for t in (x, scores, ids)]
        state.flight = launch_dispatch(
            state.lane, x, scores, ids, state.capacity, state.pad_multiple, state.table, state.ledger,
            beside=True,
        )  # fmt: skip
        return x.new_empty(1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        state: DispatchState = ctx.state
        assert state.backward is not None, "the backward of the join has launched"
        rows, routing = state.backward
        state.backward = None
        grad_x, grad_scores, _ = join_dispatch_backward(state.lane, rows, routing)
        return None, grad_x, grad_scores, None, None


class _DispatchJoin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: DispatchState, flying: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert state.flight is not None, "the launch comes first"
        result, state.flight = join_dispatch(state.flight), None
        ctx.state, state.result = state, result
        ctx.set_materialize_grads(False)
        ctx.rows_shape = result.rows_RD.shape
        ctx.save_for_backward(*result.routing)
        _require_as_launched(state)
        return result.rows_RD, result.routing.score_of_copy, result.token

    @staticmethod
    def backward(
        ctx: Any, grad_rows: Tensor | None, grad_scores: Tensor | None, grad_token: Tensor | None
    ) -> tuple[None, Tensor]:
        state: DispatchState = ctx.state
        _require_first_order()
        routing = Routing(*ctx.saved_tensors)
        if grad_rows is None:
            grad_rows = torch.zeros(ctx.rows_shape, dtype=state.lane.layout.dtype, device=state.lane.device)
        rows = launch_dispatch_backward(state.lane, grad_rows, grad_scores, routing, beside=True)
        state.backward = rows, routing
        return None, state.anchor.detach()


class _CombineLaunch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: CombineState, y: Tensor, score_of_copy: Tensor, token: Tensor) -> Tensor:
        ctx.state = state
        assert state.routing is not None, "a combine follows a dispatch"
        state.flight = launch_combine(state.lane, y, state.routing, beside=True)
        state.flight_version = _version(state.flight)
        return torch.empty_like(token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        state: CombineState = ctx.state
        assert state.backward is not None, "the backward of the join has launched"
        _, y, routing = state.backward
        state.backward = None
        grad_y, grad_scores, grad_token = join_combine_backward(state.lane, y, routing, state.pad_multiple)
        return None, grad_y, grad_scores, grad_token


class _CombineJoin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: CombineState, flying: Tensor) -> Tensor:
        assert state.flight is not None, "the launch comes first"
        assert state.routing is not None
        y, routing = state.flight, state.routing
        state.flight = state.routing = None
        ctx.state = state
        ctx.save_for_backward(y, *routing)
        out, _ = join_combine(state.lane, y, routing)
        # Only now: the lane is idle again, and the peers are served.
        if _version(y) != state.flight_version:
            raise InputError(
                "expected y_RD as it was when the combine was launched, got it changed in place before the "
                "join; the backward needs its values"
            )
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[None, Tensor]:
        _require_first_order()
        state: CombineState = ctx.state
        y, *routing = ctx.saved_tensors
        routing = Routing(*routing)
        grad_out = launch_combine_backward(state.lane, grad_out, routing, beside=True)
        state.backward = grad_out, y, routing
        return None, state.zero


class _AgainLaunch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: AgainState, x: Tensor, token: Tensor) -> Tensor:
        ctx.state = state
        state.given, state.versions = (x,), [_version(x)]
        state.flight = launch_dispatch_again(state.lane, x, state.routing, beside=True)
        return torch.empty_like(token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        state: AgainState = ctx.state
        assert state.backward is not None, "the backward of the join has launched"
        rows, state.backward = state.backward, None
        grad_x, grad_token = join_dispatch_again_backward(state.lane, rows, state.routing)
        return None, grad_x, grad_token


class _AgainJoin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: AgainState, flying: Tensor) -> tuple[Tensor, Tensor]:
        assert state.flight is not None, "the launch comes first"
        flight, state.flight = state.flight, None
        rows, token = join_dispatch_again(
            state.lane, flight, state.routing, state.num_rows, state.pad_multiple
        )
        ctx.state = state
        ctx.save_for_backward(state.routing.tally)
        _require_as_launched(state)
        return rows, token

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, _: Tensor) -> tuple[None, Tensor]:
        _require_first_order()
        # Unpacked before anything is launched, see above.
        ctx.saved_tensors  # noqa: B018
        state: AgainState = ctx.state
        state.backward = launch_dispatch_again_backward(state.lane, grad_rows, state.routing, beside=True)
        return None, state.zero


def start_dispatch(state: DispatchState, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    """Launch a dispatch; return the tensor that stands for it until it is joined."""
    return _DispatchLaunch.apply(state, x, scores, ids, state.anchor)


def finish_dispatch(state: DispatchState, flying: Tensor) -> Dispatched:
    """Join a dispatch."""
    rows, score_of_copy, token = _DispatchJoin.apply(state, flying)
    result, state.result = state.result, None
    assert result is not None
    return Dispatched(
        rows, result.tokens_per_expert_L, result.routing._replace(score_of_copy=score_of_copy), token
    )


def start_combine(state: CombineState, y: Tensor, routing: Routing, token: Tensor) -> Tensor:
    """Launch a combine; return the tensor that stands for it until it is joined."""
    state.routing = routing._replace(score_of_copy=routing.score_of_copy.detach())
    return _CombineLaunch.apply(state, y, routing.score_of_copy, token)


def finish_combine(state: CombineState, flying: Tensor) -> Tensor:
    """Join a combine."""
    return _CombineJoin.apply(state, flying)


def start_again(state: AgainState, x: Tensor, token: Tensor) -> Tensor:
    """Launch a second dispatch; return the tensor that stands for it until it is joined."""
    return _AgainLaunch.apply(state, x, token)


def finish_again(state: AgainState, flying: Tensor) -> tuple[Tensor, Tensor]:
    """Join a second dispatch; return its rows and a token."""
    return _AgainJoin.apply(state, flying)
