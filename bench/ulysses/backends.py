"""What is compared: this library's exchanges, and a collective between permutations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import symm_a2a
from bench.a2av.backends import Cost
from bench.ulysses.cases import Case
from bench.ulysses.options import BackendName
from symm_a2a.kernels import channel
from symm_a2a.kernels.ulysses import CARD_WORDS, Cell
from symm_a2a.testing import OpGuard

METADATA_BYTES = 8 * (1 + CARD_WORDS)
"""That an exchange sends to each peer besides rows: a ready word and a card."""


class Backend(AbstractContextManager["Backend"], Protocol):
    """One way to run both exchanges."""

    def seq_to_head(self, x: Tensor) -> Tensor: ...

    def head_to_seq(self, x: Tensor) -> Tensor: ...

    def cost(self, run: Callable[[], Any]) -> Cost:
        """Run something, and return what it took besides time, as far as it was counted."""
        ...


class Symm:
    """This library.

    Args:
        case: its sizes are the group's.
        group: of the ranks.
    """

    def __init__(self, case: Case, group: dist.ProcessGroup) -> None:
        self._case = case
        self._group = symm_a2a.SequenceGroup(group, max_bytes=case.nbytes)

    def seq_to_head(self, x: Tensor) -> Tensor:
        return symm_a2a.seq_to_head(x, self._group)

    def head_to_seq(self, x: Tensor) -> Tensor:
        return symm_a2a.head_to_seq(x, self._group)

    def cost(self, run: Callable[[], Any]) -> Cost:
        """Count what the kernels have counted: the rows that they sent, and how often they ran."""
        rows_W, exchanges = self._counted()
        with OpGuard(allow_syncs=True) as guard:
            run()
        now_W, epoch = self._counted()
        sent_W = (now_W - rows_W).tolist()
        row_bytes = self._case.heads // self._case.ranks * self._case.dim * self._case.element.itemsize
        return Cost(
            launches=guard.launches.total() + guard.compute_ops.total(),
            host_syncs=len(guard.host_syncs),
            rows_W=sent_W,
            payload_bytes_W=[rows * row_bytes for rows in sent_W],
            metadata_bytes_W=[(epoch - exchanges) * METADATA_BYTES] * self._case.ranks,
            symmetric_bytes=self._group.allocated_bytes,
        )

    def _counted(self) -> tuple[Tensor, int]:
        """Return the rows sent to each rank so far, and the number of exchanges."""
        if self._group.world_size == 1:
            return torch.zeros(1, dtype=torch.int64), 0
        state = self._group.state.cpu()
        rows_W = state[channel.Cell.COPIES :].view(-1, self._case.ranks).sum(0)
        return rows_W, int(state[Cell.EPOCH])

    def __enter__(self) -> Symm:
        return self

    def __exit__(self, *error: Any) -> None:
        self._group.__exit__(*error)


class AllToAll:
    """Permute, all_to_all_single, permute.

    Args:
        case: of the exchange.
        group: of the ranks.
    """

    def __init__(self, case: Case, group: dist.ProcessGroup) -> None:
        self._case = case
        self.group = group
        self.calls = 0
        self.sent_bytes = 0

    def seq_to_head(self, x: Tensor) -> Tensor:
        return _SeqToHead.apply(x, self)

    def head_to_seq(self, x: Tensor) -> Tensor:
        return _HeadToSeq.apply(x, self)

    def all_to_all(self, sent: Tensor) -> Tensor:
        """Exchange the parts of the first dimension, and count them."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        self.calls += 1
        self.sent_bytes += sent.nbytes
        return received

    def cost(self, run: Callable[[], Any]) -> Cost:
        """Count what is given to the collective; what it sends itself besides that is not known."""
        self.calls = self.sent_bytes = 0
        with OpGuard(allow_syncs=True) as guard:
            run()
        W, rows = self._case.ranks, self._case.batch * self._case.tokens
        return Cost(
            launches=guard.compute_ops.total() + self.calls,
            host_syncs=len(guard.host_syncs),
            rows_W=[rows * self.calls] * W,
            payload_bytes_W=[self.sent_bytes // W] * W,
            metadata_bytes_W=[0] * W,
            symmetric_bytes=0,
        )

    def __enter__(self) -> AllToAll:
        return self

    def __exit__(self, *error: Any) -> None:
        del error


class _SeqToHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: AllToAll) -> Tensor:
        ctx.backend, W = backend, dist.get_world_size(backend.group)
        b, s, h, d = x.shape
        received = backend.all_to_all(x.view(b, s, W, h // W, d).permute(2, 0, 1, 3, 4).contiguous())
        return received.transpose(0, 1).reshape(b, W * s, h // W, d)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _HeadToSeq.apply(grad.contiguous(), ctx.backend), None


class _HeadToSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: AllToAll) -> Tensor:
        ctx.backend, W = backend, dist.get_world_size(backend.group)
        b, S, H, d = x.shape
        received = backend.all_to_all(x.view(b, W, S // W, H, d).transpose(0, 1).contiguous())
        return received.permute(1, 2, 0, 3, 4).reshape(b, S // W, W * H, d)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _SeqToHead.apply(grad.contiguous(), ctx.backend), None


BACKENDS: dict[BackendName, Callable[[Case, dist.ProcessGroup], Backend]] = {
    "symm": Symm,
    "all_to_all": AllToAll,
}
