"""The schedule: launch until something must be joined, first in, first out.

Two micro-batches in two lanes, A what comes before a dispatch, E the experts, P what follows:

    A0 LD0 A1 LD1 | JD0 E0 LC0 | JD1 E1 LC1 | JC0 P0 A0' LD0' | JC1 P1 A1' LD1' ...

Each join comes one stretch of the other micro-batch's compute after its launch, across layers too.
Autograd runs the nodes in reverse, so that the same holds in the backward. The order depends on the
number of exchanges of each micro-batch alone and is therefore the same on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.checkpoint import _StopRecomputationError

from symm_a2a.domino.modes import changed, modes
from symm_a2a.domino.stages import Stages, run_stages
from symm_a2a.domino.tied import tie_outputs
from symm_a2a.errors import InputError, LaneBusyError, ScheduleError


class Dispatcher(Protocol):
    """What the schedule needs of a dispatcher, or of a virtual world."""

    @property
    def num_lanes(self) -> int:
        """Exchanges that can be in flight at once."""
        ...

    def in_lane(self, lane: int) -> AbstractContextManager[None]:
        """Let exchanges inside take this lane."""
        ...

    def require_idle(self, lane: int | None = None) -> None:
        """Raise where an exchange is in flight in a lane, or in any, or none can run."""
        ...

    def give_up(self, reason: str) -> None:
        """Take no further part, and let the other ranks know."""
        ...


@dataclass
class _MicroBatch:
    index: int
    lane: int
    steps: Generator[Any, Any, Any]
    pending: Any = None


class Domino:
    """Runs micro-batches through a model so that their exchanges hide under one another's compute.

    Every rank has the same number of micro-batches, and in each as many exchanges as the other ranks
    have in theirs; tokens may differ, and be none. There may be more micro-batches than lanes: the next
    one starts where one ends. With one lane nothing overlaps.

    Args:
        dispatcher: `SymmTokenDispatcher`, `VirtualWorld`, or a baseline, whose exchanges end where they
            begin. Dispatchers that share its arena may be used in the model as well.
        num_micro_batches: M; one is the model as it is.

    Raises:
        InputError: a number that is none.

    Example:
        >>> import torch
        >>> import symm_a2a
        >>> cfg = symm_a2a.EPConfig(
        ...     num_experts=2, top_k=1, hidden_dim=1, max_tokens_per_rank=4, dtype=torch.float32
        ... )
        >>> dispatcher = symm_a2a.SymmTokenDispatcher(cfg, device="cpu")
        >>> def layer(x):
        ...     scores, ids = torch.ones(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int64)
        ...     rows, counts, handle = yield dispatcher.dispatch_async(x, scores, ids)
        ...     return x + (yield dispatcher.combine_async(rows * 10, handle))
        >>> [y.tolist() for y in Domino(dispatcher).run(layer, [torch.ones(2, 1), torch.zeros(1, 1)])]
        [[[11.0], [11.0]], [[0.0]]]
    """

    def __init__(self, dispatcher: Dispatcher, num_micro_batches: int = 2) -> None:
        M = num_micro_batches
        if isinstance(M, bool) or not isinstance(M, int) or M < 1:
            raise InputError(f"expected num_micro_batches to be a positive int, got {M!r}")
        self.dispatcher = dispatcher
        self.num_micro_batches = M

    def run(self, block: Callable[..., Generator[Any, Any, Any]], micro_batches: Iterable[Any]) -> list[Any]:
        """Run a generator over each micro-batch, interleaved.

        The generator yields what `dispatch_async` and `combine_async` return, without naming a lane, and
        is resumed with what its `join` gives; `yield from` goes through layers. What runs between a
        launch and its yield overlaps with the exchange as well.

        Whatever is raised once micro-batches run, the other generators are closed and the peers raise at
        once; the dispatcher can only be closed then.

        Args:
            block: makes the generator; called with a micro-batch, or with its elements if that is a tuple.
            micro_batches: M of them.

        Returns:
            What each generator returned, in the micro-batches' order. Tensors in it (also in tuples,
            lists and dicts) that require a gradient leave through one node, so that one backward reaches
            all of them: a gradient that is missing for some counts as zeros.

        Raises:
            InputError: another number of micro-batches than M.
            ScheduleError: a generator yields something else than its pending exchange, holds a mode such as
                `torch.no_grad` open across a yield, or ends with an exchange in flight.
            LaneBusyError: it launches twice before it yields; or a lane was in flight before.
            ExchangeError: a peer did not take part.
        """
        micro_batches = list(micro_batches)
        if len(micro_batches) != self.num_micro_batches:
            raise InputError(
                f"expected {self.num_micro_batches} micro-batches, got {len(micro_batches)}; every rank has "
                "that many, empty ones too"
            )
        self.dispatcher.require_idle()
        started: list[_MicroBatch] = []
        try:
            return tie_outputs(self._run(block, micro_batches, started))
        except _StopRecomputationError:
            # A checkpoint has all it wanted, behind the last join; nothing has failed.
            _close(started)
            raise
        except BaseException as error:
            self.dispatcher.give_up(f"a micro-batch has failed before: {type(error).__name__}: {error}")
            _close(started)
            raise

    def run_layers(self, layers: Stages | Sequence[Stages], micro_batches: Iterable[Any]) -> list[Any]:
        """Run layers given as plain functions over each micro-batch, interleaved; see `run`.

        Args:
            layers: one or more; the output of each is the input of the next.
            micro_batches: M inputs of the first layer.
        """
        layers = [layers] if isinstance(layers, Stages) else list(layers)
        for layer in layers:
            if not isinstance(layer, Stages):
                raise InputError(f"expected layers to be Stages, got {type(layer).__name__}")
        return self.run(lambda *x: run_stages(self.dispatcher, layers, *x), [(x,) for x in micro_batches])

    def _run(self, block: Callable[..., Any], inputs: Sequence[Any], started: list[_MicroBatch]) -> list[Any]:
        outputs: list[Any] = [None] * len(inputs)
        waiting = deque(enumerate(inputs))
        lanes = deque(range(self.dispatcher.num_lanes))
        flying: deque[_MicroBatch] = deque()
        while waiting or flying:
            if waiting and lanes:
                index, given = waiting.popleft()
                batch, result = _start(block, given, index, lanes.popleft()), None
                started.append(batch)
            else:
                batch = flying.popleft()
                result = batch.pending.join()
            try:
                batch.pending = self._resume(batch, result)
            except StopIteration as stop:
                outputs[batch.index] = stop.value
                lanes.append(batch.lane)
            else:
                flying.append(batch)
        return outputs

    def _resume(self, batch: _MicroBatch, result: Any) -> Any:
        """Run a micro-batch to its next yield, and return what it has launched.

        Raises:
            StopIteration: with what the generator returned.
        """
        before = modes()
        try:
            with self.dispatcher.in_lane(batch.lane):
                pending = batch.steps.send(result)
        except StopIteration:
            _require_same(before, batch, "its end")
            self._require_joined(batch)
            raise
        _require_same(before, batch, "a yield")
        if not (hasattr(pending, "join") and hasattr(pending, "lane")):
            raise ScheduleError(
                f"expected micro-batch {batch.index} to yield what dispatch_async or combine_async returns, "
                f"got {type(pending).__name__}"
            )
        if pending.lane not in (None, batch.lane):
            raise ScheduleError(
                f"expected micro-batch {batch.index} to launch in its own lane, {batch.lane}, got a launch "
                f"in lane {pending.lane}; name no lane in a block"
            )
        return pending

    def _require_joined(self, batch: _MicroBatch) -> None:
        try:
            self.dispatcher.require_idle(batch.lane)
        except LaneBusyError as error:
            raise ScheduleError(
                f"expected micro-batch {batch.index} to yield every exchange that it launches, got its end "
                f"with one in flight in lane {batch.lane}"
            ) from error


def _start(block: Callable[..., Any], given: Any, index: int, lane: int) -> _MicroBatch:
    before = modes()
    steps = block(*given) if isinstance(given, tuple) else block(given)
    if not isinstance(steps, Generator):
        raise InputError(
            f"expected the block to be a generator (it yields its exchanges), got one that returned "
            f"{type(steps).__name__}"
        )
    batch = _MicroBatch(index, lane, steps)
    _require_same(before, batch, "its start")
    return batch


def _require_same(before: dict[str, Any], batch: _MicroBatch, where: str) -> None:
    held = changed(before, modes())
    if held:
        raise ScheduleError(
            f"expected micro-batch {batch.index} to leave every mode before {where}, got "
            f"{', '.join(held)} held open, which would reach the other micro-batches; close it, and open it "
            "again after the yield"
        )


def _close(started: list[_MicroBatch]) -> None:
    """Close the generators, the last started first; what their clean-up raises would hide the reason."""
    for batch in reversed(started):
        with suppress(Exception):
            batch.steps.close()
