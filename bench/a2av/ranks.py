"""What the ranks do: every case with every backend, checked, and only then timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.a2av.backends import Backend, Cost, open_backend
from bench.a2av.cases import Case
from bench.a2av.operations import Operation, make_operation
from bench.a2av.options import OPS, PLACED, ROUTED, BackendName, Options
from bench.a2av.problem import Problem, make_problem, share_out
from bench.a2av.routings import draw_ids
from bench.a2av.timers import Captured, make_timer, measure
from bench.dispatchers import DispatcherFactory, sharing_of
from bench.progress import Progress
from bench.trace import Trace
from symm_a2a.errors import SymmA2AError

GRAPHABLE = ("dispatch", "combine", "forward-backward", "even")
"""Operations that this library can run inside of a captured graph."""


@dataclass(frozen=True)
class Work:
    """What every rank is told.

    Attributes:
        cases: the same on every rank.
        options: of the command.
        iterations: timed runs of each.
        warmup: runs before them.
        trace: of the options' file.
        factories: of the dispatchers.
    """

    cases: list[Case]
    options: Options
    iterations: int
    warmup: int
    trace: Trace | None
    factories: Mapping[str, DispatcherFactory]


@dataclass(frozen=True)
class RankReport:
    """What one rank found out about a case with a backend.

    Attributes:
        case: the case.
        backend: the backend's name.
        graph: whether a captured graph was timed.
        faults: what is wrong, of all ranks; then nothing was timed.
        seconds: of each timed run.
        cost: of one run; None where something is wrong.
        expert_rows: rows that this rank's experts get; None for an operation without experts.
    """

    case: Case
    backend: BackendName
    graph: bool
    faults: list[str]
    seconds: list[float]
    cost: Cost | None
    expert_rows: int | None = None


def measure_rank(rank: int, group: dist.ProcessGroup, work: Work) -> list[RankReport]:
    """Be one rank: report on every case and backend, in order."""
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    options, reports = work.options, []
    steps = sum(runs(name, case) for case in work.cases for name in options.backend)
    with Progress("a2av", steps, rank == 0, "case") as progress:
        for case in work.cases:
            ids_WTK = draw_ids(case, options.seed, work.trace, options.trace_step, options.trace_layer)
            problem = make_problem(case, rank, device, ids_WTK, options.seed)
            for name in options.backend:
                if not runs(name, case):
                    continue
                shared = share_out(problem, sharing_of(name), options.seed)
                reports.append(_measure(name, shared, group, work))
                progress.advance(f"{case.title}, {name}")
    return reports


def runs(name: BackendName, case: Case) -> bool:
    """Return whether a backend has a case: its operation, and a use for its placement."""
    return case.op in OPS[name] and (case.placement == "contiguous" or name in PLACED)


def _measure(name: BackendName, problem: Problem, group: dist.ProcessGroup, work: Work) -> RankReport:
    """Check and time one case with one backend; collective."""
    case = problem.case
    graph = work.options.graph and name == "symm" and case.op in GRAPHABLE
    try:
        with open_backend(name, problem, group, work.factories) as backend:
            operation, cost, faults = _check(problem, backend, group, graph)
            if faults:
                return RankReport(case, name, graph, faults, [], None)
            seconds = measure(operation, make_timer(group, problem.device), work.warmup, work.iterations)
    except SymmA2AError as error:
        # Of a dispatcher that could not be made, or failed under way: on every rank then.
        return RankReport(case, name, graph, [f"rank {problem.rank}: {error}"], [], None)
    expert_rows = len(problem.rows.origin) if case.op in ROUTED else None
    return RankReport(case, name, graph, [], seconds, cost, expert_rows)


def _check(
    problem: Problem, backend: Backend, group: dist.ProcessGroup, graph: bool
) -> tuple[Operation, Cost | None, list[str]]:
    """Return the operation to time, what one run of it takes, and the faults of all ranks."""
    operation, cost = make_operation(backend), None
    try:
        if problem.device.type == "cuda":
            backend.dispatcher.warmup()
        faults = operation.check(operation.probe())
        cost, wrong = _cost(problem, backend, operation)
        faults += wrong
    except SymmA2AError as error:
        faults = [f"{type(error).__name__}: {error}"]
        # The peers may be waiting for this rank: they end at once.
        backend.dispatcher.__exit__(type(error), error, None)
    everyones = _everyones(faults, group)
    if graph and not everyones:
        operation = Captured(operation)
        everyones = _everyones(operation.check(operation.probe()), group)
    return operation, cost, everyones


def _cost(problem: Problem, backend: Backend, operation: Operation) -> tuple[Cost, list[str]]:
    """Run the operation as it will be timed; return what it takes, and what is wrong with what it gives."""
    state, results = operation.before(), []
    cost = backend.cost(problem.case.op, lambda: results.append(operation.run(state)))
    faults = [] if problem.case.op == "flags" else operation.check(results[0])
    expected = backend.expected_rows(problem.case.op).tolist()
    if cost.rows_W != expected:
        faults.append(f"rows sent to each rank: expected {expected}, got {cost.rows_W}")
    return cost, faults


def _everyones(faults: list[str], group: dist.ProcessGroup) -> list[str]:
    """Return the faults of all ranks, on every rank: none of them times what is wrong on another."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, faults, group=group)
    return [f"rank {rank}: {fault}" for rank, mine in enumerate(gathered) for fault in mine]
