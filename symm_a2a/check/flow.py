"""Runs the steps of a round on a dispatcher, forward and backward; what it gave is an outcome."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from symm_a2a.check.cases import Round, Step
from symm_a2a.check.inputs import LEAVES, Tensors, lay_out
from symm_a2a.dispatcher import SymmTokenDispatcher


@dataclass(eq=False)
class Outcome:
    """What a step gave on one rank; gradients are the leaves'."""

    leaves: Tensors
    rows: Tensor
    counts: Tensor
    out: Tensor


Flow = Iterator[Outcome | None]
"""A step's exchanges on one rank: None between each launch and its join, the outcome at the end."""


def run_round(
    one: Round, dispatchers: Sequence[Any], leaves: Sequence[Tensors], pause: Callable[[], None]
) -> list[Outcome]:
    """Run a round's steps forward and backward; collective.

    Args:
        one: the round.
        dispatchers: of each of its steps.
        leaves: this rank's tensors of each step; gradients end up there.
        pause: sleeps for a while, or not.
    """

    def go_back(outcomes: Sequence[Outcome]) -> None:
        pause()
        torch.autograd.backward([o.out for o in outcomes], [o.leaves.grad_out for o in outcomes])

    halves = one.form in ("async", "pipelined", "checkpoint async")
    flows = [partial(_flow, *pair, halves, pause) for pair in zip(dispatchers, one.steps, strict=True)]
    pairs = list(zip(flows, leaves, strict=True))
    outcomes: list[Outcome] = []
    with torch.set_grad_enabled(one.backward != "none"):
        for group in [pairs] if one.form == "pipelined" else [[pair] for pair in pairs]:
            again = one.form.startswith("checkpoint")
            new = [_recomputed(*pair) for pair in group] if again else _in_turns([f(t) for f, t in group])
            outcomes += new
            if one.backward == "each":
                go_back(new)
    one_by_one = [[outcome] for outcome in outcomes]
    later = {"first first": one_by_one, "last first": one_by_one[::-1], "together": [outcomes]}
    for together in later.get(one.backward, []):
        go_back(together)
    return outcomes


def _in_turns(flows: Sequence[Flow]) -> list[Outcome]:
    """Run flows in turns, from one yield to the next, until each has its outcome."""
    outcomes: list[Any] = [None] * len(flows)
    while None in outcomes:
        outcomes = [outcome or next(flow) for outcome, flow in zip(outcomes, flows, strict=True)]
    return outcomes


def _recomputed(flow: Callable[[Tensors], Flow], leaves: Tensors) -> Outcome:
    """Run a flow under activation checkpointing."""
    seen: list[Outcome] = []
    wanted = [seen]

    def body(*given: Tensor) -> Tensor:
        (outcome,) = _in_turns([flow(replace(leaves, **dict(zip(LEAVES, given, strict=True))))])
        for first in wanted:
            first.append(outcome)
        return outcome.out

    out = checkpoint(body, *(getattr(leaves, name) for name in LEAVES), use_reentrant=False)
    # The graph keeps this function, to run it again: it must not keep the graph.
    wanted.clear()
    return replace(seen[0], leaves=leaves, out=out)


def _flow(dispatcher: Any, step: Step, halves: bool, pause: Callable[[], None], leaves: Tensors) -> Flow:
    """Dispatch, let the experts work, combine; with launches and joins apart if in halves."""

    def exchange(name: str, *arguments: Any, **lane: int) -> Generator[None, None, Any]:
        pause()
        if not halves:
            return getattr(dispatcher, name)(*arguments, **lane)
        pending = getattr(dispatcher, f"{name}_async")(*arguments, **lane)
        yield
        pause()
        return pending.join()

    # The baseline has no lanes.
    lane = {"lane": step.lane} if isinstance(dispatcher, SymmTokenDispatcher) else {}
    rows, counts, handle = yield from exchange("dispatch", leaves.x, leaves.scores, leaves.ids, **lane)
    y = lay_out(experts(rows, counts, leaves, step.constant), step.strides[3])
    out = yield from exchange("combine", y, handle)
    if step.twice:
        out = out + (yield from exchange("combine", y / 2, handle))
    yield Outcome(leaves, rows, counts, out)


def experts(rows: Tensor, counts_L: Tensor, leaves: Tensors, constant: bool) -> Tensor:
    """Return `row * weight + bias` of each row's expert; NaN past the last expert's, never to be read."""
    counts = counts_L.tolist()
    *parts, rest = rows.split([*counts, rows.shape[0] - sum(counts)])
    made = [
        bias.expand(part.shape) if constant else part * weight + bias
        for part, weight, bias in zip(parts, leaves.weight.unbind(), leaves.bias.unbind(), strict=True)
    ]
    return torch.cat([*made, torch.full_like(rest, float("nan"))])
