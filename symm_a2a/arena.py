"""The arena of one rank: symmetric memory, its lanes, and what they share."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist

from symm_a2a.config import EPConfig
from symm_a2a.errors import (
    ClosedError,
    ConfigError,
    ExchangeError,
    RecordingError,
)
from symm_a2a.lane import Lane
from symm_a2a.layout import ArenaLayout
from symm_a2a.ledger import Ledger
from symm_a2a.memory import (
    Backend,
    Link,
    SymmetricMemory,
    create_memory,
    default_device,
    released_on_error,
    require_agreement,
    require_device,
)
from symm_a2a.placement import Placement
from symm_a2a.runtime import require_runnable
from symm_a2a.timeline import Recorder

_log = logging.getLogger(__name__)

_PER_DISPATCHER = ("capacity", "pad_multiple", "placement")
"""Fields of a config that dispatchers of one arena may differ in."""


def _leave(lanes: list[Lane]) -> None:
    """Tell the peers that this rank will take part no more; runs when nobody closed the arena."""
    with contextlib.suppress(Exception):
        lanes[0].abort()


class Arena:
    """Symmetric memory and lanes, shared by all dispatchers of a model.

    Args:
        cfg: sizes and policies.
        memory: this rank's symmetric memory, of `cfg.symmetric_bytes(W)` bytes.
        layout: `cfg.layout(W)`.

    Attributes:
        anchor: float32 `(1,)`, a leaf that requires a gradient. It enters every dispatch, so
            that a backward exists on every rank, also where this rank's inputs need none.
        lane_in_turn: the lane of a dispatch that names none.
    """

    def __init__(self, cfg: EPConfig, memory: SymmetricMemory, layout: ArenaLayout) -> None:
        require_runnable(memory.device)
        self.closed = False
        self.lane_in_turn = 0
        self._failures: list[ExchangeError] = []
        self.cfg = cfg
        self.memory = memory
        self.layout = layout
        self._ledgers: list[Ledger] = []
        # Trainers build models under a meta device or in inference mode; neither may reach these.
        with torch.inference_mode(False), torch.device(memory.device):
            self.lanes = [
                Lane(index, memory, layout, cfg, self._failures) for index in range(layout.num_lanes)
            ]
            self.anchor = torch.zeros(1, dtype=torch.float32, device=memory.device, requires_grad=True)
            self.sink = torch.zeros(1, dtype=torch.float32, device=memory.device)
        # Nobody reads the anchor's gradient: dropped at once, it is never added up.
        self.anchor.register_post_accumulate_grad_hook(drop_grad)
        self._finalizer = weakref.finalize(self, _leave, self.lanes)
        _log.info(
            "rank %d of %d: %.1f MiB of symmetric memory in %d lanes, backend %s",
            memory.rank, layout.world_size, layout.nbytes / 2**20, layout.num_lanes, memory.backend,
        )  # fmt: skip

    def require_open(self) -> None:
        """Raise `ClosedError` after `close`."""
        if self.closed:
            raise ClosedError("expected an open dispatcher, got one whose arena was closed")

    @contextlib.contextmanager
    def in_lane(self, index: int) -> Iterator[None]:
        """Let dispatches that name no lane take this one."""
        before, self.lane_in_turn = self.lane_in_turn, index
        try:
            yield
        finally:
            self.lane_in_turn = before

    def default_lane(self) -> int:
        """Return the lane of a dispatch that names none: the one in turn.

        In a backward an idle one, if that is busy: a checkpoint within a micro-batch runs its exchanges again
        while another micro-batch's is in flight. Which lanes are busy then is the same on every rank.
        """
        turn = self.lane_in_turn
        if not torch.compiler.is_compiling() and _in_backward() and self.lanes[turn].in_flight:
            return next((lane.index for lane in self.lanes if not lane.in_flight), turn)
        return turn

    def fail(self, error: ExchangeError) -> None:
        """End the work of every rank at once: each lane here raises `error`, the peers learn of it."""
        if not self.closed and not self._failures:
            self.lanes[0].fail(error)

    def start_recording(self) -> Recorder:
        """Let the lanes note their exchanges, until `stop_recording`.

        Raises:
            RecordingError: they do so already.
        """
        self.require_open()
        if self.lanes[0].recorder is not None:
            raise RecordingError("expected one recording at a time, got a second one inside it")
        recorder = Recorder(self.memory.rank, self.layout, self.memory.device)
        for lane in self.lanes:
            lane.recorder = recorder
        return recorder

    def stop_recording(self) -> None:
        """Let the lanes note nothing any more."""
        for lane in self.lanes:
            lane.recorder = None

    def new_ledger(self, placement: Placement | None) -> Ledger:
        """Return a dispatcher's ledger, which lives as long as the arena: captured graphs add to it."""
        self._ledgers.append(Ledger(self.layout, self.memory.device, placement, self.memory.rank))
        return self._ledgers[-1]

    def require_fits(self, cfg: EPConfig) -> None:
        """Raise where a dispatcher's config differs from the arena's in what they share.

        Raises:
            ConfigError: names the fields, and both values of each.
        """
        if cfg.layout(self.layout.world_size).num_experts != self.layout.num_experts:
            raise ConfigError(
                f"expected {self.layout.num_local_experts} places on each rank, as the arena has them, got "
                f"{cfg.layout(self.layout.world_size).num_local_experts} in the placement"
            )
        differences = [
            f"{name} {getattr(self.cfg, name)!r} in the arena and {getattr(cfg, name)!r} in the config"
            for name in cfg.__dataclass_fields__
            if name not in _PER_DISPATCHER and getattr(self.cfg, name) != getattr(cfg, name)
        ]
        if differences:
            raise ConfigError(
                f"expected the arena's sizes and policies (all but {', '.join(_PER_DISPATCHER)}), got "
                + "; ".join(differences)
            )

    def close(self, *, failed: bool = False) -> None:
        """Give the symmetric memory back; a second call does nothing.

        Args:
            failed: this rank leaves because of an error: peers that wait for it end at once.

        Raises:
            CapacityError: rows were dropped that no call has reported yet, and the policy is to
                raise; everything has been given back.
        """
        if self.closed:
            return
        self.closed = True
        self._finalizer.detach()
        # A peer may wait, or will, for what this rank has launched and never joins.
        failed = failed or bool(self._failures) or any(lane.in_flight for lane in self.lanes)
        if failed:
            self.lanes[0].abort()
        lanes = list(self.lanes)
        for lane in lanes:
            lane.close()
        self.lanes.clear()
        self.memory.close(failed=failed)
        if not failed:
            for lane in lanes:
                lane.raise_overflow()


def _in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() >= 0


def drop_grad(anchor: torch.Tensor) -> None:
    """Forget an anchor's gradient."""
    anchor.grad = None


def create_arena(
    cfg: EPConfig,
    group: dist.ProcessGroup | None,
    device: torch.device | str | None,
    backend: Backend | None,
    link: Link | None,
) -> Arena:
    """Allocate, map and agree on an arena over a group; collective."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None and dist.get_rank(group) < 0:
        raise ConfigError("expected a member of the group, got a rank that is not in it")
    device = default_device(group) if device is None else require_device(device)
    if group is not None:
        # First of all, so that an error that only some ranks would make reaches every rank.
        require_agreement(
            group, "configuration", f"{cfg.mark} backend={backend} device={device.type} link={link}"
        )
    layout = cfg.layout(1 if group is None else dist.get_world_size(group))
    memory = create_memory(layout.nbytes, device, group, backend, cfg.num_lanes, link)
    with released_on_error(memory, layout.abort):
        return Arena(cfg, memory, layout)
