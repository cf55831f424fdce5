"""One lane on one rank: its device channel, its waits on the host, its in-flight guard."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from symm_a2a.diagnosis import Diagnosis
from symm_a2a.errors import (
    CapacityError,
    ClosedError,
    EnvironmentUnsupportedError,
    ExchangeError,
    ExpertIdError,
    LaneBusyError,
)
from symm_a2a.kernels.blocks import blocks_for
from symm_a2a.kernels.channel import (
    EPOCH_SHIFT,
    Cell,
    Channel,
    HostCounts,
    Kind,
    Report,
    Wait,
    state_cells,
)
from symm_a2a.kernels.credit import credit
from symm_a2a.layout import FLAGS, ArenaLayout
from symm_a2a.memory import SymmetricMemory
from symm_a2a.readback import RowCount, beside_the_caller, host_visible

_POLLS_PER_SECOND = 1_000_000
"""Looks at a flag per second from a GPU; a wait in a kernel is bounded by their number."""

_FIRST_NAP, _LONGEST_NAP = 20e-6, 1e-3


class Lane:
    """An ordered channel between the ranks: one exchange at a time, launch then join.

    Args:
        index: the lane's place in the arena.
        memory: this rank's symmetric memory.
        layout: the arena's layout.
        timeout: seconds a rank waits for a peer.
        overflow: `"raise"` or `"drop"`, see `EPConfig`.
        num_programs: the most programs that a kernel may have, see `EPConfig`.
        failures: shared by the lanes of an arena: when one fails, all refuse work.
    """

    def __init__(
        self,
        index: int,
        memory: SymmetricMemory,
        layout: ArenaLayout,
        timeout: float,
        overflow: str,
        num_programs: int | None,
        failures: list[ExchangeError],
    ) -> None:
        device, offset = memory.device, layout.lane_offset(index)
        self.index = index
        self.number: int | None = None
        self.memory = memory
        self.device = device
        self.layout = layout
        self.timeout = timeout
        self.overflow = overflow
        self._failures = failures
        self._closed = False
        self._owner = os.getpid()
        self._on_gpu = device.type == "cuda"
        self._in_flight: Kind | None = None
        self._last_launch: Kind | None = None
        self._last_launch_captured = False
        mine = memory.arenas[memory.rank]
        polls = min(int(timeout * _POLLS_PER_SECOND), (1 << 31) - 1) if memory.spins else 0
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
            polls=polls,
            spins=memory.spins,
            programs=num_programs if self._on_gpu else 1,
            multiprocessors=_multiprocessors(device),
            blocks=blocks_for(layout, num_programs),
            counts=HostCounts(),
        )
        self._status = self.channel.status.numpy()
        self._diagnosis = Diagnosis(index, memory, self.channel, timeout)
        self._rows = RowCount(device)
        if memory.host_waits:
            self._state = self.channel.state.numpy()
            self._flags = {name: self.channel.local[name].numpy() for name in FLAGS}

    def begin(self, kind: Kind, *, kernel_waits: bool = False) -> None:
        """Open a launch: the lane is idle, and every peer has taken the last one's data.

        Args:
            kind: what is launched.
            kernel_waits: whether the first kernel waits, in one program, for the peers to have
                taken the last data; it does so where kernels may wait.

        Raises:
            LaneBusyError: an exchange of this lane has not been joined.
            EnvironmentUnsupportedError: another GPU is the current one.
            CapacityError: an earlier dispatch overflowed a static capacity.
            ExchangeError: the lane has failed, now or before.
        """
        self.require_idle(kind)
        if self.memory.host_waits:
            launched = int(self._state[Cell.launched(scatters=kind.scatters)])
            self._wait(f"{kind.direction}_free", launched, kind, Wait.CREDIT)
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
        """Compile and load what exchanges launch only sometimes: a capture may be the first to need it."""
        if self.memory.spins:
            for kind in Kind:
                credit(self.channel, kind)

    def _alternates(self, kind: Kind) -> bool:
        return self._last_launch is None or self._last_launch.scatters != kind.scatters

    def arrive(self, kind: Kind) -> None:
        """Open a join: every peer's copies are here, or a kernel makes sure that they are.

        Raises:
            ExchangeError: a peer did not take part.
            ClosedError: the arena was closed while the exchange was in flight.
        """
        self._require_open()
        if self.memory.host_waits:
            launched = int(self._state[Cell.launched(scatters=kind.scatters)])
            self._wait(f"{kind.direction}_ready", launched, kind, Wait.COPIES)

    def end(self) -> None:
        """Close a join: the lane is idle again, and what its kernels reported is raised."""
        self._in_flight = None
        self.raise_reports()

    def start_row_count(self, pad_multiple: int) -> None:
        """Begin to read the number of rows to come, where that can run beside the launch."""
        if self.memory.spins:
            self._rows.start(self.channel, pad_multiple)

    def row_count(self, pad_multiple: int) -> int:
        """Return the number of rows of the dispatch in flight; the host waits for it.

        Raises:
            ExchangeError: a peer's counts did not come.
        """
        self._require_open()
        if self.memory.host_waits:
            self._wait("counts_ready", int(self._state[Cell.COUNTED]), Kind.DISPATCH, Wait.COUNTS)
        if not self.memory.spins:
            self._rows.start(self.channel, pad_multiple)
        self.channel.counts.syncs += 1
        with self._blocked():
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
            raise self._failures[0]
        if self._status[Report.FAILURE]:
            raise self.fail(self._diagnosis.reported())
        if self._status[Report.INVALID_IDS]:
            invalid, self._status[Report.INVALID_IDS] = int(self._status[Report.INVALID_IDS]), 0
            raise ExpertIdError(
                f"expected expert ids in [-1, {self.layout.num_experts}), got {invalid} slots out of range; "
                "nothing was sent for them"
            )

    def raise_overflow(self) -> None:
        """Raise `CapacityError` where rows have been dropped and the policy is to say so."""
        if self._status[Report.OVERFLOW_ROWS] and self.overflow == "raise":
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
        self._failures.append(error)
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

    def close(self) -> None:
        """Refuse any further use; what is in flight cannot be joined any more."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"expected an open arena, got lane {self.index} of one that was closed")

    @contextmanager
    def _blocked(self) -> Iterator[None]:
        """Count the time inside as time blocked."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.channel.counts.blocked += time.perf_counter() - begin

    def _wait(self, flag: str, epoch: int, kind: Kind, wait: Wait) -> None:
        """Sleep until every peer's flag has reached `epoch`."""
        with self._blocked():
            self._poll(flag, epoch, kind, wait)

    def _poll(self, flag: str, epoch: int, kind: Kind, wait: Wait) -> None:
        words, nap = self._flags[flag], _FIRST_NAP
        deadline = time.monotonic() + self.timeout
        while True:
            missing = np.flatnonzero(words >> EPOCH_SHIFT < epoch)
            if not missing.size:
                return
            evidence = self._diagnosis.evidence(kind, wait)
            late = time.monotonic() > deadline
            # Read again: a peer may have raised its flag, and gone on or ended, since.
            missing = [int(peer) for peer in missing if words[peer] >> EPOCH_SHIFT < epoch]
            error = self._diagnosis.blame(missing, evidence, kind, wait, epoch)
            if error is not None:
                raise self.fail(error)
            if missing and late:
                raise self.fail(self._diagnosis.timeout(missing, kind, wait, epoch))
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)


def _multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 1 for the CPU, where programs run one after another."""
    return 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count
