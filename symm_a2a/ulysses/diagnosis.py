"""Why a sequence exchange failed: from what the peers have written to an error that names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from symm_a2a.errors import ExchangeError, ExchangeMismatchError, PeerLostError, PeerTimeoutError
from symm_a2a.kernels.channel import EPOCH_SHIFT, Report
from symm_a2a.kernels.ulysses import SequenceChannel, describe_card
from symm_a2a.memory import SymmetricMemory
from symm_a2a.readback import peek

_RULE = (
    "every rank must run every exchange of the group, in the same order and on the same shape, in the "
    "backward too: a rank that skips its backward, runs in no_grad alone, or whose loss ignores the result "
    "(add 0 * out.sum()) breaks that"
)


class Evidence(NamedTuple):
    """What keeps peers from taking part.

    Attributes:
        gave_up: ranks that have failed or left, and said so.
        ended: ranks whose process has ended.
    """

    gave_up: list[int]
    ended: list[int]


class Diagnosis:
    """Finds the reason for a failure, and words it.

    Args:
        memory: this rank's symmetric memory.
        channel: its device side.
        timeout: seconds a rank waits for a peer.
    """

    def __init__(self, memory: SymmetricMemory, channel: SequenceChannel, timeout: float) -> None:
        self._memory = memory
        self._channel = channel
        self._timeout = timeout

    def evidence(self) -> Evidence:
        """Look at what may keep peers from taking part."""
        return Evidence(np.flatnonzero(peek(self._channel.abort_W)).tolist(), self._memory.lost_peers())

    def blame(self, missing: Sequence[int], evidence: Evidence, epoch: int) -> PeerLostError | None:
        """Return why a missing peer will never take part; None if it may only be late."""
        for peers, how in (
            (evidence.gave_up, "gave up before it took part; its own error says why"),
            (evidence.ended, "ended before it took part"),
        ):
            gone = [peer for peer in missing if peer in peers]
            if gone:
                return PeerLostError(self._story(gone, epoch, how))
        return None

    def timeout(self, peers: Sequence[int], epoch: int) -> PeerTimeoutError:
        """Return the error for peers that may only be late."""
        how = (
            f"did not take part within {'about ' * self._memory.spins}{self._timeout:g} s (timeout=); {_RULE}"
        )
        return PeerTimeoutError(self._story(peers, epoch, how))

    def reported(self) -> ExchangeError:
        """Turn what a kernel has written to the status into the error it means."""
        status = self._channel.status.numpy()
        epoch, words_W = int(status[Report.EPOCH]), status[Report.WORDS :]
        late = np.flatnonzero(words_W >> EPOCH_SHIFT < epoch).tolist()
        if late and self._memory.spins:
            return self.blame(late, self.evidence(), epoch) or self.timeout(late, epoch)
        if late:
            return ExchangeError(self._story(late, epoch, "has not launched it yet"))
        return self._mismatch(epoch, words_W)

    def _mismatch(self, epoch: int, words_W: np.ndarray) -> ExchangeMismatchError:
        """Return the error for the first peer whose word or card is not this rank's."""
        rank, cards_W = self._memory.rank, peek(self._channel.cards)[epoch & 1]
        other_W = (words_W != words_W[rank]) | (cards_W != cards_W[rank]).any(1)
        peer = int(np.flatnonzero(other_W)[0])
        mine, theirs = (describe_card(cards_W[who], len(words_W)) for who in (rank, peer))
        return ExchangeMismatchError(
            f"expected every rank to run the same exchange number {epoch} on the same shape, got {mine} on "
            f"rank {rank} and {theirs} on rank {peer}; {_RULE}"
        )

    def _story(self, peers: Sequence[int], epoch: int, what: str) -> str:
        names, rank = ", ".join(map(str, peers)), self._memory.rank
        mine = describe_card(peek(self._channel.cards)[epoch & 1, rank], len(self._channel.abort_W))
        return f"rank {rank} waited for its peers in exchange number {epoch}, {mine}, but peer {names} {what}"
