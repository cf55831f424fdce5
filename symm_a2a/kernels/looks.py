"""How many looks at a flag bound a wait in a kernel, where no clock can: timed, and until then assumed."""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell
from symm_a2a.kernels.flags import wait

ASSUMED = 1_000_000.0
"""Looks in a second, on a GPU, before they have been timed."""

_LONG_ENOUGH = 5e-3
"""Seconds of looks that give their number in a second."""

_MOST = (1 << 31) - 1


@triton.jit(do_not_specialize=["polls"])
def _looks_kernel(flags_ptr, abort_ptr, state_ptr, polls, W: tl.constexpr, W_PAD: tl.constexpr):
    """Wait, in one program, for flags that nobody raises."""
    wait(flags_ptr, abort_ptr, state_ptr, 1, polls, W, W_PAD)


def look(flags_W: torch.Tensor, state: torch.Tensor, looks: int) -> None:
    """Look so often at flags, as a wait does.

    Args:
        flags_W: int64, zeros; there are as many peers.
        state: int64, zeros, of a lane that has not failed.
        looks: how often.
    """
    W = len(flags_W)
    _looks_kernel[(1,)](flags_W, flags_W, state, looks, W=W, W_PAD=padded(W))


def looks_per_second(world_size: int, device: torch.device) -> float:
    """Return how often a wait for so many peers looks at their flags in a second; waits for the device.

    Twice as many looks as before are timed, until they take 5 ms.
    """
    flags_W = torch.zeros(world_size, dtype=torch.int64, device=device)
    state = torch.zeros(Cell.FAILED + 1, dtype=torch.int64, device=device)
    look(flags_W, state, 0)
    looks, seconds = 1, 0.0
    for power in range(4, 31):
        looks = 1 << power
        seconds = _time(flags_W, state, looks)
        if seconds > _LONG_ENOUGH:
            break
    return looks / seconds


def _time(flags_W: torch.Tensor, state: torch.Tensor, looks: int) -> float:
    """Return the seconds of so many looks, the launch and the end of it not counted on a GPU."""
    if flags_W.device.type != "cuda":
        start = time.perf_counter()
        look(flags_W, state, looks)
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    look(flags_W, state, looks)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def looks_within(timeout: float, per_second: float = ASSUMED) -> int:
    """Return the looks of so many seconds, at least one and at most 2**31 - 1.

    Example:
        >>> looks_within(0.5), looks_within(60.0, per_second=2e6)
        (500000, 120000000)
    """
    return max(1, int(min(timeout * per_second, _MOST)))
