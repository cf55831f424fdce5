"""What `Domino` makes a rank do, in order: written down by running it over a dispatcher that moves nothing.

The order is the library's own. `symm_a2a.Domino` runs `symm_a2a.Stages`, as it does in a model; only the
stages compute nothing and the exchanges move nothing, and each leaves a note. Autograd runs nodes in the
reverse order of their creation, the backward of a join launches and that of a launch joins, so the backward
is the list of the forward reversed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import symm_a2a
from symm_a2a.kernels.channel import Kind

Action = Literal["compute", "launch", "join"]
Stage = Literal["pre", "experts", "shared", "post"]

_REVERSED: dict[Action, Action] = {"compute": "compute", "launch": "join", "join": "launch"}
_BACKWARD = {Kind.DISPATCH: Kind.DISPATCH_BACKWARD, Kind.COMBINE: Kind.COMBINE_BACKWARD}
_LETTERS = {"pre": "A", "experts": "E", "shared": "S", "post": "P"}


@dataclass(frozen=True)
class Operation:
    """One thing that every rank does for one micro-batch in one layer.

    Attributes:
        action: compute a stage, launch an exchange, or join it.
        micro_batch: whose.
        layer: in which.
        forward: whether in a forward; a checkpoint's recomputation is one.
        stage: what is computed.
        kind: of the exchange.
        lane: of the exchange.
    """

    action: Action
    micro_batch: int
    layer: int
    forward: bool = True
    stage: Stage | None = None
    kind: Kind | None = None
    lane: int = -1

    @property
    def short(self) -> str:
        """The operation in the letters of `symm_a2a/domino/schedule.py`, a prime for each layer.

        Example:
            >>> Operation("launch", 1, 2, kind=Kind.COMBINE, lane=1).short
            "LC1''"
        """
        letters = _LETTERS[self.stage] if self.stage else self.action[0].upper() + _letter(self.kind)
        return f"{letters}{self.micro_batch}" + "'" * self.layer

    def reversed(self) -> Operation:
        """Return what autograd does in this operation's place."""
        kind = None if self.kind is None else _BACKWARD[self.kind]
        return replace(self, action=_REVERSED[self.action], forward=False, kind=kind)


def step(
    num_micro_batches: int, layers: int, *, lanes: int = 2, shared: bool = False, drains: bool = False
) -> list[Operation]:
    """Return the operations of a forward and a backward.

    Args:
        num_micro_batches: M.
        layers: L, all alike.
        lanes: of the dispatcher.
        shared: whether the layers have shared experts.
        drains: whether each layer is run, and recomputed in the backward, as a checkpoint of its own: its
            last exchanges are joined before the next layer begins.
    """
    if not drains:
        there = forward(num_micro_batches, range(layers), lanes, shared)
        return [*there, *backward(there)]
    windows = [forward(num_micro_batches, [layer], lanes, shared) for layer in range(layers)]
    again = [[*window, *backward(window)] for window in reversed(windows)]
    return [operation for window in [*windows, *again] for operation in window]


def forward(num_micro_batches: int, layers: Any, lanes: int, shared: bool) -> list[Operation]:
    """Return what `Domino.run_layers` does in a forward through layers with these numbers."""
    notes = _Notes(lanes)
    stages = [_stages(notes, layer, shared) for layer in layers]
    symm_a2a.Domino(notes, num_micro_batches).run_layers(stages, list(range(num_micro_batches)))
    return notes.operations


def backward(operations: list[Operation]) -> list[Operation]:
    """Return the backward of a forward."""
    return [operation.reversed() for operation in reversed(operations)]


class _Notes:
    """A dispatcher for `Domino` that notes what it is asked for; its rows are numbers of micro-batches."""

    def __init__(self, lanes: int) -> None:
        self.operations: list[Operation] = []
        self._lanes = lanes
        self._lane = 0
        self._in_flight: set[int] = set()

    @property
    def num_lanes(self) -> int:
        return self._lanes

    @contextmanager
    def in_lane(self, lane: int) -> Iterator[None]:
        before, self._lane = self._lane, lane
        try:
            yield
        finally:
            self._lane = before

    def require_idle(self, lane: int | None = None) -> None:
        busy = self._in_flight if lane is None else self._in_flight & {lane}
        assert not busy, f"lanes {busy} are in flight"

    def give_up(self, reason: str) -> None:
        """Do nothing: there is no other rank."""

    def dispatch_async(self, micro_batch: int, layer: int, ids: None) -> _Flight:
        return self._launch(Kind.DISPATCH, micro_batch, layer)

    def combine_async(self, micro_batch: int, handle: int) -> _Flight:
        return self._launch(Kind.COMBINE, micro_batch, handle)

    def note(self, operation: Operation) -> None:
        self.operations.append(operation)

    def end(self, lane: int) -> None:
        self._in_flight.remove(lane)

    def _launch(self, kind: Kind, micro_batch: int, layer: int) -> _Flight:
        self.require_idle(self._lane)
        self._in_flight.add(self._lane)
        operation = Operation("launch", micro_batch, layer, kind=kind, lane=self._lane)
        self.note(operation)
        return _Flight(self, operation)


class _Flight:
    """An exchange between launch and join."""

    def __init__(self, notes: _Notes, launch: Operation) -> None:
        self._notes = notes
        self._launch = launch

    @property
    def lane(self) -> int:
        return self._launch.lane

    def join(self) -> Any:
        launch = self._launch
        self._notes.note(replace(launch, action="join"))
        self._notes.end(launch.lane)
        # What the experts get is the rows, their numbers, and a handle.
        rows = launch.micro_batch
        return (rows, None, launch.layer) if launch.kind == Kind.DISPATCH else rows


def _stages(notes: _Notes, layer: int, shared: bool) -> symm_a2a.Stages:
    def compute(stage: Stage, micro_batch: int) -> int:
        notes.note(Operation("compute", micro_batch, layer, stage=stage))
        return micro_batch

    return symm_a2a.Stages(
        pre=lambda x: (compute("pre", x), layer, None, x),
        experts=lambda rows, counts: compute("experts", rows),
        post=lambda out, kept, *beside: compute("post", out),
        shared=(lambda x: compute("shared", x)) if shared else None,
    )


def _letter(kind: Kind | None) -> str:
    assert kind is not None
    return kind.name[0] + ("b" if kind in _BACKWARD.values() else "")
