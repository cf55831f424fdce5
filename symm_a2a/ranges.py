"""Named ranges in a profile: which operation, launch or join, in which lane and epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch

from symm_a2a.kernels.channel import Kind
from symm_a2a.lane import Lane

P = ParamSpec("P")
R = TypeVar("R")


def ranged(
    phase: Literal["launch", "join"], kind: Kind, lane_of: Callable[..., Lane] = lambda lane: lane
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show the calls of a function in a profile, while there is a profiler; cost nothing without.

    The epoch is the host's count of exchanges in the lane's direction; replays of a captured graph,
    which the host does not see, are not in it.

    Args:
        phase: what the function does.
        kind: of what.
        lane_of: finds the lane in the function's first argument.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch.autograd.profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            lane = lane_of(args[0])
            epoch = lane.channel.counts.exchanges[kind.scatters] + (phase == "launch")
            name = f"symm_a2a {kind.title} {phase}, lane {lane.index}, epoch {epoch}"
            with torch.profiler.record_function(name):
                return function(*args, **kwargs)

        return run

    return decorate
