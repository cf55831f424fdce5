"""The ranks of sequence exchanges, and their symmetric memory."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from typing import NoReturn

import torch
import torch.distributed as dist

from symm_a2a.arena import drop_grad
from symm_a2a.config import DTYPES
from symm_a2a.errors import ClosedError, ConfigError, EnvironmentUnsupportedError, InputError
from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.ulysses import Kind, SequenceLayout, Sizes, describe_card
from symm_a2a.memory import (
    Backend,
    create_memory,
    default_device,
    released_on_error,
    require_agreement,
    require_device,
)
from symm_a2a.runtime import require_runnable
from symm_a2a.ulysses import table
from symm_a2a.ulysses.lane import SequenceLane

_log = logging.getLogger(__name__)

_LEAST_BYTES = 1 << 20
"""That a group which grows allocates for a result."""


def _leave(lane: SequenceLane) -> None:
    """Tell the peers that this rank will take part no more; runs when nobody closed the group."""
    with contextlib.suppress(Exception):
        lane.abort()


class SequenceGroup:
    """The ranks that share sequences, with memory for their exchanges; see `seq_to_head`.

    Every rank runs every exchange of a group in the same order, forward and backward. On a GPU they follow
    one another on the current stream; a caller that uses several orders them.

    Args:
        process_group: the ranks; None for the default group, or a group of one where torch.distributed is
            not initialised.
        max_bytes: the most bytes that the result of an exchange may have on a rank; the memory for two such
            results is allocated now, and construction is collective. None: the first exchange allocates, and
            a larger one allocates anew, collectively, to the next power of two.
        timeout: seconds a rank waits for a peer before it raises `PeerTimeoutError`.
        device: where tensors live; None for the current CUDA device, or for the CPU where there is none or
            the process group's backend is gloo.
        backend: `"cuda"`, `"host"` or `"virtual"`; None chooses by device and group.

    Attributes:
        anchor: float32 `(1,)`, a leaf that requires a gradient. It enters every exchange, so that a backward
            exists on every rank, also where this rank's input needs none.

    Raises:
        ConfigError: a value out of range, or the ranks disagree.
        EnvironmentUnsupportedError: the backend cannot work here.

    Example:
        >>> SequenceGroup.symmetric_bytes(max_bytes=4096 * 8 * 128 * 2, world_size=8)
        16777984
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        max_bytes: int | None = None,
        timeout: float = 60.0,
        device: torch.device | str | None = None,
        backend: Backend | None = None,
    ) -> None:
        if max_bytes is not None and (
            isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1
        ):
            raise ConfigError(f"expected max_bytes to be a positive int or None, got {max_bytes!r}")
        number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if not number or not 0 < timeout < math.inf:
            raise ConfigError(f"expected timeout to be a positive number of seconds, got {timeout!r}")
        if process_group is None and dist.is_available() and dist.is_initialized():
            process_group = dist.group.WORLD
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ConfigError("expected a member of the group, got a rank that is not in it")
        self.closed = False
        self.max_bytes = max_bytes
        self.timeout = timeout
        self.device = default_device(process_group) if device is None else require_device(device)
        self.world_size = 1 if process_group is None else dist.get_world_size(process_group)
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        # The table of process groups must not keep its keys alive.
        self._process_group = None if process_group is None else weakref.ref(process_group)
        self._backend: Backend | None = backend
        self._lane: SequenceLane | None = None
        self._finalizer: weakref.finalize | None = None
        require_runnable(self.device)
        with torch.inference_mode(False):
            self.anchor = torch.zeros(1, dtype=torch.float32, device=self.device, requires_grad=True)
        # Nobody reads the anchor's gradient: dropped at once, it is never added up.
        self.anchor.register_post_accumulate_grad_hook(drop_grad)
        self.number = table.enter(self)
        if max_bytes is not None and self.world_size > 1:
            self._allocate(max_bytes, "")

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> SequenceGroup:
        """Return the group that `seq_to_head` uses for a process group; made, without memory, if need be.

        It lives as long as the process group; close it before that is destroyed.
        """
        group = table.find(process_group)
        if group is None:
            if torch.compiler.is_compiling():
                raise EnvironmentUnsupportedError(
                    "expected SequenceGroup.of(group) to have been called before code with a process group "
                    "is compiled, got none for this one"
                )
            group = cls(process_group)
            table.remember(process_group, group)
        return group

    @staticmethod
    def symmetric_bytes(max_bytes: int, world_size: int) -> int:
        """Return the symmetric memory that a rank of such a group allocates, in bytes, exactly.

        Raises:
            ConfigError: a size that is no positive int.
        """
        for name, value in (("max_bytes", max_bytes), ("world_size", world_size)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"expected {name} to be a positive int, got {value!r}")
        return 0 if world_size == 1 else SequenceLayout(world_size, max_bytes).nbytes

    @property
    def allocated_bytes(self) -> int:
        """The symmetric memory that this rank holds now, in bytes."""
        return 0 if self._lane is None else self._lane.channel.layout.nbytes

    @property
    def state(self) -> torch.Tensor:
        """The counters that the kernels keep of the exchanges so far, in the present memory, if any.

        int64, device memory: the number of exchanges first; rows sent, by kind and peer, from
        `kernels.channel.Cell.COPIES` on.
        """
        return torch.empty(0, dtype=torch.int64) if self._lane is None else self._lane.channel.state

    def check(self, x: torch.Tensor) -> None:
        """Raise unless `x` is a tensor that this group can exchange.

        Raises:
            InputError: a wrong shape, dtype or device.
            ClosedError: the group was closed.
        """
        self._require_open()
        if x.dim() != 4 or x.shape[2] < 1 or x.shape[3] < 1:
            raise InputError(f"expected x of shape (batch, sequence, heads, dim), got {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise InputError(f"expected x of a dtype in {DTYPES}, got {x.dtype}")
        if x.device != self.device:
            raise InputError(f"expected x on {self.device}, got {x.device}")

    def exchange(self, kind: Kind, x: torch.Tensor, replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one exchange; what `seq_to_head` and `head_to_seq` are made of.

        Args:
            kind: which.
            x: one that `check` accepts and whose sizes divide.
            replicas: ranks that each head goes to.

        Returns:
            The result, and a one-element tensor that stands for the exchange.
        """
        self._require_open()
        sizes = Sizes.of(kind, x.shape, x.dtype, self.world_size, replicas)
        if self.world_size == 1:
            return x.clone(memory_format=torch.contiguous_format), x.new_zeros(1, dtype=torch.float32)
        lane = self._lane_for(x, sizes, kind)
        lane.launch(kind, x, sizes)
        return lane.join(kind, x, sizes)

    def close(self) -> None:
        """Give the symmetric memory back; a second call does nothing.

        Run the backward first: it needs the memory. Collective on GPUs.
        """
        self._close(failed=False)

    def _lane_for(self, x: torch.Tensor, sizes: Sizes, kind: Kind) -> SequenceLane:
        """Return the lane, with memory for what it is to exchange."""
        needed, lane = sizes.nbytes(self.world_size), self._lane
        if lane is not None and needed <= lane.channel.layout.max_bytes:
            return lane
        if self.max_bytes is not None:
            raise InputError(
                f"expected a result of at most max_bytes = {self.max_bytes} bytes on a rank, got {needed}; "
                "make the SequenceGroup with a larger max_bytes"
            )
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise EnvironmentUnsupportedError(
                "expected memory to be allocated before a graph is captured, got an exchange that needs more "
                "in it; run it once before, or give max_bytes"
            )
        if lane is not None:
            # All agree on it before they meet: who does not need more memory would not come.
            lane.launch(Kind.GROWTH, x, sizes)
            lane.join(Kind.GROWTH, x, sizes)
            lane.settle()
            self._lane = None
            lane.close()
        return self._allocate(
            max(_LEAST_BYTES, padded(needed)), f" for {describe_card(sizes.card(kind), self.world_size)}"
        )

    def _allocate(self, max_bytes: int, purpose: str) -> SequenceLane:
        """Allocate and map memory; collective."""
        process_group = self._process_group and self._process_group()
        if process_group is None:
            raise ClosedError("expected a SequenceGroup of a process group, got one that was destroyed")
        # First of all, so that an error that only some ranks would make reaches every rank.
        require_agreement(
            process_group, "SequenceGroup",
            f"max_bytes={max_bytes} timeout={self.timeout:g} backend={self._backend} "
            f"device={self.device.type}{purpose}",
        )  # fmt: skip
        layout = SequenceLayout(self.world_size, max_bytes)
        memory = create_memory(layout.nbytes, self.device, process_group, self._backend)
        with released_on_error(memory, layout.abort):
            self._lane = lane = SequenceLane(memory, layout, self.timeout)
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _leave, lane)
        _log.info(
            "rank %d of %d: %.1f MiB of symmetric memory for two results of %d bytes of sequence exchanges, "
            "backend %s", self.rank, self.world_size, layout.nbytes / 2**20, max_bytes, memory.backend,
        )  # fmt: skip
        return lane

    def _close(self, *, failed: bool) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self.closed, lane, self._lane = True, self._lane, None
        if lane is not None:
            lane.close(failed=failed)

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedError("expected an open SequenceGroup, got one that was closed")

    def __enter__(self) -> SequenceGroup:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._close(failed=kind is not None)

    def __deepcopy__(self, memo: dict[int, object]) -> SequenceGroup:
        """Return the group itself: copies of a model share its memory, as its layers do."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "expected no pickling of a SequenceGroup, whose memory is mapped in this process alone; "
            "make one in the process that needs it"
        )
