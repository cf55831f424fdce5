"""A micro-batch's costs as they were measured, on every rank, and the link between the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.plan.costs import Costs, ExchangeCost, Machine, Position
from bench.plan.operations import Stage
from symm_a2a import Link
from symm_a2a.kernels.channel import Kind

KINDS = (Kind.DISPATCH, Kind.COMBINE, Kind.COMBINE_BACKWARD, Kind.DISPATCH_BACKWARD)
STAGES: tuple[Stage, ...] = ("pre", "experts", "shared", "post")


class Seen(NamedTuple):
    """An exchange: seconds of its launch and its join, neither waiting, and bytes that left the rank."""

    launch: float
    join: float
    nbytes: float


@dataclass(frozen=True)
class RankTimes:
    """What one rank's micro-batch costs."""

    compute: Mapping[Position, float]
    exchanges: Mapping[Kind, Seen]


@dataclass(frozen=True)
class Measured:
    """Costs of a micro-batch on every rank, and the link between them; see `work.Work`.

    Attributes:
        ranks: in rank order.
        layers: L.
        link: what exchanges take.
        lanes: the most.
        checkpoint: whether each layer is a checkpoint of its own.
        contention: the share of compute's speed lost while a launch sends.
    """

    ranks: tuple[RankTimes, ...]
    layers: int
    link: Link
    lanes: int = 2
    checkpoint: bool = False
    contention: float = 0.0

    @property
    def shared(self) -> bool:
        """Whether anything may run beside a combine; where nothing did it costs next to nothing."""
        return True

    @property
    def machine(self) -> Machine:
        """Latency of the link, and contention."""
        return Machine(self.link.latency, self.contention)

    def batches(self, num_micro_batches: int) -> int:
        """Return the batches that so many micro-batches are: what was seen was one of them."""
        return num_micro_batches

    def costs(self, num_micro_batches: int, variation: float = 0.0) -> list[Costs]:
        """Return the costs of each micro-batch.

        Raises:
            ValueError: another spread over experts than there was.
        """
        if variation:
            raise ValueError(f"expected the imbalance that was measured, got {variation}; leave it out")
        compute = {at: np.array([rank.compute[at] for rank in self.ranks]) for at in self.ranks[0].compute}
        exchanges = {kind: self._exchange(kind) for kind in KINDS}
        return [Costs(compute, exchanges)] * num_micro_batches

    def memory(self, num_micro_batches: int) -> None:
        """Return nothing: time alone was measured."""

    def _exchange(self, kind: Kind) -> ExchangeCost:
        seen = [rank.exchanges[kind] for rank in self.ranks]
        nbytes_W = np.array([one.nbytes for one in seen], dtype=float)
        # The way in is no narrower than the ways out together: the emulated link has none.
        return ExchangeCost(
            launch_W=np.array([one.launch for one in seen]),
            send_W=nbytes_W / self.link.bandwidth,
            receive_W=np.zeros(len(seen)),
            join_W=np.array([one.join for one in seen]),
            nbytes_W=nbytes_W,
        )
