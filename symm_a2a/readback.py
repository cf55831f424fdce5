"""Numbers that the device makes and the host reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from symm_a2a.kernels.channel import Channel
from symm_a2a.kernels.row_count import row_count


def host_visible(size: int, device: torch.device) -> torch.Tensor:
    """Zeroed int64 memory that kernels write and the host reads at any time."""
    return torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


@contextmanager
def beside_the_caller(device: torch.device) -> Iterator[None]:
    """Run what is inside ahead of, and beside, whatever waits in the caller's stream."""
    if device.type != "cuda":
        yield
        return
    # Streams come from pools, one for each priority, and are handed out again: lanes' are of another one, and
    # nothing here can end up behind a launch that waits.
    with torch.cuda.stream(torch.cuda.Stream(device, priority=-3)):
        yield


def peek(tensor: torch.Tensor) -> np.ndarray:
    """Return what the device has written so far; on a CPU a view, which goes on to change."""
    with beside_the_caller(tensor.device):
        return tensor.cpu().numpy()


class RowCount:
    """Reads one number from the device, beside the caller's stream where there are streams."""

    def __init__(self, device: torch.device) -> None:
        self._cell = torch.zeros(1, dtype=torch.int64, device=device)
        self._copy = host_visible(1, device)
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._event = torch.cuda.Event()

    def start(self, channel: Channel, pad_multiple: int) -> None:
        """Count on the device what the caller's stream has been given to send."""
        if not self._on_gpu:
            row_count(channel, self._copy, pad_multiple)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._cell.device))
        with torch.cuda.stream(self._stream):
            row_count(channel, self._cell, pad_multiple)
            self._copy.copy_(self._cell, non_blocking=True)
            self._event.record()

    def read(self) -> int:
        """Return the count that was started last."""
        if self._on_gpu:
            self._event.synchronize()
        return int(self._copy.numpy()[0])
