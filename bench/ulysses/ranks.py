"""What the ranks do: every case with every backend, checked, and only then timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bench.a2av.backends import Cost
from bench.a2av.gate import Faults, same
from bench.a2av.timers import make_timer, measure
from bench.progress import Progress
from bench.ulysses.backends import BACKENDS, Backend
from bench.ulysses.cases import Case, Problem
from bench.ulysses.options import BackendName, Op, Options
from symm_a2a.errors import SymmA2AError


@dataclass(frozen=True)
class Work:
    """What every rank is told.

    Attributes:
        cases: the same on every rank.
        options: of the command.
        iterations: timed runs of each.
        warmup: runs before them.
        backends: by name, what makes each.
    """

    cases: list[Case]
    options: Options
    iterations: int
    warmup: int
    backends: dict[BackendName, Any] = field(default_factory=lambda: dict(BACKENDS))


@dataclass(frozen=True)
class RankReport:
    """What one rank found out about a case with a backend; of what is wrong nothing is timed.

    Attributes:
        case: the case.
        backend: its name.
        faults: of all ranks.
        seconds: of each timed run.
        cost: of one run; None where something is wrong.
    """

    case: Case
    backend: BackendName
    faults: list[str]
    seconds: list[float]
    cost: Cost | None


class Operation(Protocol):
    """Something to time, with the check of its result."""

    def before(self) -> Any: ...

    def run(self, state: Any) -> Any: ...

    def probe(self) -> Any: ...

    def check(self, result: Any) -> Faults: ...


class OneWay:
    """One exchange, without gradients."""

    def __init__(self, problem: Problem, backend: Backend) -> None:
        to_heads = problem.case.op == "seq-to-head"
        parts = problem.by_sequence(problem.x), problem.by_heads(problem.x)
        self._x, self._expected = parts if to_heads else parts[::-1]
        self._exchange = backend.seq_to_head if to_heads else backend.head_to_seq

    def before(self) -> None:
        return None

    @torch.no_grad()
    def run(self, state: Any) -> Tensor:
        del state
        return self._exchange(self._x)

    def probe(self) -> Tensor:
        return self.run(None)

    def check(self, result: Tensor) -> Faults:
        return same("result", result, self._expected)


class ForwardBackward:
    """To heads, back, and the backward of both; in the probe each element gets a factor on its way."""

    def __init__(self, problem: Problem, backend: Backend) -> None:
        self._problem, self._backend = problem, backend
        self._x = problem.by_sequence(problem.x).requires_grad_()
        self._grad = problem.by_sequence(problem.grad)

    def before(self) -> None:
        return None

    def run(self, state: Any, factor: Tensor | None = None) -> tuple[Tensor, Tensor, bool]:
        del state
        heads = self._backend.seq_to_head(self._x)
        out = self._backend.head_to_seq(heads if factor is None else heads * factor)
        (grad,) = torch.autograd.grad(out, self._x, self._grad)
        return out.detach(), grad, factor is not None

    def probe(self) -> tuple[Tensor, Tensor, bool]:
        return self.run(None, self._problem.by_heads(self._problem.factor))

    def check(self, result: tuple[Tensor, Tensor, bool]) -> Faults:
        out, grad, has_factor = result
        factor = self._problem.by_sequence(self._problem.factor) if has_factor else 1
        return [
            *same("result", out, self._x.detach() * factor),
            *same("gradient", grad, self._grad * factor),
        ]


OPERATIONS: dict[Op, Callable[[Problem, Backend], Operation]] = {
    "seq-to-head": OneWay,
    "head-to-seq": OneWay,
    "forward-backward": ForwardBackward,
}


def measure_rank(rank: int, group: dist.ProcessGroup, work: Work) -> list[RankReport]:
    """Be one rank: report on every case and backend, in order."""
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    reports = []
    with Progress("ulysses", len(work.cases) * len(work.options.backend), rank == 0, "case") as progress:
        for case in work.cases:
            problem = Problem(case, rank, device, work.options.seed)
            for name in work.options.backend:
                reports.append(_measure(name, problem, group, work))
                progress.advance(f"{case.title}, {name}")
    return reports


def _measure(name: BackendName, problem: Problem, group: dist.ProcessGroup, work: Work) -> RankReport:
    """Check and time one case with one backend; collective."""
    case = problem.case
    try:
        with work.backends[name](case, group) as backend:
            operation: Operation = OPERATIONS[case.op](problem, backend)
            faults: Faults = operation.check(operation.probe())
            results: list[Any] = []
            cost = backend.cost(lambda: results.append(operation.run(operation.before())))
            faults += operation.check(results[0])
            rows = case.batch * case.tokens * (4 if case.op == "forward-backward" else 1)
            if cost.rows_W != [rows] * case.ranks:
                faults.append(f"rows sent to each rank: expected {rows}, got {cost.rows_W}")
            faults = _everyones(faults, group)
            if faults:
                return RankReport(case, name, faults, [], None)
            seconds = measure(operation, make_timer(group, problem.device), work.warmup, work.iterations)
    except SymmA2AError as error:
        # Of a group that could not be made, or failed under way: on every rank then.
        return RankReport(case, name, [f"rank {problem.rank}: {error}"], [], None)
    return RankReport(case, name, [], seconds, cost)


def _everyones(faults: Faults, group: dist.ProcessGroup) -> Faults:
    """Return the faults of all ranks, on every rank: none of them times what is wrong on another."""
    gathered: list[Faults] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, faults, group=group)
    return [f"rank {rank}: {fault}" for rank, mine in enumerate(gathered) for fault in mine]
