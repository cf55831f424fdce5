"""Before the first collective of a construction: are all ranks of the group here, and in the same group?

A collective over a group that not every rank has come to waits as long as the group does, and says little.
Here ranks leave word in the job's store, where each can see what the others are at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from symm_a2a.errors import ConfigError, PeerLostError, PeerTimeoutError
from symm_a2a.memory.process import Process

_log = logging.getLogger(__name__)

_FIRST_NAP, _LONGEST_NAP = 1e-3, 50e-3
_WARN_EVERY = 15.0
"""Seconds between warnings that name the ranks that are missing."""


class Meeting(NamedTuple):
    """One construction over a group, as a rank tells the others of it.

    Attributes:
        group: the group's name.
        number: of constructions over this group, this one included.
        members: global ranks.
    """

    group: str
    number: int
    members: tuple[int, ...]

    @property
    def text(self) -> str:
        """The meeting as it stands in the store."""
        return f"{self.group}|{self.number}|{','.join(map(str, self.members))}"

    @classmethod
    def parse(cls, text: str) -> Meeting:
        """Return the meeting of a text."""
        group, number, members = text.rsplit("|", 2)
        return cls(group, int(number), tuple(map(int, members.split(","))))

    def key(self, rank: int) -> str:
        """Return where a rank's presence stands in the store."""
        return f"symm_a2a/here/{self.group}/{self.number}/{rank}"


def meet(group: dist.ProcessGroup) -> None:
    """Wait until every rank of a group constructs something over it, as long as the job's store waits.

    Collective. Every 15 s a warning names who is missing.

    Raises:
        ConfigError: a rank that is missing waits for this one over another group, so that neither would ever
            come; both learn it, with both groups.
        PeerLostError: the process of a rank that is missing has ended.
        PeerTimeoutError: ranks did not come.
    """
    store, me = _get_default_store(), dist.get_rank()
    members = tuple(dist.get_process_group_ranks(group))
    number = store.add(f"symm_a2a/calls/{group.group_name}/{me}", 1)
    ours = Meeting(group.group_name, number, members)
    store.set(_process(me), Process.this().text)
    store.set(_at(me), ours.text)
    store.set(ours.key(me), "")
    patience = store.timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue]
    begin, nap, warned = time.monotonic(), _FIRST_NAP, 0.0
    missing = [rank for rank in members if rank != me]
    while missing := [rank for rank in missing if not store.check([ours.key(rank)])]:
        for rank in missing:
            _require_no_other(store, ours, me, rank)
        require_alive(missing)
        waited = time.monotonic() - begin
        if waited > patience:
            raise PeerTimeoutError(_story(ours, me, missing, waited))
        if waited > warned + _WARN_EVERY:
            warned = waited
            _log.warning(_story(ours, me, missing, waited))
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)
    if number > 1:
        # Whoever is here now has left the meeting before.
        store.delete_key(ours._replace(number=number - 1).key(me))


def require_alive(ranks: Sequence[int]) -> None:
    """Raise where the process of one of these global ranks, which constructed something once, has ended.

    Raises:
        PeerLostError: names them.
    """
    store = _get_default_store()
    known = [rank for rank in ranks if store.check([_process(rank)])]
    ended = [rank for rank in known if Process.parse(store.get(_process(rank)).decode()).has_ended]
    if ended:
        raise PeerLostError(
            f"expected every rank of the group to take part in constructing, but the process of rank "
            f"{', '.join(map(str, ended))} has ended; look at what it said"
        )


def _at(rank: int) -> str:
    return f"symm_a2a/at/{rank}"


def _process(rank: int) -> str:
    return f"symm_a2a/process/{rank}"


def _require_no_other(store: dist.Store, ours: Meeting, me: int, peer: int) -> None:
    """Raise where a peer waits for this rank in another meeting."""
    if not store.check([_at(peer)]):
        return
    theirs = Meeting.parse(store.get(_at(peer)).decode())
    elsewhere = theirs[:2] != ours[:2] and me in theirs.members
    # It may have left that one, with this rank, and not begun anything since.
    if elsewhere and not store.check([theirs.key(me)]) and not store.check([ours.key(peer)]):
        raise ConfigError(
            f"expected every rank to construct over the same groups in the same order, got rank {me} over "
            f"ranks {list(ours.members)} and rank {peer} over ranks {list(theirs.members)}"
        )


def _story(ours: Meeting, me: int, missing: list[int], waited: float) -> str:
    return (
        f"rank {me} has waited {waited:.0f} s for rank {', '.join(map(str, missing))} to construct over "
        f"ranks {list(ours.members)}; construction is collective: every rank of the group takes part"
    )
