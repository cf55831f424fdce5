"""A link between ranks of one machine, emulated: what was sent counts only after its transit.

Shared memory has no transit time, so that nothing could be seen to hide under anything. Here a
sender writes, behind its ready flags, when its rows will have arrived, and a join sleeps until then.
Without a link to emulate the same words say when the rows were there, for a timeline.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from symm_a2a.errors import ConfigError

_EPOCH_BITS = 16
_EPOCH_MASK = (1 << _EPOCH_BITS) - 1


MOST_SECONDS, LEAST_BANDWIDTH = 3600, 1000
"""What is beyond is a mistake in the unit, and arrivals would not fit their words."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A rank's way out to all of its peers: one message after another, each at full bandwidth.

    Args:
        latency: seconds from a message's last byte leaving until it has arrived.
        bandwidth: bytes a second of all that leaves a rank; what it sends to itself takes no link.

    Raises:
        ConfigError: a value out of range.

    Example:
        >>> Link(latency=1e-3, bandwidth=1e9).seconds(2_000_000)
        0.003
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not (_is_number(self.latency) and 0 <= self.latency <= MOST_SECONDS):
            raise ConfigError(f"expected latency from 0 to {MOST_SECONDS} seconds, got {self.latency!r}")
        if not (_is_number(self.bandwidth) and self.bandwidth >= LEAST_BANDWIDTH):
            raise ConfigError(
                f"expected bandwidth of at least {LEAST_BANDWIDTH} bytes a second, got {self.bandwidth!r}"
            )

    def seconds(self, nbytes: int) -> float:
        """Return how long a message takes over an idle link."""
        return self.latency + nbytes / self.bandwidth


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Arrivals:
    """When each rank's last message in each channel arrives at its peers, in memory that they share.

    A word is `microseconds << 16 | epoch mod 65536`, of the clock that the machine's processes share;
    its writer is the sender alone, so that a reader sees all of it or nothing.

    Args:
        rank: this rank.
        words: int64 `(channels, W)` of each rank, in rank order.
        link: to emulate; None for none: messages arrive when they are sent.

    Attributes:
        emulated: whether a join has to wait for the times.
    """

    def __init__(self, rank: int, words: list[torch.Tensor], link: Link | None) -> None:
        self._rank = rank
        self._words = [word.numpy() for word in words]
        self._link = link or Link()
        self._busy_until = 0.0
        self.emulated = link is not None

    def depart(self, channel: int, epoch: int, nbytes: int) -> None:
        """Send a message: tell every peer when it arrives; the link is busy while it sends."""
        now = time.monotonic()
        self._busy_until = max(now, self._busy_until) + nbytes / self._link.bandwidth
        arrival = int((self._busy_until + self._link.latency) * 1e6)
        for peer, words in enumerate(self._words):
            when = int(now * 1e6) if peer == self._rank else arrival
            words[channel, self._rank] = when << _EPOCH_BITS | epoch & _EPOCH_MASK

    def known_W(self, channel: int, epoch: int) -> np.ndarray:
        """Return which peers have told when their message of this epoch arrives."""
        return self._words[self._rank][channel] & _EPOCH_MASK == epoch & _EPOCH_MASK

    def time(self, channel: int, epoch: int) -> float:
        """Return when a channel's last messages were, or will be, here, by `time.monotonic`.

        A sender whose flag has been seen writes its word next; until then now is the latest it can be.
        """
        known_W = self.known_W(channel, epoch)
        latest = int((self._words[self._rank][channel][known_W] >> _EPOCH_BITS).max(initial=0)) / 1e6
        return latest if known_W.all() else max(latest, time.monotonic())
