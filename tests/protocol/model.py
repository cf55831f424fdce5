"""Ranks that run schedules on lanes: who is where, and what can come next.

A state is how far each stream of each rank has come; flags and contents follow from it, until a rank gives
up. What a rank launches, and what its kernels do, is the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.protocol.schedules import WAITS, Node
from tests.protocol.steps import Step, Steps, World, kernels

KernelsOf = Callable[[int], dict[tuple[str, ...], Steps]]
"""A rank's kernels, by key."""


class Op(NamedTuple):
    """A step with its exchange: on cells of the system, flags or sections.

    Attributes:
        what: as of a `Step`.
        cells: places in the system's flags, or contents.
        epoch: that flags are to have, or contents.
        pieces: of a read: how many programs write each section.
        lane: the lane's place.
        text: for messages.
    """

    what: str
    cells: tuple[int, ...]
    epoch: int
    pieces: tuple[int, ...]
    lane: int
    text: str


class Work(NamedTuple):
    """A node of a rank's schedule, ready to run."""

    after: tuple[tuple[int, int], ...]  # (stream, place in it) of what has ended before
    programs: tuple[tuple[Op, ...], ...]
    last: tuple[Op, ...]


class Place(NamedTuple):
    """How far a stream has come: its node, the node's programs, and the end of the last of them."""

    node: int
    programs: tuple[int, ...]
    last: int


class State(NamedTuple):
    """Where everybody is.

    Attributes:
        places: of each stream.
        flags: epochs.
        contents: of each section `(epoch, pieces written)`.
        failed: `(rank, lane)` that have given up.
        gone: ranks that have told their peers so.
    """

    places: tuple[Place, ...]
    flags: tuple[int, ...]
    contents: tuple[tuple[int, int], ...]
    failed: frozenset[tuple[int, int]] = frozenset()
    gone: frozenset[int] = frozenset()


