"""A lane's own stream, on which launches run beside the caller's work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class LaneStream:
    """Orders what runs beside the caller's stream by events; the host never waits.

    Memory that a launch reads or writes belongs to the caller's stream: it is allocated there, before
    `beside_caller`, and must be kept until `rejoin` has run.

    Args:
        device: of the lane. The stream has a high priority, so that a launch gets its few programs
            while the caller's kernels fill the device.
        exists: whether there is one; without, everything runs where the caller is.
    """

    def __init__(self, device: torch.device, *, exists: bool) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if exists else None
        self._caller: torch.cuda.Stream | None = None

    @property
    def exists(self) -> bool:
        """Whether launches can run beside the caller."""
        return self._stream is not None

    @contextmanager
    def beside_caller(self) -> Iterator[None]:
        """Run what is inside on the lane's stream, after what the caller's stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(self._caller)
        with torch.cuda.stream(self._stream):
            yield

    def rejoin(self) -> None:
        """Let the current stream wait for what was run beside the caller's.

        The caller's stream of that time waits too, where it is another one: what was kept for the
        launch is its memory, and may be used again there.
        """
        if self._stream is None or self._caller is None:
            return
        for stream in {torch.cuda.current_stream(self._device), self._caller}:
            stream.wait_stream(self._stream)
        self._caller = None
