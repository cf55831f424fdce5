"""Compares what a step gave with the reference: movement bit by bit, sums with fp64.

Every sum is of products, so the reference on absolute values gives the size of its terms, and n roundings
of unit roundoff u cost about `n * u` of that at most.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.gpu_check.cases import Planned
from symm_a2a import reference
from symm_a2a.check.cases import Step
from symm_a2a.check.compare import mismatch
from symm_a2a.check.flow import Outcome, experts
from symm_a2a.check.inputs import LEAVES, Tensors, draw_inputs

ROUNDINGS = 4
"""Of any result to the row dtype: at the experts, at a rank, at the origin; and one for higher orders."""


class Oracle:
    """What the reference makes of a step, on all ranks.

    Args:
        planned: the case.
        step: one of its steps.
        plain: whether the experts give their rows back as they are, without weights and their gradients.

    Attributes:
        inputs: each rank's tensors, on the CPU.
        dropped: each rank's rows that found no place.
    """

    def __init__(self, planned: Planned, step: Step, *, plain: bool = False) -> None:
        self._planned = planned
        self._plain = plain
        capacity, pad_multiple = planned.case.layers[0]
        self.inputs = draw_inputs(planned.case, step)
        self._routing = (
            [rank.ids for rank in self.inputs],
            planned.config().num_experts,
            pad_multiple,
            capacity,
        )
        # Not by way of fp64, which gives a NaN other bits.
        self._rows, self._counts = reference.dispatch([rank.x for rank in self.inputs], *self._routing)
        self._exact = self._run(torch.clone)
        self._sizes = self._run(torch.abs)
        self.dropped = [rank.num_dropped for rank in reference.route(*self._routing)]

    def _run(self, change: Callable[[Tensor], Tensor]) -> list[Outcome]:
        leaves = [
            Tensors(**{name: change(t.double()) for name, t in vars(rank).items()}) for rank in self.inputs
        ]
        for rank in leaves:
            for name in LEAVES:
                getattr(rank, name).requires_grad_()
        rows, counts = reference.dispatch([rank.x for rank in leaves], *self._routing)
        ys = rows
        if not self._plain:
            ys = [experts(*one, constant=False) for one in zip(rows, counts, leaves, strict=True)]
        outs = reference.combine(ys, [rank.scores for rank in leaves], *self._routing)
        torch.autograd.backward(outs, [rank.grad_out for rank in leaves])
        return [Outcome(*one) for one in zip(leaves, rows, counts, outs, strict=True)]

    def differences(self, rank: int, outcome: Outcome) -> list[str]:
        """Return where a rank's rows, counts, output or gradients are not what they should be."""
        config, exact, sizes = self._planned.config(), self._exact[rank], self._sizes[rank]
        sum_dtype = torch.float64 if config.dtype == torch.float64 else torch.float32
        unit = (ROUNDINGS + 1) * torch.finfo(config.dtype).eps / 2
        unit += (2 * config.hidden_dim + 64) * torch.finfo(sum_dtype).eps / 2
        found = mismatch("rows", outcome.rows, self._rows[rank], config.dtype)
        found += mismatch("tokens per expert", outcome.counts, self._counts[rank], torch.int32)
        found += mismatch("out", outcome.out, exact.out.detach(), config.dtype, unit * sizes.out.detach())
        for name in LEAVES[:2] if self._plain else LEAVES:
            leaf = getattr(outcome.leaves, name)
            expected, size = (getattr(one.leaves, name).grad for one in (exact, sizes))
            bound = (unit + torch.finfo(leaf.dtype).eps / 2) * size
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            found += mismatch(f"gradient of {name}", gradient, expected, leaf.dtype, bound)
        return [f"rank {rank}: {entry}" for entry in found]
