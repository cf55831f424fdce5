"""The sequence exchanges of one rank, one after another: launch, wait where the host does, take."""

from __future__ import annotations

import os
import time

import numpy as np
import torch

from symm_a2a.config import debugging
from symm_a2a.errors import ClosedError, EnvironmentUnsupportedError, ExchangeError
from symm_a2a.host_wait import FIRST_NAP, LONGEST_NAP
from symm_a2a.kernels.channel import EPOCH_SHIFT, Report, state_cells
from symm_a2a.kernels.looks import looks_per_second, looks_within
from symm_a2a.kernels.ulysses import (
    RESIDENCY,
    Cell,
    Kind,
    SequenceChannel,
    SequenceLayout,
    Sizes,
)
from symm_a2a.kernels.ulysses_send import send_heads
from symm_a2a.kernels.ulysses_take import take_heads
from symm_a2a.lane import multiprocessors_of
from symm_a2a.memory import SymmetricMemory, VirtualMemory
from symm_a2a.readback import beside_the_caller, host_visible
from symm_a2a.ulysses.diagnosis import Diagnosis
from symm_a2a.ulysses.inspection import Inspector


class SequenceLane:
    """Exchanges between the ranks in one order: each is launched and joined before the next.

    Args:
        memory: this rank's symmetric memory.
        layout: of that memory.
        timeout: seconds a rank waits for a peer.
    """

    def __init__(self, memory: SymmetricMemory, layout: SequenceLayout, timeout: float) -> None:
        device, mine, W = memory.device, memory.arenas[memory.rank], layout.world_size
        self.memory = memory
        self.timeout = timeout
        self._failure: ExchangeError | None = None
        self._closed = False
        self._owner = os.getpid()
        self._on_gpu = device.type == "cuda"
        # Trainers build models under a meta device or in inference mode; neither may reach these.
        with torch.inference_mode(False), torch.device(device):
            self.channel = SequenceChannel(
                rank=memory.rank,
                layout=layout,
                peers_W=torch.tensor([arena.data_ptr() for arena in memory.arenas], dtype=torch.int64),
                abort_W=layout.abort.view(mine, 0),
                ready=layout.ready.view(mine, 0),
                cards=layout.cards.view(mine, 0),
                payload=layout.payload.view(mine, 0),
                state=torch.zeros(state_cells(W), dtype=torch.int64),
                status=host_visible(Report.WORDS + W, device),
                polls=looks_within(timeout, looks_per_second(W, device)) if memory.spins else 0,
                spins=memory.spins,
                programs=multiprocessors_of(device) * RESIDENCY if self._on_gpu else 1,
            )
        self._status = self.channel.status.numpy()
        if memory.host_waits:
            self._state, self._ready = self.channel.state.numpy(), self.channel.ready.numpy()
        self._diagnosis = Diagnosis(memory, self.channel, timeout)
        self._inspector = Inspector(self.channel) if debugging() else None

    @classmethod
    def world(cls, world_size: int, max_bytes: int, device: torch.device) -> list[SequenceLane]:
        """Return the lanes of ranks that share this process: all launch before any joins."""
        layout = SequenceLayout(world_size, max_bytes)
        memories = VirtualMemory.world(world_size, layout.nbytes, device)
        return [cls(memory, layout, timeout=1.0) for memory in memories]

    def launch(self, kind: Kind, x: torch.Tensor, sizes: Sizes) -> None:
        """Send every rank its part of `x`.

        Raises:
            ExchangeError: the lane has failed, now or before.
            ClosedError: the lane was closed.
            EnvironmentUnsupportedError: another GPU is the current one.
        """
        self._require_usable()
        send_heads(self.channel, kind, x if x.stride(-1) == 1 else x.contiguous(), sizes)

    def join(self, kind: Kind, x: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of what was launched last, and a token; both in memory of their own.

        Raises:
            ExchangeError: a peer did not take part, exchanges something else, or, in debug mode, has not sent
                what it should.
        """
        W = self.channel.layout.world_size
        shape = (0, 1, 1, 1) if kind == Kind.GROWTH else sizes.output_shape(kind, W)
        out, token = x.new_empty(shape), x.new_empty(1, dtype=torch.float32)
        if self.memory.host_waits:
            self._wait_for_peers()
        if self._inspector is not None:
            self._inspect(self._inspector, kind, sizes)
        take_heads(self.channel, kind, out, token, sizes)
        if self._inspector is not None:
            self._inspector.poison()
        self.raise_reports()
        return out, token

    def raise_reports(self) -> None:
        """Raise what the kernels have reported so far; never waits for the device.

        Raises:
            ExchangeError: an exchange has failed; the same error at every later call.
        """
        if self._failure is None and self._status[Report.FAILURE]:
            self.fail(self._diagnosis.reported())
        if self._failure is not None:
            raise self._failure.again()

    def settle(self) -> None:
        """Wait for the device, and raise what has been reported then."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        self.raise_reports()

    def fail(self, error: ExchangeError) -> None:
        """Fail for good, and tell every peer."""
        self._failure = self._failure or error.again()
        self.abort()

    def abort(self) -> None:
        """Make every peer that waits for this rank, or will, give up at once.

        Not in a forked child, which has this rank's memory and is not this rank.
        """
        if os.getpid() != self._owner:
            return
        # Beside whatever waits in the caller's stream: that may be what the peers are to give up.
        with beside_the_caller(self.memory.device):
            for arena in self.memory.arenas:
                self.channel.layout.abort.view(arena, 0)[self.memory.rank] = 1

    def close(self, *, failed: bool = False) -> None:
        """Give the memory back; a second call does nothing.

        Args:
            failed: this rank leaves because of an error: peers that wait for it end at once.
        """
        if self._closed:
            return
        self._closed = True
        failed = failed or self._failure is not None
        if failed:
            self.abort()
        self.memory.close(failed=failed)

    def _require_usable(self) -> None:
        if self._closed:
            raise ClosedError("expected an open SequenceGroup, got one that was closed")
        if self._on_gpu and torch.cuda.current_device() != self.memory.device.index:
            raise EnvironmentUnsupportedError(
                f"expected {self.memory.device} to be the current device, got "
                f"cuda:{torch.cuda.current_device()}, where the kernels would run; call torch.cuda.set_device"
            )
        self.raise_reports()

    def _inspect(self, inspector: Inspector, kind: Kind, sizes: Sizes) -> None:
        try:
            inspector.inspect(kind, sizes)
        except ExchangeError as error:
            self.fail(error)
            raise

    def _wait_for_peers(self) -> None:
        """Sleep until every peer's ready word has reached the epoch launched last."""
        epoch = int(self._state[Cell.EPOCH])
        nap, deadline = FIRST_NAP, time.monotonic() + self.timeout
        while self._missing(epoch):
            evidence, late = self._diagnosis.evidence(), time.monotonic() > deadline
            # Read again: a peer may have sent its rows, and gone on or ended, since.
            missing = self._missing(epoch)
            error = self._diagnosis.blame(missing, evidence, epoch)
            if error is None and missing and late:
                error = self._diagnosis.timeout(missing, epoch)
            if error is not None:
                self.fail(error)
                raise error
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)

    def _missing(self, epoch: int) -> list[int]:
        return np.flatnonzero(self._ready[epoch & 1] >> EPOCH_SHIFT < epoch).tolist()
