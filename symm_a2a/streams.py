"""A lane's own stream, on which launches run beside the caller's work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class LaneStream:
    """Orders what runs beside the caller's stream by events; where there are no streams, does nothing.

    Memory that a launch reads or writes belongs to the caller's stream: it is allocated there, before
    `beside_caller`, and must be kept until `rejoin` has run there.

    Args:
        device: of the lane. The stream has a high priority, so that a launch gets its few programs
            while the caller's kernels fill the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._ahead = False

    @contextmanager
    def beside_caller(self) -> Iterator[None]:
        """Run what is inside on the lane's stream, after what the caller's stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._ahead = True
        with torch.cuda.stream(self._stream):
            yield

    def rejoin(self) -> None:
        """Let the caller's stream wait for what was run beside it; the host does not wait."""
        if self._stream is not None and self._ahead:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._ahead = False
