"""What a dispatch leaves for its combine, and exchanges in flight."""

from __future__ import annotations

from typing import ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

from symm_a2a.eager import eager
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
        tokens: one float32 `(1,)`; orders the backward, holds nothing.
        num_rows: R, the rows that the dispatch gave.
        pad_multiple: of the dispatcher.
        lane: the number of the dispatch's lane, where its combine runs too.
    """

    routing: Routing
    tokens: list[Tensor]
    num_rows: int
    pad_multiple: int
    lane: int

    @property
    def token(self) -> Tensor:
        """The token of the last dispatch with this handle; a combine follows it."""
        return self.tokens[0]

    def follow(self, token: Tensor) -> None:
        """Let what comes next follow a second dispatch, so that its backward runs on every rank or none.

        What a rank combines may not depend on the rows, where none came.
        """
        if token.requires_grad:
            self.tokens[0] = token

    @property
    def copies_sent_W(self) -> Tensor:
        """int32, the copies that this rank sent to each rank, itself included."""
        return self.routing.tally[: self.routing.copy_of_peer_TW.shape[1]]

    @property
    def num_tokens(self) -> int:
        """T of the dispatch."""
        return self.routing.copy_of_peer_TW.shape[0]


State = TypeVar("State", DispatchState, CombineState, AgainState)


class _Pending(Generic[State]):
    """An exchange in flight, to be joined once."""

    _name: ClassVar[str]

    def __init__(self, state: State, flying: Tensor) -> None:
        self._state: State | None = state
        self._flying = flying
        self._lane = state.lane.index

    @property
    def lane(self) -> int:
        """The lane's place in the arena."""
        return self._lane

    def _take(self) -> State:
        if self._state is None:
            raise JoinedTwiceError(f"expected a pending {self._name}, got one that was joined before")
        state, self._state = self._state, None
        return state


class PendingDispatch(_Pending[DispatchState]):
    """A dispatch in flight; `join` waits for it."""

    _name = "dispatch"

    def __init__(
        self, state: DispatchState, flying: Tensor, lane_number: int, num_local_experts: int
    ) -> None:
        super().__init__(state, flying)
        self._lane_number = lane_number
        self._num_local_experts = num_local_experts

    @eager
    def join(self) -> tuple[Tensor, Tensor, Handle]:
        """Wait for the rows; returns what `SymmTokenDispatcher.dispatch` does.

        Raises:
            JoinedTwiceError: it has been joined before.
            ExchangeError: a peer did not take part.
        """
        state = self._take()
        rows, counts, routing, token = finish_dispatch(state, self._flying)
        handle = Handle(routing, [token], rows.shape[0], state.pad_multiple, self._lane_number)
        return rows, counts[: self._num_local_experts], handle


class PendingCombine(_Pending[CombineState]):
    """A combine in flight; `join` waits for it."""

    _name = "combine"

    @eager
    def join(self) -> Tensor:
        """Wait for the sums; returns what `SymmTokenDispatcher.combine` does.

        Raises:
            JoinedTwiceError: it has been joined before.
            ExchangeError: a peer did not take part.
        """
        return finish_combine(self._take(), self._flying)


class PendingAgain(_Pending[AgainState]):
    """A second dispatch in flight; `join` waits for it."""

    _name = "dispatch"

    def __init__(self, state: AgainState, flying: Tensor, handle: Handle) -> None:
        super().__init__(state, flying)
        self._handle = handle

    @eager
    def join(self) -> Tensor:
        """Wait for the rows; returns what `SymmTokenDispatcher.dispatch_again` does.

        Raises:
            JoinedTwiceError: it has been joined before.
            ExchangeError: a peer did not take part.
        """
        rows, token = finish_again(self._take(), self._flying)
        self._handle.follow(token)
        return rows
