"""Every order in which the steps of a system can happen.

A violation is a read of a section that is not wholly of the reader's own exchange (older: not written yet;
newer: overwritten), a flag that goes back, a launch that finds the credit missing, or a state in which nobody
can go on.

Steps that can neither be disabled by others nor change what others see (a wait that is satisfied, a check
that holds: flags only grow) are taken at once, alone. All orders of all others are explored; or, `reduced`,
only those that differ in what somebody sees: a step with which nothing conflicts that the others could do
before it is taken alone too. What the others could do is found by letting them do it: flags only grow, so
that a step that is possible once stays so.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.protocol.model import Op, State, System


@dataclass(frozen=True)
class Found:
    """What an exploration found.

    Attributes:
        states: looked at.
        violation: the first, in words; None where there is none.
        ends: how the ranks ended: which of them had given up.
    """

    states: int
    violation: str | None
    ends: frozenset[frozenset[int]] = frozenset()


class Violation(Exception):  # noqa: N818
    """A rule is broken; the text says which and by whom."""


def apply(system: System, state: State, move: tuple[int, int, Op]) -> State:
    """Return the state after a step that is no unsatisfied wait."""
    stream, program, op = move
    rank = system.streams[stream][0]
    flags, contents = state.flags, state.contents
    places = system.advanced(state, stream, program)
    if (rank, op.lane) in state.failed:
        return state._replace(places=places)
    if op.what == "publish":
        changed = list(flags)
        for cell in op.cells:
            if changed[cell] >= op.epoch:
                raise Violation(f"{op.text}: the flag is at {changed[cell]} already")
            changed[cell] = op.epoch
        flags = tuple(changed)
    elif op.what == "write":
        written = list(contents)
        for cell in op.cells:
            epoch, pieces = written[cell]
            written[cell] = (op.epoch, pieces + 1 if epoch == op.epoch else 1)
        contents = tuple(written)
    elif op.what == "read":
        for cell, pieces in zip(op.cells, op.pieces, strict=True):
            if contents[cell] != (op.epoch, pieces):
                raise Violation(
                    f"{op.text}: found epoch {contents[cell][0]}, {contents[cell][1]} of {pieces} pieces"
                )
    elif op.what == "check" and system.missing(state, op):
        raise Violation(f"{op.text}: not reached")
    return State(places, flags, contents, state.failed, state.gone)


def successors(system: System, state: State) -> Iterator[State]:
    """Yield what can follow a state.

    Raises:
        Violation: a step breaks a rule, or nothing can follow and not everybody has ended.
    """
    moves = system.moves(state)
    open_moves = []
    stuck = []
    for move in moves:
        stream, _, op = move
        rank = system.streams[stream][0]
        failed = (rank, op.lane) in state.failed
        if op.what not in ("wait", "check") or failed:
            open_moves.append(move)
        elif not system.missing(state, op):
            yield apply(system, state, move)
            return
        elif op.what == "check":
            apply(system, state, move)
        else:
            stuck.append((rank, op))
    yield from (apply(system, state, move) for move in open_moves)
    given_up = list(_given_up(system, state, stuck))
    yield from given_up
    if open_moves or given_up:
        return
    if stuck:
        raise Violation("nobody can go on: " + "; ".join(op.text for _, op in stuck))


def _given_up(system: System, state: State, stuck: Iterable[tuple[int, Op]]) -> Iterator[State]:
    """Yield how waits can end without what they wait for, and how ranks say that they have."""
    for rank, op in stuck:
        gone = state.gone - {rank}
        told = gone if system.world == "gpu" else gone & set(system.missing(state, op))
        if rank == system.late or told:
            yield state._replace(failed=state.failed | {(rank, op.lane)})
    for rank in {rank for rank, _ in state.failed if system.tells} - state.gone:
        yield state._replace(gone=state.gone | {rank})


def _alone(system: System, state: State) -> State | None:
    """Return what follows by a step with which nothing conflicts that others could do first, if any."""
    for move in system.moves(state):
        if move[2].what == "wait" and system.missing(state, move[2]):
            continue
        if not any(_conflict(move[2], other) for other in _before(system, state, move[:2])):
            return apply(system, state, move)
    return None


def _before(system: System, state: State, held: tuple[int, int]) -> Iterator[Op]:
    """Yield all that can be done while one program is held back."""
    while True:
        moves = [
            move for move in system.moves(state)
            if move[:2] != held and not (move[2].what == "wait" and system.missing(state, move[2]))
        ]  # fmt: skip
        if not moves:
            return
        for move in moves:
            yield move[2]
            # Contents do not matter here, and a rule that is broken will be found when it is.
            flags = list(state.flags)
            for cell in move[2].cells if move[2].what == "publish" else ():
                flags[cell] = max(flags[cell], move[2].epoch)
            state = state._replace(places=system.advanced(state, *move[:2]), flags=tuple(flags))


def _conflict(one: Op, other: Op) -> bool:
    """Whether the order of two steps can be seen."""
    if not set(one.cells) & set(other.cells):
        return False
    kinds = {one.what, other.what}
    return kinds in ({"read", "write"}, {"publish", "check"}, {"publish"})


def explore(system: System, *, reduced: bool = False) -> Found:
    """Look at every state that can be reached, or at as many as show all that can be seen."""
    start = system.start()
    seen = {_key(start)}
    pending = [start]
    ends: set[frozenset[int]] = set()
    while pending:
        state = pending.pop()
        try:
            alone = _alone(system, state) if reduced else None
            following = list(successors(system, state)) if alone is None else [alone]
        except Violation as violation:
            return Found(len(seen), str(violation))
        if not following:
            ends.add(state.gone)
        for new in following:
            if (key := _key(new)) not in seen:
                seen.add(key)
                pending.append(new)
    return Found(len(seen), None, frozenset(ends))


def _key(state: State) -> object:
    """Return what tells a state from others: until somebody fails, the places say it all."""
    return state if state.failed else state.places


def walk(system: System, walks: int, seed: int = 0) -> Found:
    """Follow random orders from the start to the end."""
    dice = random.Random(seed)
    states = 0
    ends: set[frozenset[int]] = set()
    for _ in range(walks):
        state = system.start()
        while True:
            states += 1
            try:
                following = list(successors(system, state))
            except Violation as violation:
                return Found(states, str(violation))
            if not following:
                ends.add(state.gone)
                break
            state = dice.choice(following)
    return Found(states, None, frozenset(ends))
