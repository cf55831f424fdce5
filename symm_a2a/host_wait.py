"""Waits of the host for the peers' flags, where kernels do not wait."""

from __future__ import annotations

import time

import numpy as np

from symm_a2a.diagnosis import Diagnosis
from symm_a2a.errors import ExchangeError
from symm_a2a.kernels.channel import EPOCH_SHIFT, Cell, Channel, Kind, Wait
from symm_a2a.layout import FLAGS
from symm_a2a.memory import Arrivals, SymmetricMemory

FIRST_NAP, LONGEST_NAP = 20e-6, 1e-3


class HostWait:
    """Sleeps until every peer's flag of a lane has reached an epoch.

    Args:
        index: the lane's place in the arena.
        memory: this rank's symmetric memory.
        channel: the lane's device side, in memory that the host reads.
        timeout: seconds a rank waits for a peer.
        diagnosis: words the reason why a peer will not come.
    """

    def __init__(
        self, index: int, memory: SymmetricMemory, channel: Channel, timeout: float, diagnosis: Diagnosis
    ) -> None:
        self._index = index
        self._memory = memory
        self._timeout = timeout
        self._diagnosis = diagnosis
        self._state = channel.state.numpy()
        self._flags = {name: channel.local[name].numpy() for name in FLAGS}

    def launched(self, kind: Kind) -> int:
        """Return the epoch of the last launch in a direction."""
        return int(self._state[Cell.launched(scatters=kind.scatters)])

    def credit(self, kind: Kind) -> None:
        """Wait until every peer has taken the last data of a direction."""
        self._until(f"{kind.direction}_free", self.launched(kind), kind, Wait.CREDIT)

    def counts(self) -> None:
        """Wait for every peer's counts."""
        self._until("counts_ready", int(self._state[Cell.COUNTED]), Kind.DISPATCH, Wait.COUNTS)

    def copies(self, kind: Kind) -> None:
        """Wait for every peer's copies, and over an emulated link for their transit."""
        self._until(f"{kind.direction}_ready", self.launched(kind), kind, Wait.COPIES)
        arrivals = self._memory.arrivals
        if arrivals is not None and arrivals.emulated:
            transit = self._arrival(arrivals, kind) - time.monotonic()
            if transit > self._timeout:
                raise ExchangeError(
                    f"expected copies to arrive within EPConfig.timeout = {self._timeout:g} s, got "
                    f"{transit:.3g} s of transit over the emulated link in {kind.title}, lane {self._index}"
                )
            time.sleep(max(0.0, transit))

    def arrival(self, kind: Kind) -> float | None:
        """Return when the copies that have been waited for were here, where the senders can say so."""
        arrivals = self._memory.arrivals
        return None if arrivals is None else self._arrival(arrivals, kind)

    def _arrival(self, arrivals: Arrivals, kind: Kind) -> float:
        return arrivals.time(channel_of(self._index, kind), self.launched(kind))

    def _missing(self, flag: str, epoch: int, kind: Kind, wait: Wait) -> list[int]:
        late_W = self._flags[flag] >> EPOCH_SHIFT < epoch
        arrivals = self._memory.arrivals
        if wait == Wait.COPIES and arrivals is not None and arrivals.emulated:
            late_W = late_W | ~arrivals.known_W(channel_of(self._index, kind), epoch)
        return np.flatnonzero(late_W).tolist()

    def _until(self, flag: str, epoch: int, kind: Kind, wait: Wait) -> None:
        nap, deadline = FIRST_NAP, time.monotonic() + self._timeout
        while True:
            missing = self._missing(flag, epoch, kind, wait)
            if not missing:
                return
            evidence = self._diagnosis.evidence(kind, wait)
            late = time.monotonic() > deadline
            # Read again: a peer may have raised its flag, and gone on or ended, since.
            missing = self._missing(flag, epoch, kind, wait)
            error: ExchangeError | None = self._diagnosis.blame(missing, evidence, kind, wait, epoch)
            if error is None and missing and late:
                error = self._diagnosis.timeout(missing, kind, wait, epoch)
            if error is not None:
                raise error
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)


def channel_of(index: int, kind: Kind) -> int:
    """Return the channel of `Arrivals` of a lane's direction."""
    return 2 * index + kind.scatters
