"""What is compared: this library's dispatcher, and collectives, each with all the operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from symm_a2a.baselines.all_gather import all_gather
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
        problem: what it runs on.
        dispatcher: with `dispatch` and `combine`.
        group: of the ranks.
        capacity: rows that every dispatch gives, or None for as many as arrive.
        roundings: to the row dtype, at most, on the way to a combined row.
    """

    problem: Problem
    dispatcher: Any
    group: dist.ProcessGroup
    capacity: int | None

    @property
    def roundings(self) -> int: ...

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
        problem: of the case, with the tokens and experts that a rank has with this backend.
        group: of the ranks.
        factory: of the dispatcher.
        capacity: of the dispatcher, or None for as many rows as arrive.
    """

    def __init__(
        self, problem: Problem, group: dist.ProcessGroup, factory: DispatcherFactory, capacity: int | None
    ) -> None:
        self.problem, self.group, self.capacity = problem, group, capacity
        config = problem.case.config("exact" if capacity is None else capacity, problem.placement)
        config = replace(config, max_tokens_per_rank=len(problem.x_TD))
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


class _Collectives(_Base):
    """Collectives of the group's backend; what they send follows from the routing."""

    collectives: dict[Op, int]
    """How many, in each operation."""

    def __init__(
        self, problem: Problem, group: dist.ProcessGroup, factory: DispatcherFactory, capacity: int | None
    ) -> None:
        del capacity
        super().__init__(problem, group, factory, None)

    def counts(self) -> Tensor:
        raise NotImplementedError

    def barrier(self) -> None:
        raise NotImplementedError

    def even(self) -> Tensor:
        raise NotImplementedError

    def expected_rows(self, op: Op) -> Tensor:
        raise NotImplementedError

    def metadata(self, op: Op) -> int:
        """Return the bytes that go to each rank beside the rows."""
        raise NotImplementedError

    def cost(self, op: Op, run: Callable[[], object]) -> Cost:
        with OpGuard(allow_syncs=True) as guard:
            run()
        case, rows_W = self.problem.case, self.expected_rows(op)
        return Cost(
            launches=guard.compute_ops.total() + self.collectives.get(op, 0),
            host_syncs=len(guard.host_syncs),
            rows_W=rows_W.tolist(),
            payload_bytes_W=(rows_W * case.row_bytes).tolist(),
            metadata_bytes_W=[self.metadata(op)] * case.ranks,
            symmetric_bytes=0,
        )

    def _my_counts(self) -> Tensor:
        """Return int32 `(E,)`, this rank's slots of every expert."""
        ids_N = self.problem.ids_TK.flatten() + 1
        # Not bincount, for which the host would wait. The first count is that of masked slots.
        mine_E = ids_N.new_zeros(self.problem.case.experts + 1, dtype=torch.int32)
        mine_E.scatter_add_(0, ids_N, torch.ones_like(ids_N, dtype=torch.int32))
        return mine_E[1:]


class AllToAllBackend(_Collectives):
    """The standard all-to-all: of counts and rows in a dispatch, of rows in a combine and each backward."""

    collectives: dict[Op, int] = {  # noqa: RUF012
        "dispatch": 2, "combine": 1, "forward-backward": 5, "counts": 1, "flags": 1, "even": 1,
    }  # fmt: skip

    @property
    def roundings(self) -> int:
        # Each product and each addition, and the product with a gradient, in a backward.
        return 3 + self.problem.case.top_k

    def counts(self) -> Tensor:
        counts_E = self._my_counts()
        counts_WE = counts_E.new_empty(self.problem.case.ranks, len(counts_E))
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

    def metadata(self, op: Op) -> int:
        # int64 of each place of a rank at the head of a dispatch; a count broadcast has int32 of all.
        case, placement = self.problem.case, self.problem.placement
        places = case.experts // case.ranks if placement is None else placement.num_local_experts
        sizes: dict[Op, int] = {"dispatch": 8 * places, "counts": 4 * case.experts}
        return sizes.get("dispatch" if op == "forward-backward" else op, 0)


class LocalBackend(AllToAllBackend):
    """A group of one: the ranks have nothing to do with each other, and send nothing."""

    collectives: dict[Op, int] = {}  # noqa: RUF012

    def metadata(self, op: Op) -> int:
        del op
        return 0


class AllGatherBackend(_Collectives):
    """All-gather and reduce-scatter of all T tokens of a rank: both bring T rows from each rank to each.

    No algorithm sends fewer, but for a switch that adds up or copies on the way.
    """

    collectives: dict[Op, int] = {  # noqa: RUF012
        "dispatch": 2, "combine": 1, "forward-backward": 6, "counts": 1,
    }  # fmt: skip

    @property
    def roundings(self) -> int:
        # A part for each rank and their sum, and in a backward the product, and a sum over the slots of each.
        return 1 + self.problem.case.ranks + self.problem.case.top_k

    def counts(self) -> Tensor:
        return all_gather(self._my_counts()[None], self.group)

    def expected_rows(self, op: Op) -> Tensor:
        case = self.problem.case
        times: dict[Op, int] = {"dispatch": 1, "combine": 1, "forward-backward": 4}
        return torch.full((case.ranks,), times.get(op, 0) * case.tokens)

    def metadata(self, op: Op) -> int:
        # An int32 id and an fp32 score for each slot; in the backward the score's gradient.
        case = self.problem.case
        slots = case.tokens * case.top_k
        sizes: dict[Op, int] = {
            "dispatch": 8 * slots, "forward-backward": 12 * slots, "counts": 4 * case.experts,
        }  # fmt: skip
        return sizes.get(op, 0)


class ReplicatedBackend(_Collectives):
    """All-reduce of all W * T tokens: a reduce-scatter and an all-gather of T rows from each rank to each.

    No algorithm sends fewer, but for a switch that adds up or copies on the way.
    """

    collectives: dict[Op, int] = {"combine": 1, "forward-backward": 3}  # noqa: RUF012

    roundings = AllGatherBackend.roundings

    def expected_rows(self, op: Op) -> Tensor:
        case = self.problem.case
        times: dict[Op, int] = {"combine": 2, "forward-backward": 4}
        return torch.full((case.ranks,), times.get(op, 0) * case.tokens)

    def metadata(self, op: Op) -> int:
        # The fp32 gradient of each slot's score.
        case = self.problem.case
        return 8 * case.tokens * case.top_k if op == "forward-backward" else 0


BACKENDS: dict[BackendName, Callable[..., Backend]] = {
    "symm": SymmBackend,
    "all_to_all": AllToAllBackend,
    "all_gather": AllGatherBackend,
    "replicated": ReplicatedBackend,
    "local": LocalBackend,
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
