"""Several ranks in one process, stepped phase by phase: for tests, and for one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from symm_a2a.arena import Arena
from symm_a2a.config import EPConfig
from symm_a2a.dispatcher import SymmTokenDispatcher
from symm_a2a.errors import InputError, SymmA2AError
from symm_a2a.handle import Handle
from symm_a2a.memory import VirtualMemory, default_device
from symm_a2a.ops.tie import tie

Result = TypeVar("Result")


class PendingOnAll(Generic[Result]):
    """An exchange of every rank in flight; `join` waits for all."""

    def __init__(self, pending: Sequence[Any], gather: Callable[[list[Any]], Result]) -> None:
        self._pending = pending
        self._gather = gather

    @property
    def lane(self) -> int:
        """The lane it runs in."""
        return self._pending[0].lane

    def join(self) -> Result:
        """Join every rank's exchange, and only then raise the first error: no lane is left busy."""
        results, errors = [], []
        for one in self._pending:
            try:
                results.append(one.join())
            except SymmA2AError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return self._gather(results)


class VirtualWorld:
    """All ranks of a group on one device; every call takes and gives lists over the ranks.

    The kernels, the layout and the protocol are those of a real group; only nothing waits:
    every rank launches, then every rank joins. Gradients flow between the ranks' tensors, so
    a loss may use any of them and gradients may be asked for any: what is exchanged backward is
    exchanged on every rank, with zeros where nothing came.

    Args:
        cfg: as for a dispatcher.
        world_size: W, the number of ranks.
        device: where all of them live; None for the current CUDA device, else the CPU.
    """

    def __init__(self, cfg: EPConfig, world_size: int, device: torch.device | str | None = None) -> None:
        layout = cfg.layout(world_size)
        device = default_device() if device is None else torch.device(device)
        memories = VirtualMemory.world(world_size, layout.nbytes, device)
        self.cfg = cfg
        self.world_size = world_size
        self._arenas = [Arena(cfg, memory, layout) for memory in memories]
        self.dispatchers = [SymmTokenDispatcher(cfg, arena=arena) for arena in self._arenas]

    def dispatch(
        self,
        xs: Sequence[Tensor],
        scores: Sequence[Tensor],
        ids: Sequence[Tensor],
        *,
        lane: int | None = None,
    ) -> tuple[list[Tensor], list[Tensor], list[Handle]]:
        """Dispatch on every rank; see `SymmTokenDispatcher.dispatch`."""
        return self.dispatch_async(xs, scores, ids, lane=lane).join()

    def combine(self, ys: Sequence[Tensor], handles: Sequence[Handle]) -> list[Tensor]:
        """Combine on every rank; see `SymmTokenDispatcher.combine`."""
        return self.combine_async(ys, handles).join()

    def dispatch_again(self, xs: Sequence[Tensor], handles: Sequence[Handle]) -> list[Tensor]:
        """Dispatch other rows on every rank; see `SymmTokenDispatcher.dispatch_again`."""
        return self.dispatch_again_async(xs, handles).join()

    def dispatch_async(
        self,
        xs: Sequence[Tensor],
        scores: Sequence[Tensor],
        ids: Sequence[Tensor],
        *,
        lane: int | None = None,
    ) -> PendingOnAll[tuple[list[Tensor], list[Tensor], list[Handle]]]:
        """Launch a dispatch on every rank; `join` on the result gives what `dispatch` returns."""
        self._require_ranks(xs=xs, scores=scores, ids=ids)
        for dispatcher, x, s, i in zip(self.dispatchers, xs, scores, ids, strict=True):
            dispatcher.require_dispatchable(x, s, i, lane)
        tied = tie([*xs, *scores])
        xs, scores = tied[: len(xs)], tied[len(xs) :]
        pending = [
            dispatcher.dispatch_async(x, s, i, lane=lane)
            for dispatcher, x, s, i in zip(self.dispatchers, xs, scores, ids, strict=True)
        ]

        def gather(results: list[Any]) -> tuple[list[Tensor], list[Tensor], list[Handle]]:
            rows, counts, handles = zip(*results, strict=True)
            return tie(list(rows)), list(counts), list(handles)

        return PendingOnAll(pending, gather)

    def combine_async(self, ys: Sequence[Tensor], handles: Sequence[Handle]) -> PendingOnAll[list[Tensor]]:
        """Launch a combine on every rank; `join` on the result gives what `combine` returns."""
        self._require_ranks(ys=ys, handles=handles)
        for dispatcher, y, handle in zip(self.dispatchers, ys, handles, strict=True):
            dispatcher.require_combinable(y, handle)
        pending = [
            dispatcher.combine_async(y, handle)
            for dispatcher, y, handle in zip(self.dispatchers, tie(list(ys)), handles, strict=True)
        ]
        return PendingOnAll(pending, tie)

    def dispatch_again_async(
        self, xs: Sequence[Tensor], handles: Sequence[Handle]
    ) -> PendingOnAll[list[Tensor]]:
        """Launch a second dispatch on every rank; its `join` gives what `dispatch_again` returns."""
        self._require_ranks(xs=xs, handles=handles)
        for dispatcher, x, handle in zip(self.dispatchers, xs, handles, strict=True):
            dispatcher.require_dispatchable_again(x, handle)
        pending = [
            dispatcher.dispatch_again_async(x, handle)
            for dispatcher, x, handle in zip(self.dispatchers, tie(list(xs)), handles, strict=True)
        ]
        return PendingOnAll(pending, tie)

    @property
    def num_lanes(self) -> int:
        """Exchanges that can be in flight at once."""
        return self.cfg.num_lanes

    @contextmanager
    def in_lane(self, lane: int) -> Iterator[None]:
        """Let dispatches inside that name no lane take this one."""
        with ExitStack() as stack:
            for dispatcher in self.dispatchers:
                stack.enter_context(dispatcher.in_lane(lane))
            yield

    def require_idle(self, lane: int | None = None) -> None:
        """Raise where a rank has an exchange in flight in a lane, or in any, or can run none."""
        for dispatcher in self.dispatchers:
            dispatcher.require_idle(lane)

    def give_up(self, reason: str) -> None:
        """Let no rank take any further part; see `SymmTokenDispatcher.give_up`."""
        for dispatcher in self.dispatchers:
            dispatcher.give_up(reason)

    def _require_ranks(self, **lists: Sequence[Any]) -> None:
        for name, values in lists.items():
            if len(values) != self.world_size:
                raise InputError(f"expected {name} of {self.world_size} ranks, got {len(values)}")

    def close(self) -> None:
        """Drop all memory; a second call does nothing.

        Raises:
            CapacityError: rows were dropped past a static capacity that no call has reported yet.
        """
        errors = []
        for dispatcher, arena in zip(self.dispatchers, self._arenas, strict=True):
            dispatcher.close()
            try:
                arena.close()
            except SymmA2AError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> VirtualWorld:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self.close()
        except SymmA2AError:
            if kind is None:
                raise
