"""Notes exchanges as they run: by the clock of the machine, or by events in a GPU's streams."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from symm_a2a.errors import RecordingError
from symm_a2a.kernels.channel import Kind
from symm_a2a.layout import ArenaLayout
from symm_a2a.timeline.exchanges import Exchange, Interval, Timeline
from symm_a2a.wire import bytes_to_others

Mark = Any
"""Seconds by `time.monotonic`, or an event in a stream, which becomes seconds once the device is done."""


@dataclass
class _Note:
    """An exchange so far; `copies` is `(before, after)` of what the lane has sent of its kind."""

    kind: Kind
    lane: int
    epoch: int
    beside: bool
    launch: tuple[Mark, Mark]
    arrival: Mark | None
    copies: tuple[torch.Tensor, torch.Tensor] | None
    join: tuple[Mark, Mark] | None = None


class Recorder:
    """Collects a rank's exchanges until `timeline` is called.

    Args:
        rank: this rank.
        layout: the arena's sizes.
        device: whose time it is.
    """

    def __init__(self, rank: int, layout: ArenaLayout, device: torch.device) -> None:
        self._rank = rank
        self._layout = layout
        self._device = device
        self._notes: list[_Note] = []
        self._in_flight: dict[int, _Note] = {}
        self._begin = self.mark()

    def mark(self) -> Mark:
        """Return now, in the current stream."""
        if self._device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def launched(
        self, lane: int, kind: Kind, epoch: int, launch: tuple[Mark, Mark], arrival: Mark | None,
        copies: tuple[torch.Tensor, torch.Tensor] | None, *, beside: bool,
    ) -> None:  # fmt: skip
        """Note a launch.

        Args:
            lane: its place in the arena.
            kind: the operation.
            epoch: its number in the lane's direction.
            launch: around it, in the caller's stream.
            arrival: when the peers' copies are here, if that is known already.
            copies: what the lane has sent to each rank in operations of this kind, before and after.
            beside: whether the caller's stream goes on meanwhile.
        """
        note = _Note(kind, lane, epoch, beside, launch, arrival, copies)
        self._notes.append(note)
        self._in_flight[lane] = note

    def joined(self, lane: int, join: tuple[Mark, Mark], arrival: Mark | None) -> None:
        """Note the join of a lane's exchange; one that was launched before the recording is left out.

        Args:
            lane: its place in the arena.
            join: around it, in the caller's stream.
            arrival: when the peers' copies were here, if the launch did not know.
        """
        note = self._in_flight.pop(lane, None)
        if note is not None:
            note.join = join
            note.arrival = arrival if note.arrival is None else note.arrival

    def timeline(self) -> Timeline:
        """Return what happened so far; on a GPU, waits for the device."""
        end = self.mark()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        whole = Interval(self._seconds(self._begin), self._seconds(end))
        done = [note for note in self._notes if note.join is not None]
        exchanges = tuple(map(self._exchange, done))
        return Timeline(exchanges, whole, self._rank, unfinished=len(self._notes) - len(done))

    def _exchange(self, note: _Note) -> Exchange:
        assert note.join is not None
        launch, join = (Interval(*map(self._seconds, marks)) for marks in (note.launch, note.join))
        arrival = launch.end if note.arrival is None else self._seconds(note.arrival)
        sent_W = [0] * self._layout.world_size
        if note.copies is not None:
            before, after = note.copies
            sent_W = (after - before).tolist()
        nbytes = bytes_to_others(self._layout, note.kind, sent_W, self._rank)
        return Exchange(
            note.kind, note.lane, note.epoch, nbytes, launch, min(arrival, join.end), join, note.beside
        )

    def _seconds(self, mark: Mark) -> float:
        return mark if isinstance(mark, float) else self._begin.elapsed_time(mark) / 1e3


class Recording:
    """A timeline once it has ended; until then a `RecordingError`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._timeline: Timeline | None = None

    def finish(self) -> None:
        """Take the timeline of what was recorded so far."""
        self._timeline = self._recorder.timeline()

    @property
    def timeline(self) -> Timeline:
        """What was recorded.

        Raises:
            RecordingError: the recording goes on, or was ended by an error.
        """
        if self._timeline is None:
            raise RecordingError("expected a recording that has ended, got one that goes on or has failed")
        return self._timeline
