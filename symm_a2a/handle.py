"""What a dispatch leaves for its combine, and exchanges in flight."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from symm_a2a.errors import JoinedTwiceError
from symm_a2a.exchange import Routing
from symm_a2a.ops.split import (
    AgainState,
    CombineState,
    DispatchState,
    finish_again,
    finish_combine,
    finish_dispatch,
)


class Handle(NamedTuple):
    """What a combine needs to know of its dispatch; ordinary tensors, owned by the handle.

    A handle may be combined any number of times, and other rows dispatched with it; it stays good whatever
    the lane does since.

    Attributes:
        routing: where the copies went.
        token: float32 `(1,)`; orders the backward, holds nothing.
        num_rows: R, the rows that the dispatch gave.
        pad_multiple: of the dispatcher.
        lane: the number of the dispatch's lane, where its combine runs too.
    """

    routing: Routing
    token: Tensor
    num_rows: int
    pad_multiple: int
    lane: int

    @property
    def copies_sent_W(self) -> Tensor:
        """int32, the copies that this rank sent to each rank, itself included."""
        return self.routing.tally[: self.routing.copy_of_peer_TW.shape[1]]

    @property
    def num_tokens(self) -> int:
        """T of the dispatch."""
        return self.routing.copy_of_peer_TW.shape[0]


class PendingDispatch:
    """A dispatch in flight; `join` waits for it."""

    def __init__(
        self, state: DispatchState, flying: Tensor, lane_number: int, num_local_experts: int
    ) -> None:
        self._state: DispatchState | None = state
        self._flying = flying
        self._lane = state.lane.index
        self._lane_number = lane_number
        self._num_local_experts = num_local_experts

    @property
    def lane(self) -> int:
        """The lane's place in the arena."""
        return self._lane

    def join(self) -> tuple[Tensor, Tensor, Handle]:
        """Wait for the rows; returns what `SymmTokenDispatcher.dispatch` does.

        Raises:
            JoinedTwiceError: it has been joined before.
            ExchangeError: a peer did not take part.
        """
        if self._state is None:
            raise JoinedTwiceError("expected a pending dispatch, got one that was joined before")
        state, self._state = self._state, None
        rows, counts, routing, token = finish_dispatch(state, self._flying)
        handle = Handle(routing, token, rows.shape[0], state.pad_multiple, self._lane_number)
        return rows, counts[: self._num_local_experts], handle


class PendingCombine:
    """A combine in flight; `join` waits for it."""

    def __init__(self, state: CombineState, flying: Tensor) -> None:
        self._state: CombineState | None = state
        self._flying = flying
        self._lane = state.lane.index

    @property
    def lane(self) -> int:
        """The lane's place in the arena."""
        return self._lane

    def join(self) -> Tensor:
        """Wait for the sums; returns what `SymmTokenDispatcher.combine` does.

        Raises:
            JoinedTwiceError: it has been joined before.
            ExchangeError: a peer did not take part.
        """
        if self._state is None:
            raise JoinedTwiceError("expected a pending combine, got one that was joined before")
        state, self._state = self._state, None
        return finish_combine(state, self._flying)


class PendingAgain:
    """A second dispatch in flight; `join` waits for it."""

    def __init__(self, state: AgainState, flying: Tensor) -> None:
        self._state: AgainState | None = state
        self._flying = flying
        self._lane = state.lane.index

    @property
    def lane(self) -> int:
        """The lane's place in the arena."""
        return self._lane

    def join(self) -> Tensor:
        """Wait for the rows; returns what `SymmTokenDispatcher.dispatch_again` does.

        Raises:
            JoinedTwiceError: it has been joined before.
            ExchangeError: a peer did not take part.
        """
        if self._state is None:
            raise JoinedTwiceError("expected a pending dispatch, got one that was joined before")
        state, self._state = self._state, None
        return finish_again(state, self._flying)
