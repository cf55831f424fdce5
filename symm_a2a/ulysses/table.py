"""Sequence groups by number, and by process group: what a graph, and a caller, can hold instead.

Two weak tables are the only state of this package that nobody owns. The first is there because a graph can
hold a number, not an object. The second is there for callers that have a process group and nothing else,
deep inside a model: what its exchanges allocate has to be found again, and belongs to the process group.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from symm_a2a.errors import ClosedError

if TYPE_CHECKING:
    import torch.distributed as dist

    from symm_a2a.ulysses.group import SequenceGroup

_groups: weakref.WeakValueDictionary[int, SequenceGroup] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_of_process_group: weakref.WeakKeyDictionary[dist.ProcessGroup, SequenceGroup] = weakref.WeakKeyDictionary()


def enter(group: SequenceGroup) -> int:
    """Return a number for a group, its own in this process for as long as the group lives."""
    number = next(_numbers)
    _groups[number] = group
    return number


def group_of(number: int) -> SequenceGroup:
    """Return the group of a number.

    Raises:
        ClosedError: the group is no more.
    """
    group = _groups.get(number)
    if group is None:
        raise ClosedError(f"expected an open SequenceGroup, got number {number}, whose group was dropped")
    return group


def find(process_group: dist.ProcessGroup) -> SequenceGroup | None:
    """Return the open group that was remembered for a process group, if any."""
    group = _of_process_group.get(process_group)
    return None if group is None or group.closed else group


def remember(process_group: dist.ProcessGroup, group: SequenceGroup) -> None:
    """Keep a group for as long as its process group lives."""
    _of_process_group[process_group] = group
