"""Compares what a step gave with the reference: rows bit by bit, sums with those in fp64.

The bound of the latter is first order rounding analysis: every result is a sum of products, so running
the reference again on absolute values gives the sum of the terms' sizes, and n roundings of unit roundoff
u cost at most about `n * u` of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from symm_a2a import reference
from symm_a2a.baselines import AllToAllTokenDispatcher
from symm_a2a.check.cases import Case, Round, Step
from symm_a2a.check.flow import Outcome, experts, run_round
from symm_a2a.check.inputs import LEAVES, Tensors, draw_inputs, place
from symm_a2a.reference import Capacity

Found = list[dict[str, Any]]
"""Mismatches, described; empty if all is well."""


def compare(
    case: Case, one: Round, step: Step, rank: int, outcome: Outcome, group: dist.ProcessGroup
) -> Found:
    """Compare what a step of a round gave on this rank; collective, as the baseline runs the step too."""
    # Drawn again: whatever was done to the tensors that the dispatcher got, these are as they were.
    inputs, dtype = draw_inputs(case, step), case.dtype
    exact, sizes = (_oracle(case, step, inputs, change)[rank] for change in (torch.clone, torch.abs))
    # Not those of the oracle: by way of fp64, a NaN gets other bits.
    rows, counts = reference.dispatch([tensors.x for tensors in inputs], *_routing(case, step, inputs))
    sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def differences(outcome: Outcome, roundings: int) -> Found:
        # Roundings to the row dtype, at most, on the way to any result, but for the sum of two combines;
        # one more than the analysis counts pays for its higher orders. Sums of up to D products, and of
        # an expert's rows, are taken in fp32 (fp64), and the reference's own in fp64.
        unit = (roundings + step.twice + 1) * torch.finfo(dtype).eps / 2
        unit += (2 * case.sizes["hidden_dim"] + 64) * torch.finfo(sum_dtype).eps / 2
        found = mismatch("rows", outcome.rows, rows[rank], dtype)
        found += mismatch("tokens per expert", outcome.counts, counts[rank], torch.int32)
        found += mismatch("out", outcome.out, exact.out, dtype, unit * sizes.out)
        for name in LEAVES if one.backward != "none" else ():
            leaf = getattr(outcome.leaves, name)
            if leaf.requires_grad:
                actual, expected, size = (_gradient(o.leaves, name) for o in (outcome, exact, sizes))
                bound = (unit + torch.finfo(leaf.dtype).eps / 2) * size
                found += mismatch(f"gradient of {name}", actual, expected, leaf.dtype, bound)
        return found

    found = differences(outcome, roundings=4)
    if case.layers[step.layer][0] == "exact":
        device, alone = outcome.rows.device, replace(one, form="sync", steps=(step,))
        with AllToAllTokenDispatcher(case.config(step.layer), group, device) as baseline:
            leaves = place(inputs[rank], step, rank, device)
            theirs = run_round(alone, [baseline], [leaves], pause=lambda: None)[0]
        wrong = differences(theirs, roundings=3 + case.sizes["top_k"])
        found += [{**entry, "what": f"the baseline's {entry['what']}"} for entry in wrong]
    where = {"step": step.number, "rank": rank, "form": one.form, "backward": one.backward}
    return [{**where, **entry, "parameters": asdict(step)} for entry in found]


def _oracle(
    case: Case, step: Step, inputs: list[Tensors], change: Callable[[Tensor], Tensor]
) -> list[Outcome]:
    """Return what the reference makes of the inputs in fp64, each changed by a function, on every rank."""
    routing = _routing(case, step, inputs)
    leaves = [Tensors(**{name: change(t.double()) for name, t in vars(rank).items()}) for rank in inputs]
    for rank, name in itertools.product(leaves, LEAVES):
        getattr(rank, name).requires_grad_()
    rows, counts = reference.dispatch([rank.x for rank in leaves], *routing)
    ys = [experts(*one, step.constant) for one in zip(rows, counts, leaves, strict=True)]
    outs = reference.combine(ys, [rank.scores for rank in leaves], *routing)
    outs = [out * (1.5 if step.twice else 1) for out in outs]
    torch.autograd.backward(outs, [rank.grad_out for rank in leaves])
    return [Outcome(t, r, c, o.detach()) for t, r, c, o in zip(leaves, rows, counts, outs, strict=True)]


def _routing(case: Case, step: Step, inputs: list[Tensors]) -> tuple[list[Tensor], int, int, Capacity]:
    """Return what the reference is told of a step besides the rows and scores."""
    capacity, pad_multiple = case.layers[step.layer]
    return [tensors.ids for tensors in inputs], case.sizes["num_experts"], pad_multiple, capacity


def _gradient(leaves: Tensors, name: str) -> Tensor:
    leaf = getattr(leaves, name)
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def mismatch(
    what: str, actual: Tensor, expected: Tensor, dtype: torch.dtype, bound: Tensor | None = None
) -> Found:
    """Compare a tensor with what is expected of it, on the CPU; first its shape and dtype.

    Without a bound the bits are to be the same: -0.0 is not 0.0, and NaN equals NaN. With a bound of the
    difference from an fp64 tensor, infinities and NaN are to be the same.
    """
    actual = actual.detach().cpu()
    kinds = f"{tuple(expected.shape)} {dtype}", f"{tuple(actual.shape)} {actual.dtype}"
    if kinds[0] != kinds[1]:
        return [{"what": what, "expected": kinds[0], "got": kinds[1]}]
    if bound is None:
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        right = actual.contiguous().view(bits) == expected.contiguous().view(bits)
    else:
        # Of equal infinities the difference is NaN, which is not within anything.
        right = (actual == expected) | (actual.isnan() & expected.isnan())
        right |= expected.isfinite() & ((actual.double() - expected).abs() <= bound)
    if right.all():
        return []
    wrong = (~right).nonzero().tolist()
    # As text: NaN and infinities are no JSON.
    index = tuple(wrong[0])
    values = {"expected": repr(expected[index].item()), "got": repr(actual[index].item())}
    return [{"what": what, "index": index, **values, "wrong": len(wrong), "of": actual.numel()}]
