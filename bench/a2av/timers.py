"""Clocks: how one operation is timed on a CPU, on a GPU, and as a captured graph."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bench.a2av.operations import Operation


class Timer(Protocol):
    """Takes the time between `start` and `stop`, again and again."""

    def align(self) -> None:
        """Bring the ranks together, and forget what caches hold."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> list[float]:
        """Wait for the device; return all times so far."""
        ...


class HostTimer:
    """The clock of the host; for ranks on CPUs, where nothing runs behind its back.

    Args:
        group: of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._times, self._begin = group, [], 0.0

    def align(self) -> None:
        dist.barrier(self._group)

    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        self._times.append(time.perf_counter() - self._begin)

    def seconds(self) -> list[float]:
        return list(self._times)


class CudaTimer:
    """CUDA events on the current stream.

    Args:
        group: of the ranks, NCCL.
        device: this rank's GPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._one = torch.ones(1, device=device)
        # Twice the L2: what the operation reads and writes was in memory alone when it begins.
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._cold = torch.empty(size, dtype=torch.uint8, device=device)

    def align(self) -> None:
        self._cold.zero_()
        # In the stream, so that it is the GPUs that are together when the operation begins.
        dist.all_reduce(self._one, dist.ReduceOp.MAX, group=self._group)

    def start(self) -> None:
        self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self._events[-1][0].record()

    def stop(self) -> None:
        self._events[-1][1].record()

    def seconds(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(stop) / 1e3 for start, stop in self._events]


def make_timer(group: dist.ProcessGroup, device: torch.device) -> Timer:
    """Return the timer of a device."""
    return CudaTimer(group, device) if device.type == "cuda" else HostTimer(group)


def measure(operation: Operation, timer: Timer, warmup: int, iterations: int) -> list[float]:
    """Return the seconds of each timed run; collective, with the same numbers on every rank.

    Args:
        operation: what to run.
        timer: a new one.
        warmup: runs before those that count.
        iterations: runs that count.
    """
    for _ in range(warmup + iterations):
        state = operation.before()
        timer.align()
        timer.start()
        operation.run(state)
        timer.stop()
    return timer.seconds()[warmup:]


class Captured:
    """An operation as a CUDA graph: `run` replays it, and its result is always in the same tensors.

    Args:
        operation: of a static capacity, and warm.
    """

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        state = operation.before()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            operation.run(state)
        torch.cuda.current_stream().wait_stream(side)
        state = operation.before()
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: the process group's watchdog asks for its events in a thread of its own meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = operation.run(state)
        # What was captured has not run; for the peers to get what they wait for, it must.
        self._graph.replay()

    def before(self) -> Any:
        return self._operation.before()

    def run(self, state: Any) -> Any:
        del state
        self._graph.replay()
        return self._result

    def probe(self) -> Any:
        return self.run(self.before())

    def check(self, result: Any) -> list[str]:
        return self._operation.check(result)
