"""One lane on one rank: its device channel, its waits on the host, its in-flight guard."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch

from symm_a2a.config import EPConfig, debugging
from symm_a2a.diagnosis import Diagnosis
from symm_a2a.errors import (
    CapacityError,
    ClosedError,
    EnvironmentUnsupportedError,
    ExchangeError,
    ExpertIdError,
    LaneBusyError,
)
from symm_a2a.host_wait import HostWait, channel_of
from symm_a2a.inspection import Inspector
from symm_a2a.kernels.blocks import blocks_for
from symm_a2a.kernels.channel import Cell, Channel, HostCounts, Kind, Report, state_cells
from symm_a2a.kernels.credit import credit
from symm_a2a.kernels.looks import looks_per_second, looks_within
from symm_a2a.layout import ArenaLayout
from symm_a2a.ledger import Ledger
from symm_a2a.memory import SymmetricMemory
from symm_a2a.ranges import profiled
from symm_a2a.readback import RowCount, beside_the_caller, host_visible
from symm_a2a.streams import LaneStream
from symm_a2a.timeline import Recorder
from symm_a2a.wire import bytes_to_others


class Lane:
    """An ordered channel between the ranks: one exchange at a time, launch then join.

    Args:
        index: the lane's place in the arena.
        memory: this rank's symmetric memory.
        layout: the arena's layout.
        cfg: the arena's sizes and policies.
        failures: shared by the lanes of an arena: when one fails, all refuse work.

    Attributes:
        recorder: notes the lane's exchanges; None while nobody wants to know.
    """

    def __init__(
        self,
        index: int,
        memory: SymmetricMemory,
        layout: ArenaLayout,
        cfg: EPConfig,
        failures: list[ExchangeError],
    ) -> None:
        device, offset = memory.device, layout.lane_offset(index)
        self.index = index
        self.number: int | None = None
        self.memory = memory
        self.device = device
        self.layout = layout
        self.cfg = cfg
        self._failures = failures
        self._closed = False
        self._owner = os.getpid()
        self._on_gpu = device.type == "cuda"
        self._in_flight: Kind | None = None
        self._last_launch: Kind | None = None
        self._last_launch_captured = False
        self._held: tuple[torch.UntypedStorage, ...] = ()
        self._stream = LaneStream(device, exists=self._on_gpu and memory.spins)
        self._arrived: float | None = None
        self.recorder: Recorder | None = None
        self._ledger = Ledger(layout, device)
        mine = memory.arenas[memory.rank]
        self.channel = Channel(
            rank=memory.rank,
            layout=layout,
            peers_W=torch.tensor(
                [arena.data_ptr() + offset for arena in memory.arenas], dtype=torch.int64, device=device
            ),
            abort_W=layout.abort.view(mine, 0),
            local={name: region.view(mine, offset) for name, region in layout.regions.items()},
            state=torch.zeros(state_cells(layout.world_size), dtype=torch.int64, device=device),
            status=host_visible(Report.WORDS + layout.world_size, device),
            ledger=self._ledger.card,
            polls=looks_within(cfg.timeout) if memory.spins else 0,
            spins=memory.spins,
            programs=cfg.num_programs if self._on_gpu else 1,
            multiprocessors=multiprocessors_of(device),
            blocks=blocks_for(layout, cfg.num_programs),
            counts=HostCounts(),
            holds=debugging(),
        )
        self._inspector = Inspector(index, self.channel) if self.channel.holds else None
        self._status = self.channel.status.numpy()
        self._diagnosis = Diagnosis(index, memory, self.channel, cfg.timeout)
        self._rows = RowCount(device)
        self._host = (
            HostWait(index, memory, self.channel, cfg.timeout, self._diagnosis) if memory.host_waits else None
        )

    @contextmanager
    def launch(
        self, kind: Kind, *holds: torch.Tensor, kernel_waits: bool = False, beside: bool = False
    ) -> Iterator[None]:
        """Open a launch, run its kernels inside, and close it.

        When it is open the lane is idle and every peer has taken the last one's data, or a kernel makes
        sure of that.

        Args:
            kind: what is launched.
            *holds: what the kernels read and write; kept until the join.
            kernel_waits: whether the first kernel waits, in one program, for the peers to have
                taken the last data; it does so where kernels may wait.
            beside: run the kernels on the lane's own stream, beside the caller's until the join. Memory
                has to be allocated before.

        Raises:
            LaneBusyError: an exchange of this lane has not been joined.
            EnvironmentUnsupportedError: another GPU is the current one.
            CapacityError: an earlier dispatch overflowed a static capacity.
            ExchangeError: the lane has failed, now or before.
        """
        self.require_idle(kind)
        recorder, before = self.recorder, self._copies(kind)
        begin = recorder and recorder.mark()
        with self._profiled(kind, "launch", 1):
            with self._stream.beside_caller() if beside else nullcontext():
                self._begin(kind, kernel_waits)
                # Not the tensors, whose graph leads to this lane: nobody could collect such a circle.
                self._held = tuple(tensor.untyped_storage() for tensor in holds)
                yield
                after = self._copies(kind)
                arrival = recorder.mark() if recorder is not None and self._on_gpu else None
            self._depart(kind, before, after)
        if recorder is not None:
            copies = None if before is None or after is None else (before, after)
            recorder.launched(
                self.index, kind, self._epoch(kind), (begin, recorder.mark()), arrival, copies,
                beside=not self._on_gpu or (beside and self._stream.exists),
            )  # fmt: skip

    def _begin(self, kind: Kind, kernel_waits: bool) -> None:
        if self._host is not None:
            with self._waiting():
                self._host.credit(kind)
        elif self.memory.spins:
            captured = self._on_gpu and torch.cuda.is_current_stream_capturing()
            # Where the directions alternate, the exchange joined in between implies the credit.
            # What a captured graph will follow when it is replayed, nobody knows.
            alternates = self._alternates(kind) and captured == self._last_launch_captured
            if not kernel_waits and not alternates:
                credit(self.channel, kind)
            self._last_launch_captured = captured
        self._in_flight = self._last_launch = kind
        self.channel.counts.exchanges[kind.scatters] += 1

    def require_idle(self, kind: Kind) -> None:
        """Raise where `begin` would, without waiting and without opening anything."""
        self._require_open()
        if self._on_gpu and torch.cuda.current_device() != self.device.index:
            raise EnvironmentUnsupportedError(
                f"expected {self.device} to be the current device, got cuda:{torch.cuda.current_device()}, "
                "where the kernels would run; call torch.cuda.set_device first"
            )
        self.raise_reports()
        self.raise_overflow()
        if self._in_flight is not None:
            raise LaneBusyError(
                f"expected lane {self.index} to be idle, got a launch of {kind.title} while "
                f"{self._in_flight.title} is in flight; join it first, or use another lane. Where an error "
                "came between its launch and its join the lane is lost: close the dispatcher, make a new one"
            )

    def warm_up(self) -> None:
        """Compile what exchanges launch only sometimes, and time what a wait does; waits for the device.

        A capture may be the first to need it, and keeps the bound of its waits.
        """
        if self.memory.spins:
            for kind in Kind:
                credit(self.channel, kind)
            per_second = looks_per_second(self.layout.world_size, self.channel.state.device)
            self.channel = replace(self.channel, polls=looks_within(self.cfg.timeout, per_second))

    def _alternates(self, kind: Kind) -> bool:
        return self._last_launch is None or self._last_launch.scatters != kind.scatters

    @contextmanager
    def join(self, kind: Kind) -> Iterator[None]:
        """Open a join, run its kernels inside after `arrive`, and close it: the lane is idle again.

        Raises:
            ExchangeError: what the lane's kernels have reported.
            ClosedError: the arena was closed while the exchange was in flight.
        """
        self._require_open()
        recorder = self.recorder
        begin = recorder and recorder.mark()
        with self._profiled(kind, "join", 0):
            yield
            if self._inspector is not None:
                self._inspector.poison(kind)
        self._in_flight, self._held = None, ()
        if recorder is not None:
            recorder.joined(self.index, (begin, recorder.mark()), self._arrived)
        self.raise_reports()

    def arrive(self, kind: Kind, tally: torch.Tensor | None = None) -> None:
        """Every peer's copies are here, for the kernels that follow in the caller's stream.

        Args:
            kind: what is joined.
            tally: of the dispatch that it follows, if it follows one.

        Raises:
            ExchangeError: a peer did not take part; or, in debug mode, has sent what it should not.
        """
        self._stream.rejoin()
        if self._host is not None:
            with self._waiting():
                self._host.copies(kind)
            if self.recorder is not None:
                self._arrived = self._host.arrival(kind)
        if self._inspector is not None:
            with self._waiting():
                self._inspector.inspect(kind, tally)

    def _profiled(self, kind: Kind, phase: str, ahead: int) -> AbstractContextManager[object]:
        return profiled(phase, kind, self.index, self._epoch(kind) + ahead)

    def _epoch(self, kind: Kind) -> int:
        """Return the number of exchanges that the host has launched in a direction."""
        return self.channel.counts.exchanges[kind.scatters]

    def _copies(self, kind: Kind) -> torch.Tensor | None:
        """Return what operations of a kind have sent to each rank so far, where anybody wants to know."""
        emulated = self.memory.arrivals is not None and self.memory.arrivals.emulated
        if not kind.moves_rows or (self.recorder is None and not emulated):
            return None
        start = Cell.COPIES + kind * self.layout.world_size
        return self.channel.state[start : start + self.layout.world_size].clone()

    def _depart(self, kind: Kind, before: torch.Tensor | None, after: torch.Tensor | None) -> None:
        """Tell the peers when what was launched will have arrived, where the host can."""
        if self.memory.arrivals is None or self._host is None:
            return
        W = self.layout.world_size
        sent_W = [0] * W if before is None or after is None else (after - before).tolist()
        nbytes = bytes_to_others(self.layout, kind, sent_W, self.memory.rank)
        self.memory.arrivals.depart(channel_of(self.index, kind), self._host.launched(kind), nbytes)

    def start_row_count(self, pad_multiple: int) -> None:
        """Begin to read the number of rows to come, where that can run beside the launch."""
        if self.memory.spins:
            self._rows.start(self.channel, pad_multiple)

    def row_count(self, pad_multiple: int) -> int:
        """Return the number of rows of the dispatch in flight; the host waits for it.

        Raises:
            ExchangeError: a peer's counts did not come.
        """
        if self._host is not None:
            with self._waiting():
                self._host.counts()
        if not self.memory.spins:
            self._rows.start(self.channel, pad_multiple)
        self.channel.counts.syncs += 1
        with self._waiting():
            rows = self._rows.read()
        if rows < 0:
            self.raise_reports()
            raise self.fail(ExchangeError("the peers' counts did not arrive"))
        return rows

    def raise_reports(self) -> None:
        """Raise what the lane's kernels have reported so far; never waits for the device.

        Raises:
            ExchangeError: a lane of the arena has failed; the same error at every later call.
            ExpertIdError: a dispatch had ids out of range; those slots were masked.
        """
        if self._failures:
            raise self._failures[0].again()
        if self._status[Report.FAILURE]:
            raise self.fail(self._diagnosis.reported())
        if self._status[Report.INVALID_IDS]:
            invalid, self._status[Report.INVALID_IDS] = int(self._status[Report.INVALID_IDS]), 0
            raise ExpertIdError(
                f"expected expert ids in [-1, {self.cfg.num_experts}), got {invalid} slots out of range; "
                "nothing was sent for them"
            )

    def raise_overflow(self) -> None:
        """Raise `CapacityError` where rows have been dropped and the policy is to say so."""
        if self._status[Report.OVERFLOW_ROWS] and self.cfg.overflow == "raise":
            dropped, self._status[Report.OVERFLOW_ROWS] = int(self._status[Report.OVERFLOW_ROWS]), 0
            raise CapacityError(
                f"expected the rows received to fit the static capacity, got {dropped} rows more, which were "
                'dropped; raise capacity=, or accept drops with overflow="drop"'
            )

    @property
    def dropped_rows(self) -> int:
        """Rows dropped past a static capacity and not raised as an error, so far."""
        return int(self._status[Report.OVERFLOW_ROWS])

    def fail(self, error: ExchangeError) -> ExchangeError:
        """Fail all lanes for good, tell every peer, and return the error to raise."""
        self._failures.append(error.again())
        self.abort()
        return error

    def abort(self) -> None:
        """Make every peer that waits for this rank, or will, give up at once.

        Not in a forked child, which has this rank's memory and is not this rank.
        """
        if os.getpid() != self._owner:
            return
        # Beside whatever waits in the caller's stream: that may be what the peers are to give up.
        with beside_the_caller(self.memory.device):
            for arena in self.memory.arenas:
                self.layout.abort.view(arena, 0)[self.memory.rank] = self.index + 1

    @property
    def in_flight(self) -> bool:
        """Whether an exchange has been launched and not joined."""
        return self._in_flight is not None

    def close(self) -> None:
        """Refuse any further use; what is in flight cannot be joined any more."""
        self._closed = True
        # A graph that lives longer leads here, and is not to keep the symmetric memory.
        self.channel = replace(self.channel, local={}, abort_W=self.channel.state[:0])
        del self._host, self._inspector, self._diagnosis

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"expected an open arena, got lane {self.index} of one that was closed")

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time inside as time blocked; a peer that does not come fails the lanes."""
        begin = time.perf_counter()
        try:
            yield
        except ExchangeError as error:
            raise self.fail(error) from None
        finally:
            self.channel.counts.blocked += time.perf_counter() - begin


def multiprocessors_of(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 1 for the CPU, where programs run one after another."""
    return 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count
