"""Lanes by number: a graph can hold a number, not a lane."""

from __future__ import annotations

import itertools
import weakref

from symm_a2a.errors import ClosedError
from symm_a2a.lane import Lane

_lanes: weakref.WeakValueDictionary[int, Lane] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enter_lane(lane: Lane) -> int:
    """Return the number of a lane, its own in this process for as long as the lane lives."""
    if lane.number is None:
        lane.number = next(_numbers)
        _lanes[lane.number] = lane
    return lane.number


def lane_of(number: int) -> Lane:
    """Return the lane of a number.

    Raises:
        ClosedError: its arena has been closed.
    """
    lane = _lanes.get(number)
    if lane is None:
        raise ClosedError(f"expected an open arena, got lane number {number}, whose arena was closed")
    return lane
