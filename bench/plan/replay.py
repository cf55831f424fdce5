"""Operations in time: every rank's stream, host and link, one event after another.

A rank has a host, which issues operations in order and ahead of the device; a stream, which runs them in
order; a way out, which sends one message after another; and a way in, which takes what all ranks send it. A
launch begins to send when the stream comes by and the way out is free; it has arrived when the last sender
is done, the way in has taken it all, and the latency is over. A join holds the stream until then.

All ranks do the same operations in the same order, and what a join waits for was launched before it in that
order: one pass over the operations, for all ranks at once, meets every event after its causes. A launch has
to wait for the peers to have taken the lane's last data of the same direction. In a lane the directions
alternate, so the exchange joined in between has waited for that already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.plan.costs import Costs, ExchangeCost, Machine
from bench.plan.operations import Operation
from symm_a2a.kernels.channel import Kind
from symm_a2a.timeline import Exchange, Interval, Timeline


@dataclass(frozen=True)
class Replay:
    """What came of it.

    Attributes:
        timelines: of the ranks.
        seconds: until the last rank is done.
        compute_W: seconds of compute on each rank, at full speed.
        joins_W: seconds in which each rank took what had arrived, at full speed.
    """

    timelines: tuple[Timeline, ...]
    seconds: float
    compute_W: np.ndarray
    joins_W: np.ndarray

    @property
    def exposed(self) -> float:
        """Seconds in which a rank waited for exchanges in flight, in the mean over ranks."""
        waits = [stats.exposed for timeline in self.timelines for stats in timeline.stats().values()]
        return sum(waits) / len(self.timelines)

    def hidden(self, which: str) -> float:
        """Return the share of the flights of the "forward" or "backward" that was hidden, over all ranks."""
        stats = [timeline.stats()[which] for timeline in self.timelines]
        flown = sum(one.in_flight for one in stats)
        return sum(one.hidden for one in stats) / flown if flown else 0.0


@dataclass
class _Flight:
    kind: Kind
    lane: int
    epoch: int
    cost: ExchangeCost
    begin_W: np.ndarray
    launched_W: np.ndarray
    arrival_W: np.ndarray
    counted: float
    join_W: tuple[np.ndarray, np.ndarray] | None = None


def replay(operations: Sequence[Operation], costs: Sequence[Costs], machine: Machine | None = None) -> Replay:
    """Run operations in time.

    Args:
        operations: of every rank, in order.
        costs: of each micro-batch.
        machine: what exchanges share; None for one without latency and contention.
    """
    ranks = _Ranks(costs[0].ranks, machine or Machine())
    for operation in operations:
        its = costs[operation.micro_batch]
        if operation.action == "compute":
            assert operation.stage is not None
            position = (operation.forward, operation.stage, operation.layer)
            ranks.compute(its.compute[position], its.host.get(position, 0.0))
        else:
            assert operation.kind is not None
            do = ranks.launch if operation.action == "launch" else ranks.join
            do(operation.kind, operation.lane, its.exchanges[operation.kind])
    return ranks.result()


class _Ranks:
    """All ranks, by their clocks: arrays with an element for each rank."""

    def __init__(self, ranks: int, machine: Machine) -> None:
        self._machine = machine
        self._host, self._stream = np.zeros(ranks), np.zeros(ranks)
        self._out, self._in = np.zeros(ranks), np.zeros(ranks)
        self._computed, self._joined = np.zeros(ranks), np.zeros(ranks)
        self._sending: list[tuple[np.ndarray, np.ndarray]] = []
        self._flights: list[_Flight] = []
        self._in_flight: dict[int, _Flight] = {}
        self._epochs: dict[tuple[int, bool], int] = {}

    def compute(self, seconds_W: np.ndarray, host: float) -> None:
        self._stream = self._slowed(self._issue(host), seconds_W)
        self._computed += seconds_W

    def launch(self, kind: Kind, lane: int, cost: ExchangeCost) -> None:
        begin_W = self._issue(cost.launch_host)
        self._stream = begin_W + cost.launch_W
        sends_W = np.maximum(self._stream, self._out)
        self._out = sends_W + cost.send_W
        self._in = np.maximum(self._in, sends_W.min()) + cost.receive_W
        arrival_W = np.maximum(self._out.max(), self._in) + self._machine.latency
        counted = 0.0
        if cost.counted_W is not None:
            counted = float((sends_W + cost.counted_W).max()) + self._machine.latency
        flight = _Flight(kind, lane, self._epoch(lane, kind), cost, begin_W, self._stream, arrival_W, counted)
        self._sending.append((sends_W, self._out))
        self._flights.append(flight)
        self._in_flight[lane] = flight

    def join(self, kind: Kind, lane: int, cost: ExchangeCost) -> None:
        flight = self._in_flight.pop(lane)
        assert flight.kind == kind, "a lane joins what it has launched"
        self._host = np.maximum(self._host, flight.counted)
        begin_W = self._issue(cost.join_host)
        self._stream = self._slowed(np.maximum(begin_W, flight.arrival_W), cost.join_W)
        self._joined += cost.join_W
        flight.join_W = begin_W, self._stream

    def result(self) -> Replay:
        timelines = tuple(self._timeline(rank) for rank in range(len(self._stream)))
        return Replay(timelines, float(self._stream.max()), self._computed, self._joined)

    def _issue(self, seconds: float) -> np.ndarray:
        """Let the host issue something; return when the streams can begin with it."""
        self._host = self._host + seconds
        return np.maximum(self._stream, self._host)

    def _epoch(self, lane: int, kind: Kind) -> int:
        key = lane, kind.scatters
        self._epochs[key] = self._epochs.get(key, 0) + 1
        return self._epochs[key]

    def _slowed(self, begin_W: np.ndarray, seconds_W: np.ndarray) -> np.ndarray:
        """Return when work is done that goes on more slowly while its own rank sends."""
        lost = self._machine.contention
        self._sending = [(begin, end) for begin, end in self._sending if (end > begin_W).any()]
        now_W, left_W = begin_W, seconds_W
        for sends_W, sent_W in self._sending:
            free_W = np.minimum(left_W, np.maximum(0.0, sends_W - now_W))
            now_W, left_W = now_W + free_W, left_W - free_W
            # Nothing is done here where the work is done before the sending begins, or it begins after.
            beside_W = np.where(left_W > 0, np.maximum(0.0, sent_W - np.maximum(now_W, sends_W)), 0.0)
            slow_W = np.minimum(left_W, beside_W * (1 - lost))
            whole_W = left_W >= beside_W * (1 - lost)
            now_W = now_W + np.where(whole_W, beside_W, slow_W / max(1 - lost, 1e-9))
            left_W = left_W - slow_W
        return now_W + left_W

    def _timeline(self, rank: int) -> Timeline:
        exchanges = tuple(_exchange(flight, rank) for flight in self._flights)
        return Timeline(exchanges, Interval(0.0, float(self._stream[rank])), rank)


def _exchange(flight: _Flight, rank: int) -> Exchange:
    assert flight.join_W is not None, "every launch is joined"
    begin_W, end_W = flight.join_W
    return Exchange(
        flight.kind,
        flight.lane,
        flight.epoch,
        int(flight.cost.nbytes_W[rank]),
        Interval(float(flight.begin_W[rank]), float(flight.launched_W[rank])),
        float(flight.arrival_W[rank]),
        Interval(float(begin_W[rank]), float(end_W[rank])),
    )