class System:
    """Ranks that run schedules on lanes.

    Args:
        schedules: of each rank.
        world: who waits.
        kernels_of: what kernels do on each rank; None for what they do in the code.
        late: a rank that may give up whenever it has to wait, whatever it waits for; None for none.
        tells: whether it tells its peers.
        room: how many programs a rank's device runs at once; None for all. One that waits takes its room.
    """

    def __init__(
        self,
        schedules: Sequence[Sequence[Node]],
        world: World,
        kernels_of: KernelsOf | None = None,
        *,
        late: int | None = None,
        tells: bool = True,
        room: int | None = None,
    ) -> None:
        self.world_size = len(schedules)
        self.world: World = world
        self.late = late
        self.tells = tells
        self.room = room
        self._kernels_of = kernels_of or (lambda rank: kernels(world, self.world_size, rank))
        self._flags: dict[tuple[int, str, int, int], int] = {}
        self._sections: dict[tuple[int, str, int, int], int] = {}
        self._producer: dict[int, int] = {}
        self.streams: list[tuple[int, tuple[Work, ...]]] = []
        pieces = self._pieces(schedules)
        for rank, schedule in enumerate(schedules):
            self._add(rank, schedule, pieces)

    def start(self) -> State:
        """Return the state in which nothing has happened."""
        places = tuple(_at(nodes, 0) for _, nodes in self.streams)
        return State(places, (0,) * len(self._flags), ((0, 0),) * len(self._sections))

    def _pieces(self, schedules: Sequence[Sequence[Node]]) -> dict[tuple[int, str, int, int, int], int]:
        """Return how many programs write each section in each epoch."""
        pieces: dict[tuple[int, str, int, int, int], int] = {}
        for rank, schedule in enumerate(schedules):
            for node in schedule:
                if node.key[0] == WAITS:
                    continue
                steps = self._kernels_of(rank)[node.key]
                for step in (step for program in (*steps.programs, steps.last) for step in program):
                    if step.what == "write":
                        for place in step.places:
                            cell = (node.lane, step.region, *place, node.epoch)
                            pieces[cell] = pieces.get(cell, 0) + 1
        return pieces

    def _add(
        self, rank: int, schedule: Sequence[Node], pieces: dict[tuple[int, str, int, int, int], int]
    ) -> None:
        names = list(dict.fromkeys(node.stream for node in schedule))
        first = len(self.streams)
        where: list[tuple[int, int]] = []
        streams: list[list[Work]] = [[] for _ in names]
        for node in schedule:
            stream = names.index(node.stream)
            where.append((first + stream, len(streams[stream])))
            steps = self._steps(rank, node)
            begin = () if self.room is None else (Step("begin", "", frozenset()),)
            work = Work(
                tuple(where[after] for after in node.after),
                tuple(
                    tuple(self._op(rank, node, step, pieces) for step in (*begin, *one))
                    for one in steps.programs
                ),
                tuple(self._op(rank, node, step, pieces) for step in steps.last),
            )
            assert any(work.programs) or work.last, node
            streams[stream].append(work)
        self.streams += [(rank, tuple(works)) for works in streams]

    def _steps(self, rank: int, node: Node) -> Steps:
        if node.key[0] == WAITS:
            everybody = frozenset((rank, peer) for peer in range(self.world_size))
            return Steps(((Step("wait", node.key[1], everybody),),), ())
        return self._kernels_of(rank)[node.key]

    def _op(self, rank: int, node: Node, step: Step, pieces: dict[tuple[int, str, int, int, int], int]) -> Op:
        what, places = step.what, sorted(step.places)
        # Where the host waits, kernels look once.
        if what == "wait" and self.world == "host" and node.key[0] != WAITS:
            what = "check"
        known = self._sections if what in ("read", "write") else self._flags
        cells = []
        for place in places:
            cells.append(known.setdefault((node.lane, step.region, *place), len(known)))
            if known is self._flags:
                self._producer[cells[-1]] = place[1]
        epoch = node.epoch + step.epoch
        wanted = tuple(pieces.get((node.lane, step.region, *place, epoch), 0) for place in places)
        by = node.key[0].strip("_")
        text = f"rank {rank}, lane {node.lane}: {step.what} {step.region} of epoch {epoch} ({by})"
        return Op(what, tuple(cells), epoch, wanted if what == "read" else (), node.lane, text)

    def moves(self, state: State) -> list[tuple[int, int, Op]]:
        """Return what can come next of each stream: stream, program (-1: the last one's end), step."""
        found = []
        full = self._full(state)
        for stream, (rank, nodes) in enumerate(self.streams):
            place = state.places[stream]
            if place.node == len(nodes):
                continue
            node = nodes[place.node]
            if rank in state.gone and not any(place.programs) and not place.last:
                continue  # The host has not launched it.
            if any(state.places[other].node <= at for other, at in node.after):
                continue
            running = [p for p, done in enumerate(place.programs) if done < len(node.programs[p])]
            for p in running:
                if place.programs[p] or rank not in full:
                    found.append((stream, p, node.programs[p][place.programs[p]]))
            if not running:
                found.append((stream, -1, node.last[place.last]))
        return found

    def _full(self, state: State) -> set[int]:
        """Return the ranks on whose devices no further program can begin."""
        if self.room is None:
            return set()
        busy = [0] * self.world_size
        for (rank, nodes), place in zip(self.streams, state.places, strict=True):
            if place.node < len(nodes):
                lengths = [len(program) for program in nodes[place.node].programs]
                resident = sum(0 < done < n for done, n in zip(place.programs, lengths, strict=True))
                # The last one to end goes on where it is.
                busy[rank] += resident + (list(place.programs) == lengths)
        return {rank for rank, programs in enumerate(busy) if programs >= self.room}

    def advanced(self, state: State, stream: int, program: int) -> tuple[Place, ...]:
        """Return the places after a step of a stream."""
        _, nodes = self.streams[stream]
        place = state.places[stream]
        node = nodes[place.node]
        if program < 0:
            place = place._replace(last=place.last + 1)
        else:
            done = list(place.programs)
            done[program] += 1
            place = place._replace(programs=tuple(done))
        ended = all(done == len(p) for done, p in zip(place.programs, node.programs, strict=True))
        if ended and place.last == len(node.last):
            place = _at(nodes, place.node + 1)
        return (*state.places[:stream], place, *state.places[stream + 1 :])

    def missing(self, state: State, op: Op) -> list[int]:
        """Return the ranks whose flags have not reached what a step wants."""
        return [self._producer[cell] for cell in op.cells if state.flags[cell] < op.epoch]


def _at(nodes: Sequence[Work], node: int) -> Place:
    """Return the place at the beginning of a node, or the end."""
    return Place(node, (0,) * len(nodes[node].programs) if node < len(nodes) else (), 0)
