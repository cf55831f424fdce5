"""What is compared: this library's dispatcher, and collectives, each with all the operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import symm_a2a
from bench.a2av.cases import Case
from bench.a2av.options import BackendName, Op
from bench.a2av.problem import Problem
from bench.dispatchers import DispatcherFactory
from symm_a2a.testing import OpGuard


@dataclass(frozen=True)
class Cost:
    """What one run of an operation took on one rank, besides time.

    What a collective itself sends besides its data is not known, and not in here.

    Attributes:
        launches: kernels: Triton's, ATen operators that compute, and collectives.
        host_syncs: times the host waited for the device.
        rows_W: rows sent to each rank, this one included: copies, or slots.
        payload_bytes_W: of these rows.
        metadata_bytes_W: of everything else that was sent.
        symmetric_bytes: symmetric memory of this rank.
    """

    launches: int
    host_syncs: int
    rows_W: list[int]
    payload_bytes_W: list[int]
    metadata_bytes_W: list[int]
    symmetric_bytes: int


class Backend(Protocol):
    """One way to run the operations.

    Attributes:
        dispatcher: with `dispatch` and `combine`.
        group: of the ranks.
        capacity: rows that every dispatch gives, or None for as many as arrive.
        roundings: to the row dtype, at most, on the way to a combined row.
    """

    dispatcher: Any
    group: dist.ProcessGroup
    capacity: int | None
    roundings: int

    def counts(self) -> Tensor:
        """Return `(W, E)`, every rank's slots of every expert."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def even(self) -> Tensor:
        """Send an equal part of `x` to every rank; return what comes, in rank order."""
        ...

    def expected_rows(self, op: Op) -> Tensor:
        """Return int64 `(W,)`, the rows that an operation is to send to each rank."""
        ...

    def cost(self, op: Op, run: Callable[[], object]) -> Cost:
        """Run an operation once and return what it took."""
        ...

    def __enter__(self) -> Backend: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Base:
    """What the backends share.

    Args:
        problem: of the case.
        group: of the ranks.
        factory: of the dispatcher.
        capacity: of the dispatcher, or None for as many rows as arrive.
    """

    roundings: int

    def __init__(
        self, problem: Problem, group: dist.ProcessGroup, factory: DispatcherFactory, capacity: int | None
    ) -> None:
        self.problem, self.group, self.capacity = problem, group, capacity
        config = problem.case.config("exact" if capacity is None else capacity)
        self.dispatcher = factory(config, group, device=problem.device)

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dispatcher.__exit__(kind, error, trace)

    def _rows(self, op: Op, rows_WW: Tensor) -> Tensor:
        """Return the rows to each rank, given those of a dispatch from each rank to each."""
        there, back = rows_WW[self.problem.rank], rows_WW[:, self.problem.rank]
        kinds = {
            "dispatch": there,
            "even": there,
            "combine": back,
            "forward-backward": 2 * (there + back),
        }
        return kinds.get(op, torch.zeros_like(there))


class SymmBackend(_Base):
    """This library."""

    # A partial sum at each rank, the sum of them; and the product with a gradient, in a backward.
    roundings = 4

    def counts(self) -> Tensor:
        return self.dispatcher.broadcast_counts(self.problem.ids_TK)

    def barrier(self) -> None:
        self.dispatcher.barrier()

    def even(self) -> Tensor:
        problem = self.problem
        return self.dispatcher.dispatch(problem.x_TD, problem.scores_TK, problem.ids_TK)[0]

    def expected_rows(self, op: Op) -> Tensor:
        return self._rows(op, self.problem.copies_WW)

    def cost(self, op: Op, run: Callable[[], object]) -> Cost:
        before: symm_a2a.Stats = self.dispatcher.stats()
        with OpGuard(allow_syncs=True) as guard:
            run()
        stats: symm_a2a.Stats = self.dispatcher.stats()
        used = stats - before
        rows_W = [sum(peer) for peer in zip(*used.copies.values(), strict=True)]
        return Cost(
            launches=used.launches + guard.compute_ops.total(),
            host_syncs=used.host_syncs,
            rows_W=rows_W,
            payload_bytes_W=used.payload_bytes_W,
            metadata_bytes_W=used.metadata_bytes_W,
            symmetric_bytes=stats.symmetric_bytes,
        )


COLLECTIVES: dict[Op, int] = {
    "dispatch": 2,
    "combine": 1,
    "forward-backward": 5,
    "counts": 1,
    "flags": 1,
    "even": 1,
}
"""Of the standard all-to-all, in each operation."""


class AllToAllBackend(_Base):
    """Collectives of the group's backend; what they send follows from the routing."""

    def __init__(
        self, problem: Problem, group: dist.ProcessGroup, factory: DispatcherFactory, capacity: int | None
    ) -> None:
        del capacity
        super().__init__(problem, group, factory, None)
        # Each product and each addition, and the product with a gradient, in a backward.
        self.roundings = 3 + problem.case.top_k

    def counts(self) -> Tensor:
        case = self.problem.case
        ids_N = self.problem.ids_TK.flatten() + 1
        # Not bincount, for which the host would wait. The first count is that of masked slots.
        mine_E = ids_N.new_zeros(case.experts + 1, dtype=torch.int32)
        mine_E.scatter_add_(0, ids_N, torch.ones_like(ids_N, dtype=torch.int32))
        counts_E = mine_E[1:]
        counts_WE = counts_E.new_empty(case.ranks, case.experts)
        dist.all_to_all_single(counts_WE, counts_E.expand_as(counts_WE).contiguous(), group=self.group)
        return counts_WE

    def barrier(self) -> None:
        device = self.problem.device
        dist.barrier(self.group, device_ids=[device.index] if device.type == "cuda" else None)

    def even(self) -> Tensor:
        out = torch.empty_like(self.problem.x_TD)
        dist.all_to_all_single(out, self.problem.x_TD, group=self.group)
        return out

    def expected_rows(self, op: Op) -> Tensor:
        return self._rows(op, self.problem.slots_WW)

    def cost(self, op: Op, run: Callable[[], object]) -> Cost:
        case = self.problem.case
        with OpGuard(allow_syncs=True) as guard:
            run()
        rows_W = self.expected_rows(op)
        # int64 of each local expert at the head of a dispatch; a count broadcast has int32 of all.
        sizes = {"dispatch": 8 * case.num_local, "counts": 4 * case.experts}
        metadata = sizes.get("dispatch" if op == "forward-backward" else op, 0)
        return Cost(
            launches=guard.compute_ops.total() + COLLECTIVES[op],
            host_syncs=len(guard.host_syncs),
            rows_W=rows_W.tolist(),
            payload_bytes_W=(rows_W * case.row_bytes).tolist(),
            metadata_bytes_W=[metadata] * case.ranks,
            symmetric_bytes=0,
        )


BACKENDS: dict[BackendName, type[SymmBackend] | type[AllToAllBackend]] = {
    "symm": SymmBackend,
    "all_to_all": AllToAllBackend,
}


def open_backend(
    name: BackendName,
    problem: Problem,
    group: dist.ProcessGroup,
    factories: Mapping[str, DispatcherFactory],
) -> Backend:
    """Return a backend for a problem, a context manager; collective."""
    case: Case = problem.case
    capacity = problem.most_rows if case.capacity == "static" else None
    return BACKENDS[name](problem, group, factories[name], capacity)
