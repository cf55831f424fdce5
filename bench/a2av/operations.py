"""The operations that are timed, each with the check of its own result."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from bench.a2av.backends import Backend
from bench.a2av.gate import Faults, near, rounding, same
from bench.a2av.options import Op
from bench.a2av.problem import Problem


class Operation(Protocol):
    """Something to time."""

    def before(self) -> Any:
        """Do what is not timed; the result goes to `run`."""
        ...

    def run(self, state: Any) -> Any:
        """Do what is timed."""
        ...

    def probe(self) -> Any:
        """Run once in the way that `check` sees most."""
        ...

    def check(self, result: Any) -> Faults:
        """Say what is wrong with a result of `run` or `probe`; collective."""
        ...


class _Operation:
    """Runs as it is, after nothing.

    Args:
        problem: the inputs, and what is to come out.
        backend: runs it.
    """

    def __init__(self, problem: Problem, backend: Backend) -> None:
        self.problem, self.backend = problem, backend

    def before(self) -> Any:
        return None

    def run(self, state: Any) -> Any:
        raise NotImplementedError

    def probe(self) -> Any:
        return self.run(self.before())

    def _dispatch(self, x_TD: Tensor, scores_TK: Tensor) -> tuple[Tensor, Tensor, Any]:
        return self.backend.dispatcher.dispatch(x_TD, scores_TK, self.problem.ids_TK)

    def _check_rows(self, rows_RD: Tensor) -> Faults:
        origin, token, k = self.problem.slots(self.backend.capacity)
        return same("rows", rows_RD, self.problem.row_of(origin, token, torch.zeros_like(k)))


class Dispatch(_Operation):
    """Tokens to the ranks of their experts."""

    @torch.no_grad()
    def run(self, state: Any) -> Any:
        del state
        return self._dispatch(self.problem.x_TD, self.problem.scores_TK)

    def check(self, result: Any) -> Faults:
        rows_RD, tokens_per_expert_L, _ = result
        expected_L = self.problem.rows.tokens_per_expert.to(self.problem.device)
        return self._check_rows(rows_RD) + same("tokens per expert", tokens_per_expert_L, expected_L)


class Combine(_Operation):
    """Expert outputs back to their tokens; a dispatch comes before, as in a layer."""

    def __init__(self, problem: Problem, backend: Backend) -> None:
        super().__init__(problem, backend)
        origin, token, k = problem.slots(backend.capacity)
        # Every slot has an output of its own. What follows the last expert's rows is never to be read.
        self._y_RD = problem.row_of(origin, token, k)
        self._y_RD[(origin < 0).to(problem.device)] = float("nan")

    @torch.no_grad()
    def before(self) -> Any:
        return self._dispatch(self.problem.x_TD, self.problem.scores_TK)[2]

    @torch.no_grad()
    def run(self, state: Any) -> Any:
        return self.backend.dispatcher.combine(self._y_RD, state)

    def check(self, result: Any) -> Faults:
        problem, case = self.problem, self.problem.case
        expected_TD = torch.zeros_like(problem.x_TD, dtype=torch.float64)
        size_TD = torch.zeros_like(expected_TD)
        token_T = problem.token_T
        for k in range(case.top_k):
            origin_T = torch.where(problem.ids_TK[:, k].cpu() < 0, -1, problem.origin_T)
            y_TD = problem.row_of(origin_T, token_T, torch.full_like(token_T, k)).double()
            term_TD = problem.scores_TK[:, k, None].double() * y_TD
            expected_TD += term_TD
            size_TD += term_TD.abs()
        budget = rounding(self.backend.roundings, case.top_k, case.row_dtype) * size_TD
        return near("sums", result, expected_TD, budget, case.row_dtype)


class ForwardBackward(_Operation):
    """Dispatch, combine, and the backward of both; in the probe each row gets a factor on its way."""

    def __init__(self, problem: Problem, backend: Backend) -> None:
        super().__init__(problem, backend)
        origin, token, k = problem.slots(backend.capacity)
        self._factor_R = _factor((origin * problem.case.tokens + token) * problem.case.top_k + k).to(
            problem.device, problem.case.row_dtype
        )
        self._x_TD = problem.x_TD.clone().requires_grad_()
        self._scores_TK = problem.scores_TK.clone().requires_grad_()

    def run(self, state: Any, factor_R: Tensor | None = None) -> Any:
        del state
        rows_RD, _, handle = self._dispatch(self._x_TD, self._scores_TK)
        y_RD = rows_RD if factor_R is None else rows_RD * factor_R[:, None]
        out_TD = self.backend.dispatcher.combine(y_RD, handle)
        leaves = (self._x_TD, self._scores_TK)
        grads = torch.autograd.grad(out_TD, leaves, self.problem.grad_TD)
        return rows_RD.detach(), out_TD.detach(), *grads, factor_R is not None

    def probe(self) -> Any:
        return self.run(None, self._factor_R)

    def check(self, result: Any) -> Faults:
        rows_RD, out_TD, grad_x_TD, grad_scores_TK, has_factors = result
        problem, case = self.problem, self.problem.case
        code_T = (problem.origin_T * case.tokens + problem.token_T) * case.top_k
        factor_TK = _factor(code_T[:, None] + torch.arange(case.top_k)).to(problem.device)
        factor_TK = factor_TK if has_factors else torch.ones_like(factor_TK)
        factor_TK = factor_TK.masked_fill(problem.ids_TK < 0, 0.0)
        weight_T = (problem.scores_TK.double() * factor_TK).sum(1, keepdim=True)
        size_T = (problem.scores_TK.double() * factor_TK).abs().sum(1, keepdim=True)
        x_TD, grad_TD = problem.x_TD.double(), problem.grad_TD.double()
        dot_T = (x_TD * grad_TD).sum(1, keepdim=True)
        dot_size_T = (x_TD * grad_TD).abs().sum(1, keepdim=True)
        share = rounding(self.backend.roundings, case.top_k, case.row_dtype)
        dot_share = rounding(0, case.hidden, torch.float32)
        out_budget, x_budget = share * size_T * x_TD.abs(), share * size_T * grad_TD.abs()
        dot_budget = dot_share * factor_TK.abs() * dot_size_T
        return [
            *self._check_rows(rows_RD),
            *near("sums", out_TD, weight_T * x_TD, out_budget, case.row_dtype),
            *near("gradient of x", grad_x_TD, weight_T * grad_TD, x_budget, case.row_dtype),
            *near("gradient of scores", grad_scores_TK, factor_TK * dot_T, dot_budget, torch.float32),
        ]


def _factor(code: Tensor) -> Tensor:
    """Return float64: one of eight numbers whose products are exact; neighbours get different ones.

    Example:
        >>> _factor(torch.arange(8)).tolist()
        [0.25, -0.25, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0]
    """
    power = (code // 2 % 4 - 2).double().exp2()
    return torch.where(code % 2 == 0, power, -power)


class Counts(_Operation):
    """Every rank's slots of every expert, to every rank."""

    @torch.no_grad()
    def run(self, state: Any) -> Any:
        del state
        return self.backend.counts()

    def check(self, result: Any) -> Faults:
        ids_WN = self.problem.ids_WTK.flatten(1)
        experts = self.problem.case.experts
        expected = [torch.bincount(ids_N[ids_N >= 0], minlength=experts) for ids_N in ids_WN]
        return same("counts", result, torch.stack(expected).to(self.problem.device, torch.int32))


