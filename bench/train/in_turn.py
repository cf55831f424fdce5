"""Micro-batches one after another, with synchronous exchanges, for a model that yields them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any


class Done:
    """An exchange that has ended where it began, in the form that a block yields."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def join(self) -> Any:
        """Return the result."""
        return self._result


class Synchronous:
    """Adds to `dispatch` and `combine` the methods that a block calls."""

    dispatch: Callable[..., Any]
    combine: Callable[..., Any]

    def dispatch_async(self, *arguments: Any) -> Done:
        """Run `dispatch`."""
        return Done(self.dispatch(*arguments))

    def combine_async(self, *arguments: Any) -> Done:
        """Run `combine`."""
        return Done(self.combine(*arguments))


def run_in_turn(block: Callable[..., Generator[Any, Any, Any]], micro_batches: Sequence[Any]) -> list[Any]:
    """Run a generator over each micro-batch, and join at once what it yields; see `symm_a2a.Domino.run`.

    Example:
        >>> def block(x):
        ...     doubled = yield Done(2 * x)
        ...     return doubled + 1
        >>> run_in_turn(block, [3, 5])
        [7, 11]
    """
    return [_run(block(micro_batch)) for micro_batch in micro_batches]


def _run(steps: Generator[Any, Any, Any]) -> Any:
    result = None
    while True:
        try:
            pending = steps.send(result)
        except StopIteration as stop:
            return stop.value
        result = pending.join()
