"""A rank's exchanges in time, recorded or predicted, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from symm_a2a.kernels.channel import Kind


class Interval(NamedTuple):
    """Seconds, by a clock that all of a timeline shares."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.begin


@dataclass(frozen=True)
class Exchange:
    """One exchange on one rank, from its launch to its join.

    Attributes:
        kind: the operation.
        lane: the lane it ran in.
        epoch: its number in the lane's direction, from 1.
        nbytes: that left this rank for others.
        launch: the host's launch; on a GPU, when the caller's stream came by, or, for a synchronous
            exchange, all of its launch.
        arrival: when the last peer's copies were here.
        join: from where the rank begins to wait for the copies to where it has taken them.
        beside: whether anything else could run between launch and join.
    """

    kind: Kind
    lane: int
    epoch: int
    nbytes: int
    launch: Interval
    arrival: float
    join: Interval
    beside: bool = True

    @property
    def flight(self) -> Interval:
        """From this rank's launch until the last peer's copies were here; at least nothing."""
        begin = self.launch.end if self.beside else self.launch.begin
        return Interval(begin, max(begin, self.arrival))

    @property
    def wait(self) -> Interval:
        """The part of the flight in which this rank did nothing but wait for it."""
        begin = self.join.begin if self.beside else self.launch.begin
        return Interval(begin, max(begin, self.flight.end))

    @property
    def forward(self) -> bool:
        """Whether it belongs to a forward; a checkpoint's recomputation is one."""
        return not self.kind.name.endswith("_BACKWARD")


class Compute(NamedTuple):
    """A stretch in which this rank neither launched nor joined, and whose lane's micro-batch it served."""

    lane: int
    begin: float
    end: float


@dataclass(frozen=True)
class FlightStats:
    """What became of the time that exchanges were in flight, in seconds summed over exchanges.

    Attributes:
        exchanges: how many.
        nbytes: that left this rank for others.
        in_flight: from a launch until the last peer's copies were here.
        exposed: of that, in which this rank waited in the join of that exchange.
    """

    exchanges: int = 0
    nbytes: int = 0
    in_flight: float = 0.0
    exposed: float = 0.0

    @property
    def hidden(self) -> float:
        """Seconds in flight in which this rank did something else."""
        return self.in_flight - self.exposed

    @property
    def hidden_share(self) -> float:
        """The hidden part of the time in flight; 0 where nothing was in flight."""
        return self.hidden / self.in_flight if self.in_flight else 0.0


class _Event(NamedTuple):
    begin: float
    end: float
    exchange: Exchange
    launches: bool


@dataclass(frozen=True)
class Timeline:
    """What one rank did between `span.begin` and `span.end`.

    Attributes:
        exchanges: in the order of their launches.
        span: of the recording.
        rank: the rank.
        unfinished: exchanges that were launched, and not joined before the recording ended.
    """

    exchanges: tuple[Exchange, ...]
    span: Interval
    rank: int = 0
    unfinished: int = 0

    def events(self) -> list[tuple[str, str, int]]:
        """Return `("launch" or "join", operation, lane)` in the order in which this rank did them."""
        return [
            ("launch" if event.launches else "join", event.exchange.kind.title, event.exchange.lane)
            for event in self._events()
        ]

    def compute(self) -> list[Compute]:
        """Return the stretches between launches and joins, in order.

        What comes before a launch prepares it; anything else follows from what came before.
        """
        stretches, now, lane = [], self.span.begin, None
        for event in self._events():
            if event.begin > now:
                mine = event.exchange.lane if event.launches or lane is None else lane
                stretches.append(Compute(mine, now, event.begin))
            now, lane = max(now, event.end), event.exchange.lane
        if self.span.end > now and lane is not None:
            stretches.append(Compute(lane, now, self.span.end))
        return stretches

    def stats(self) -> dict[str, FlightStats]:
        """Return what became of the time in flight, of `"forward"` and `"backward"` exchanges."""
        return {
            "forward": _sum(e for e in self.exchanges if e.forward),
            "backward": _sum(e for e in self.exchanges if not e.forward),
        }

    def lanes(self) -> list[int]:
        """Return the lanes that anything ran in."""
        return sorted({exchange.lane for exchange in self.exchanges})

    def _events(self) -> list[_Event]:
        launches = [_Event(*exchange.launch, exchange, True) for exchange in self.exchanges]
        joins = [_Event(*exchange.join, exchange, False) for exchange in self.exchanges]
        # Of two at one instant, the one that ended first; a launch of no length comes before its join.
        return sorted(launches + joins, key=lambda event: (event.begin, event.end, not event.launches))


def _sum(exchanges: Iterable[Exchange]) -> FlightStats:
    count, nbytes, in_flight, exposed = 0, 0, 0.0, 0.0
    for exchange in exchanges:
        count, nbytes = count + 1, nbytes + exchange.nbytes
        in_flight += exchange.flight.seconds
        exposed += min(exchange.wait.seconds, exchange.flight.seconds)
    return FlightStats(count, nbytes, in_flight, exposed)
