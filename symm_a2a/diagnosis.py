"""Why an exchange failed: from what was waited for, and what the peers have written, to an error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from symm_a2a.errors import ExchangeError, ExchangeMismatchError, PeerLostError, PeerTimeoutError
from symm_a2a.kernels.channel import (
    DETAIL_MASK,
    EPOCH_SHIFT,
    KIND_MASK,
    KIND_SHIFT,
    Cell,
    Channel,
    Kind,
    Report,
    Wait,
)
from symm_a2a.memory import SymmetricMemory
from symm_a2a.readback import peek

_BREAKS = (
    "a rank that skips its backward, runs in no_grad alone, has other numbers of layers or micro-batches, "
    "or whose loss ignores its output (add 0 * out.sum()) breaks that order"
)
_ADVICE = f" (EPConfig.timeout). Every rank must run every exchange, in the same order: {_BREAKS}"


class Evidence(NamedTuple):
    """What may keep peers from taking part.

    Attributes:
        astray: the ready words of peers that run an exchange in the other direction instead.
        gave_up: ranks that have failed and said so.
        ended: ranks whose process has ended.
    """

    astray: dict[int, int]
    gave_up: list[int]
    ended: list[int]


class Diagnosis:
    """Finds the reason for a lane's failure, and words it.

    Args:
        index: the lane's place in the arena.
        memory: this rank's symmetric memory.
        channel: the lane's device side.
        timeout: seconds a rank waits for a peer.
    """

    def __init__(self, index: int, memory: SymmetricMemory, channel: Channel, timeout: float) -> None:
        self._index = index
        self._memory = memory
        self._channel = channel
        self._timeout = timeout

    def evidence(self, kind: Kind, wait: Wait) -> Evidence:
        """Look at what may keep peers from taking part."""
        astray = {}
        if wait != Wait.CREDIT:
            # In one lane a peer launches in the other direction only after it has taken part here.
            other = "gather" if kind.scatters else "scatter"
            launched = peek(self._channel.state)[Cell.launched(scatters=not kind.scatters)]
            words = peek(self._channel.local[f"{other}_ready"])
            astray = {int(peer): int(words[peer]) for peer in np.flatnonzero(words >> EPOCH_SHIFT > launched)}
        gave_up = np.flatnonzero(peek(self._channel.abort_W)).tolist()
        return Evidence(astray, gave_up, self._memory.lost_peers())

    def blame(
        self, missing: Iterable[int], evidence: Evidence, kind: Kind, wait: Wait, epoch: int
    ) -> ExchangeError | None:
        """Return why a missing peer will never take part; None if it may only be late."""
        for peer in missing:
            if peer in evidence.astray:
                return self._mismatch(kind, epoch, peer, evidence.astray[peer])
        for peers, how in (
            (evidence.gave_up, "gave up before it took part; its own error says why"),
            (evidence.ended, "ended before it took part"),
        ):
            gone = [peer for peer in missing if peer in peers]
            if gone:
                return PeerLostError(self._story(gone, kind, wait, epoch, how))
        return None

    def _story(self, peers: Iterable[int], kind: Kind, wait: Wait, epoch: int, what: str) -> str:
        names = ", ".join(str(int(peer)) for peer in peers)
        awaited = {
            Wait.COPIES: "its copies",
            Wait.CREDIT: "word that the last exchange was taken",
            Wait.COUNTS: "its counts",
        }
        return (
            f"rank {self._memory.rank} waited for {awaited[wait]} in {kind.title}, lane {self._index}, "
            f"epoch {epoch}, but peer {names} {what}"
        )

    def timeout(self, peers: Iterable[int], kind: Kind, wait: Wait, epoch: int) -> PeerTimeoutError:
        """Return the error for peers that may only be late."""
        how = f"did not take part within {'about ' * self._memory.spins}{self._timeout:g} s{_ADVICE}"
        return PeerTimeoutError(self._story(peers, kind, wait, epoch, how))

    def reported(self) -> ExchangeError:
        """Turn what a kernel has written to the lane's status into the error it means."""
        status = self._channel.status.numpy()
        kind, wait = Kind(int(status[Report.FAILURE]) >> 4), Wait(int(status[Report.FAILURE]) & 15)
        epoch, own = int(status[Report.EPOCH]), int(status[Report.OWN])
        words = status[Report.WORDS :]
        if wait == Wait.PLACEMENT:
            peer = int(np.flatnonzero(words != own)[0])
            return ExchangeMismatchError(
                f"expected every rank to place the experts alike, got another placement from peer {peer} "
                f"than rank {self._memory.rank} has in {kind.title}, lane {self._index}, epoch {epoch}; make "
                "it of what all ranks know, as stats().load is"
            )
        late = np.flatnonzero(words >> EPOCH_SHIFT < epoch).tolist()
        if late and self._memory.spins:
            error = self.blame(late, self.evidence(kind, wait), kind, wait, epoch)
            return self.timeout(late, kind, wait, epoch) if error is None else error
        if late:
            return ExchangeError(self._story(late, kind, wait, epoch, "has not launched it yet"))
        other = words ^ (epoch << EPOCH_SHIFT | kind << KIND_SHIFT | own)
        # Words of a dispatch, or of its counts, end in what may differ.
        peer = int(np.flatnonzero(other if kind.follows else other >> KIND_SHIFT)[0])
        return self._mismatch(kind, epoch, peer, int(words[peer]), own)

    def _mismatch(
        self, kind: Kind, epoch: int, peer: int, word: int, own: int | None = None
    ) -> ExchangeMismatchError:
        """Return the error for a peer's word that names something else than this rank's, of detail `own`."""
        theirs = _named(Kind(word >> KIND_SHIFT & KIND_MASK), word & DETAIL_MASK)
        return ExchangeMismatchError(
            f"expected every rank to run {kind.title} in lane {self._index}, epoch {epoch}, got {theirs} "
            f"from peer {peer} while rank {self._memory.rank} runs {_named(kind, own)}. Every rank must run "
            f"every exchange in the same order, in the backward too: {_BREAKS}"
        )


def _named(kind: Kind, detail: int | None) -> str:
    """Return an operation's name, with the epoch of the dispatch that it follows."""
    return f"{kind.title} of dispatch {detail}" if kind.follows and detail is not None else kind.title
