"""A dispatcher that counts what it sends and how long it takes, forward and backward."""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.train.in_turn import Synchronous
from symm_a2a import Handle


class Stopwatch:
    """Adds up the time between `start` and `stop`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def start(self) -> None:
        self.seconds -= time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter()


class _StartInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, watch: Stopwatch) -> torch.Tensor:
        ctx.watch = watch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.watch.start()
        return grads[0], None


class _StopInBackward(_StartInBackward):
    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.watch.stop()
        return grads[0], None


class MeteredDispatcher(Synchronous):
    """Passes calls on to a dispatcher, exchanges without an overlap, and keeps count.

    The backward of an exchange is what autograd runs between the node after it and the node before it:
    autograd takes the nodes of one thread in the reverse of their order, so nothing else is in there.
    Waiting for the peers counts, as it does for a trainer.

    Args:
        dispatcher: `SymmTokenDispatcher` or a baseline.

    Attributes:
        sent_W: int64, rows that dispatches sent to each rank so far, itself included.
        watch: time in exchanges so far.
    """

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher
        self.sent_W = torch.zeros(dispatcher.world_size, dtype=torch.int64)
        self.watch = Stopwatch()

    def dispatch(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """As the dispatcher's."""
        x_TD = _StopInBackward.apply(x_TD, self.watch)
        self.watch.start()
        rows_RD, tokens_per_expert_L, handle = self._dispatcher.dispatch(x_TD, scores_TK, ids_TK)
        self.watch.stop()
        self.sent_W += handle.copies_sent_W if isinstance(handle, Handle) else torch.tensor(handle.sent)
        return _StartInBackward.apply(rows_RD, self.watch), tokens_per_expert_L, handle

    def combine(self, y_RD: torch.Tensor, handle: Any) -> torch.Tensor:
        """As the dispatcher's."""
        y_RD = _StopInBackward.apply(y_RD, self.watch)
        self.watch.start()
        out_TD = self._dispatcher.combine(y_RD, handle)
        self.watch.stop()
        return _StartInBackward.apply(out_TD, self.watch)
