"""Step times: without Domino, and with it for each number of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from bench.plan.memory import Memory
from bench.plan.operations import step
from bench.plan.replay import Replay, replay
from bench.plan.work import Work


@dataclass(frozen=True)
class Schedule:
    """One way to do a step, in seconds for one batch of each rank.

    Attributes:
        lanes: that they take.
        micro_batches: M; with one nothing but shared experts runs beside an exchange.
        seconds: until the last rank is done.
        exposed: waited for exchanges in flight, in the mean over ranks.
        compute: of it, at full speed, on the rank that has most.
        joins: taking what has arrived, likewise.
        hidden_forward: the share of the forward's flights under which something else ran.
        hidden_backward: the same of the backward.
        memory: at the fullest; None where nobody knows.
        replay: what came of it.
    """

    lanes: int
    micro_batches: int
    seconds: float
    exposed: float
    compute: float
    joins: float
    hidden_forward: float
    hidden_backward: float
    memory: Memory | None
    replay: Replay


def schedule(work: Work, micro_batches: int, variation: float = 0.0) -> Schedule:
    """Return what becomes of a step.

    Args:
        work: to do.
        micro_batches: M.
        variation: the coefficient of variation of tokens per expert.
    """
    lanes = min(micro_batches, work.lanes)
    operations = step(
        micro_batches,
        work.layers,
        lanes=lanes,
        shared=work.shared,
        drains=work.checkpoint,
    )
    done = replay(operations, work.costs(micro_batches, variation), work.machine)
    batches = work.batches(micro_batches)
    return Schedule(
        lanes,
        micro_batches,
        seconds=done.seconds / batches,
        exposed=done.exposed / batches,
        compute=float(done.compute_W.max()) / batches,
        joins=float(done.joins_W.max()) / batches,
        hidden_forward=done.hidden("forward"),
        hidden_backward=done.hidden("backward"),
        memory=work.memory(micro_batches),
        replay=done,
    )


@dataclass(frozen=True)
class Uneven:
    """A spread of tokens over experts, and what it makes of the step.

    Attributes:
        variation: the coefficient of variation of tokens per expert.
        busiest: rows of the busiest rank, as a multiple of the mean.
        together: seconds without Domino.
        interleaved: seconds with it.
    """

    variation: float
    busiest: float
    together: float
    interleaved: float

    @property
    def gain(self) -> float:
        """The share of the step that Domino saves."""
        return gain(self.together, self.interleaved)


def gain(before: float, after: float) -> float:
    """Return the share of a time that is saved; negative where it takes longer."""
    return 1 - after / before if before else 0.0
