"""Clocks: what the device took for each launch, with the host out of the way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

CYCLES = 2_000_000_000
"""Of a GPU in a second, or fewer: what keeps it busy for some time keeps it busy for longer."""


class Clock(Protocol):
    """Takes the time of each of several pieces of work."""

    def hold(self, seconds: float) -> None:
        """Keep the device busy for a while, so that all that follows is queued before it begins.

        A device that waits for its host spends the time of a launch in the launch's own interval.
        """
        ...

    def timed(self, work: Callable[[], Any]) -> Any:
        """Do some work, and take its time."""
        ...

    def seconds(self) -> list[float]:
        """Wait for the device; return the times since the last call, in order."""
        ...


class HostClock:
    """For a CPU, which runs nothing behind its own back."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def hold(self, seconds: float) -> None:
        del seconds

    def timed(self, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        self._times.append(time.perf_counter() - begin)
        return result

    def seconds(self) -> list[float]:
        times, self._times = self._times, []
        return times


class CudaClock:
    """Events on the current stream."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def hold(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * CYCLES))

    def timed(self, work: Callable[[], Any]) -> Any:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        result = work()
        pair[1].record()
        self._events.append(pair)
        return result

    def seconds(self) -> list[float]:
        torch.cuda.synchronize()
        events, self._events = self._events, []
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def clock_for(device: str) -> Clock:
    """Return a device's clock."""
    return CudaClock() if device != "cpu" else HostClock()


def median_seconds(clock: Clock, work: Callable[[], Any], times: int) -> float:
    """Return the median of some runs, which follow one another; the first of them does not count."""
    clock.hold(0.02)
    for _ in range(times + 1):
        clock.timed(work)
    return statistics.median(clock.seconds()[1:])


def copy_bandwidth(device: str, gibibytes: float) -> float:
    """Return the bytes a second that a plain copy within the device reads and writes."""
    source = torch.ones(int(gibibytes * 2**30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds(clock_for(device), lambda: target.copy_(source), times=15)
    return 2 * source.nbytes / seconds
