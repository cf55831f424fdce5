"""What kernels do to the memory that ranks share, seen while the interpreter runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from triton.runtime import interpreter

from symm_a2a.kernels.channel import EPOCH_SHIFT, Cell, Channel
from symm_a2a.lane import Lane

FORMS = ("KIND", "LAUNCHED", "PLACE", "COUNTS_TOO", "ARRIVE", "LEAVE", "HAS_COUNTS", "SPINS")
"""Constants of kernels by which they access the lane in one way or another."""

_COUNTERS = {int(cell) for cell in Cell if cell.name.startswith("DONE_")}
_JOINS = ("_expand_kernel", "_expand_again_kernel", "_expand_grad_kernel", "_finish_kernel")

Places = frozenset[tuple[int, int]]
"""`(rank, section)`: in whose memory, and which section there."""


class Access(NamedTuple):
    """Accesses of one kind by one program, with nothing of another kind between.

    Attributes:
        program: that did it.
        what: `"read"`, `"write"`, `"poll"`, `"acquire"` or `"release"`; or `"expects"`: the program compares
            the flags that it has read last with an epoch; or `"counts"`: itself among those that are done.
        region: of the lane, a flag or not.
        places: of the region.
        epoch: released or expected.
    """

    program: int
    what: str
    region: str = ""
    places: Places = frozenset()
    epoch: int = 0


Key = tuple[str, ...]
"""A kernel's name, and what `FORMS` it has."""


@dataclass
class KernelRun:
    """A kernel as it ran, once.

    Attributes:
        key: what it is.
        lane: the lane's place.
        epoch: of the exchange that it belongs to, in its direction.
        accesses: in the order of the interpreter.
    """

    key: Key
    lane: int
    epoch: int
    accesses: list[Access] = field(default_factory=list)


class Tracer:
    """Notes the kernels that lanes launch, and what those do in one lane of every rank.

    Args:
        launching: lanes of one rank, whose launches are noted.
        ranks: the lane of each rank, in rank order, in which accesses are noted; none for none.
    """

    def __init__(self, launching: Sequence[Lane], ranks: Sequence[Lane] = ()) -> None:
        self._launching = launching
        self._ranks = ranks
        self.runs: list[KernelRun] = []
        self._current: KernelRun | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note what is launched inside."""
        builder = interpreter.interpreter_builder
        load, store = builder.create_masked_load, builder.create_masked_store
        atomic, call = builder.create_atomic_rmw, interpreter.InterpretedFunction.__call__
        launch = Channel.launch

        def noted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
            self._touch("read", pointers, mask)
            return load(pointers, mask, *rest)

        def noted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._touch("write", pointers, mask)
            return store(pointers, value, mask, *rest)

        def noted_atomic(operation: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
            self._order(pointers, value, mask, sem.name.lower())
            return atomic(operation, pointers, value, mask, sem, scope)

        def noted_call(function: Any, *given: Any, **named: Any) -> Any:
            if function.__name__ in ("reached", "agreed"):
                epoch = getattr(given[1], "handle", given[1])
                self._add("expects", epoch=int(np.ravel(getattr(epoch, "data", epoch))[0]))
            return call(function, *given, **named)

        def noted_launch(channel: Channel, kernel: Any, *work: Any) -> Any:
            run = launch(channel, kernel, *work)

            def noted(*given: Any, **constants: Any) -> None:
                lane = next((lane for lane in self._launching if lane.channel is channel), None)
                if lane is not None:
                    name = kernel.fn.__name__
                    key = (name, *(f"{form}={constants[form]}" for form in FORMS if form in constants))
                    self.runs.append(KernelRun(key, lane.index, epoch_of(lane, name, constants)))
                    self._current = self.runs[-1]
                run(*given, **constants)
                self._current = None

            return noted

        with (
            mock.patch.object(builder, "create_masked_load", noted_load),
            mock.patch.object(builder, "create_masked_store", noted_store),
            mock.patch.object(builder, "create_atomic_rmw", noted_atomic),
            mock.patch.object(interpreter.InterpretedFunction, "__call__", noted_call),
            mock.patch.object(Channel, "launch", noted_launch),
        ):
            yield

    def _add(self, what: str, region: str = "", places: Places = frozenset(), epoch: int = 0) -> None:
        if self._current is None:
            return
        accesses = self._current.accesses
        new = Access(int(interpreter.interpreter_builder.grid_idx[0]), what, region, places, epoch)
        if accesses and accesses[-1]._replace(places=places) == new:
            accesses[-1] = new._replace(places=accesses[-1].places | places)
        else:
            accesses.append(new)

    def _touch(self, what: str, pointers: Any, mask: Any) -> None:
        for region, places, _ in self._find(pointers, mask):
            # Kernels read flags with atomics only; the plain way would be seen as a region without a step.
            self._add(what, region, places)

    def _order(self, pointers: Any, value: Any, mask: Any, sem: str) -> None:
        address = int(pointers.data.ravel()[0])
        for lane in self._ranks:
            state = lane.channel.state
            if (address - state.data_ptr()) / state.itemsize in _COUNTERS:
                assert sem == "acquire_release", sem
                self._add("counts")
        what = {"relaxed": "poll"}.get(sem, sem)
        for region, places, epoch in self._find(pointers, mask, value):
            self._add(what, region, places, epoch if what == "release" else 0)

    def _find(self, pointers: Any, mask: Any, value: Any = None) -> Iterator[tuple[str, Places, int]]:
        """Yield the region of what lies in the lane, the places, and the epoch of the words that go there."""
        chosen = np.broadcast_to(mask.data, pointers.data.shape)
        addresses = pointers.data[chosen].astype(np.int64)
        words = addresses * 0 if value is None else np.broadcast_to(value.data, chosen.shape)[chosen]
        for rank, lane in enumerate(self._ranks):
            start = lane.memory.arenas[rank].data_ptr() + lane.layout.lane_offset(lane.index)
            for name, region in lane.layout.regions.items():
                offsets = addresses - start - region.offset
                here = (offsets >= 0) & (offsets < region.nbytes)
                if here.any():
                    sections = np.unique(offsets[here] // (region.nbytes // region.shape[0]))
                    yield (
                        name,
                        frozenset((rank, int(s)) for s in sections),
                        int(words[here].max()) >> EPOCH_SHIFT,
                    )


def epoch_of(lane: Lane, name: str, constants: dict[str, Any]) -> int:
    """Return the epoch of the exchange that a kernel belongs to, about to be launched."""
    state = lane.channel.state
    if name == "_row_count_kernel":
        return int(state[Cell.COUNTED])
    gathers = name in ("_gather_kernel", "_finish_kernel")
    gathers |= constants.get("LAUNCHED") == Cell.GATHER_LAUNCHED
    joins = name in _JOINS or (name == "_barrier_kernel" and not constants["ARRIVE"])
    cells = {
        (False, False): Cell.SCATTER_LAUNCHED, (False, True): Cell.SCATTER_JOINED,
        (True, False): Cell.GATHER_LAUNCHED, (True, True): Cell.GATHER_JOINED,
    }  # fmt: skip
    return int(state[cells[gathers, joins]]) + 1
