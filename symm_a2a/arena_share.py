"""A share in an arena: what every dispatcher of it has, whatever it exchanges."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from symm_a2a import ops
from symm_a2a.arena import Arena, create_arena
from symm_a2a.config import EPConfig
from symm_a2a.errors import ClosedError, ConfigError, ExchangeError, InputError
from symm_a2a.exchange import EXACT
from symm_a2a.handle import Handle
from symm_a2a.kernels.channel import Kind
from symm_a2a.lane import Lane
from symm_a2a.memory import Backend, Link
from symm_a2a.stats import Stats, stats_of
from symm_a2a.timeline import Recording

if TYPE_CHECKING:
    from typing_extensions import Self


class ArenaShare:
    """An arena's memory and lanes, made here or another's, and their life; see `SymmTokenDispatcher`."""

    def __init__(
        self,
        cfg: EPConfig,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        backend: Backend | None = None,
        link: Link | None = None,
        arena: Arena | None = None,
    ) -> None:
        self.cfg = cfg
        self._owns_arena = arena is None
        if arena is None:
            arena = create_arena(cfg, group, device, backend, link)
        elif not isinstance(arena, Arena):
            raise ConfigError(f"expected the arena of a dispatcher, got {type(arena).__name__}")
        elif not all(given is None for given in (group, device, backend, link)):
            raise ConfigError(
                "expected arena= alone, got group, device, backend or link too; the arena has its own"
            )
        arena.require_open()
        arena.require_fits(cfg)
        self.arena = arena
        self.device = arena.memory.device
        self.world_size = arena.layout.world_size
        self.rank = arena.memory.rank
        self._closed = False
        self._lanes = [ops.enter_lane(lane) for lane in arena.lanes]
        self._ledger = arena.new_ledger(cfg.placement)
        rows = cfg.capacity_rows(self.world_size)
        self._capacity = EXACT if rows == "exact" else rows

    @contextlib.contextmanager
    def record(self) -> Iterator[Recording]:
        """Record when each exchange of this arena is launched, in flight and joined.

        Costs two reads of the clock for each launch and join, on a GPU three events in the streams.

        Yields:
            A recording, whose `timeline` is there once the block has ended.

        Raises:
            RecordingError: a recording runs already.
            ClosedError: the dispatcher was closed.
        """
        self._require_open()
        recording = Recording(self.arena.start_recording())
        try:
            yield recording
            recording.finish()
        finally:
            self.arena.stop_recording()

    def check(self) -> None:
        """Raise what the kernels have reported so far, and wait for nothing.

        On a GPU a kernel that has given up is noticed by the next call; where none comes soon, as at the end
        of a step, or behind replays of a captured graph, this looks.

        Raises:
            ClosedError: the dispatcher was closed.
            ExchangeError: an exchange has failed; the same error as at every later call.
            ExpertIdError, CapacityError: as for `dispatch`.
        """
        self._require_open()
        for lane in self.arena.lanes:
            lane.raise_reports()
            lane.raise_overflow()

    def stats(self) -> Stats:
        """Return what this arena's dispatchers have done so far, and this one's load; waits for the device.

        Raises:
            ClosedError: the dispatcher was closed.
            ExchangeError: an exchange has failed, as replays of a captured graph may without a word.
        """
        self._require_open()
        return stats_of(self.arena.lanes, self.arena.layout, self._ledger.load())

    @property
    def num_lanes(self) -> int:
        """Exchanges that can be in flight at once."""
        return len(self._lanes)

    def in_lane(self, lane: int) -> contextlib.AbstractContextManager[None]:
        """Let dispatches inside that name no lane take this one."""
        return self.arena.in_lane(self._index(lane))

    def require_idle(self, lane: int | None = None) -> None:
        """Raise where an exchange is in flight in a lane, or in any, or none can run.

        Args:
            lane: its place; None for all of them.

        Raises:
            LaneBusyError, ExchangeError, ClosedError: as for `dispatch`.
        """
        self._require_open()
        for one in self.arena.lanes if lane is None else [self._lane(lane)]:
            one.require_idle(Kind.DISPATCH)

    def give_up(self, reason: str) -> None:
        """End it on every rank: those that wait for this one raise at once, calls here give the reason."""
        self.arena.fail(ExchangeError(reason))

    @property
    def dropped_rows(self) -> int:
        """Rows dropped past a static capacity here: all with `overflow="drop"`, else those not raised yet.

        On a GPU the count is that of the kernels that have run so far.
        """
        return sum(lane.dropped_rows for lane in self.arena.lanes)

    def close(self) -> None:
        """Give the symmetric memory back, if this dispatcher made it; a second call does nothing.

        Run the backward first: it needs the memory. Collective on GPUs, where a peer's memory must
        stay until its last reader is done.

        Raises:
            CapacityError: rows were dropped past a static capacity that no call has reported yet.
        """
        self._close(failed=False)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return the dispatcher itself: copies of a model share its memory, as its layers do."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"expected no pickling of a {type(self).__name__}, whose memory is mapped in this process alone; "
            "make one in the process that needs it"
        )

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=error is not None)

    def _close(self, *, failed: bool) -> None:
        self._closed = True
        if self._owns_arena:
            self.arena.close(failed=failed)

    def _require_open(self) -> None:
        if self._closed or self.arena.closed:
            raise ClosedError("expected an open dispatcher, got one that was closed, or whose arena was")

    def _index(self, lane: int | None) -> int:
        """Return a lane's place in the arena."""
        if lane is None:
            return self.arena.default_lane()
        if isinstance(lane, bool) or not isinstance(lane, int) or not 0 <= lane < len(self._lanes):
            raise InputError(f"expected a lane in [0, {len(self._lanes)}), got {lane!r}")
        return lane

    def _lane(self, lane: int | None) -> Lane:
        return self.arena.lanes[self._index(lane)]

    def _lane_of(self, handle: Handle) -> Lane:
        return self.arena.lanes[self._lanes.index(handle.lane)]