class Flags(_Operation):
    """A barrier: one flag to every rank, and one from each."""

    LATER = 0.02
    """Seconds that each rank of a probe arrives after the one before it."""

    def run(self, state: Any) -> Any:
        del state
        self.backend.barrier()

    def probe(self) -> Any:
        # A barrier that lets anyone through early can be seen only if somebody is late.
        time.sleep(self.problem.rank * self.LATER)
        # The clock is the machine's, the same for all processes.
        arrived = time.monotonic()
        self.run(None)
        if self.problem.device.type == "cuda":
            torch.cuda.synchronize(self.problem.device)
        return arrived, time.monotonic()

    def check(self, result: Any) -> Faults:
        times: list[Any] = [None] * self.problem.case.ranks
        dist.all_gather_object(times, result, group=self.backend.group)
        last = max(arrived for arrived, _ in times)
        early = [rank for rank, (_, left) in enumerate(times) if left < last]
        return [f"barrier: ranks {early} left before the last had arrived"] if early else []


class Even(_Operation):
    """An equal part of the rows to every rank."""

    @torch.no_grad()
    def run(self, state: Any) -> Any:
        del state
        return self.backend.even()

    def check(self, result: Any) -> Faults:
        return self._check_rows(result)


OPERATIONS: dict[Op, Any] = {
    "dispatch": Dispatch,
    "combine": Combine,
    "forward-backward": ForwardBackward,
    "counts": Counts,
    "flags": Flags,
    "even": Even,
}


def make_operation(backend: Backend) -> Operation:
    """Return the operation of the case of the backend's problem."""
    return OPERATIONS[backend.problem.case.op](backend.problem, backend)
