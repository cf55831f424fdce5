"""A forward and backward captured once is replayed with other data in the same tensors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bench.gpu_check.agreement import Oracle
from bench.gpu_check.cases import Planned, planned_case
from bench.gpu_check.journal import Journal, require
from bench.gpu_check.launches import repeatable
from symm_a2a import VirtualWorld
from symm_a2a.check.cases import Step
from symm_a2a.check.flow import Outcome
from symm_a2a.check.inputs import LEAVES, Tensors, draw_inputs

REPLAYS, REPLAYS_ON_CPU = 10, 2
TENSORS = (*LEAVES, "ids", "grad_out")


class Buffers:
    """One rank's tensors at fixed addresses, filled anew for every replay.

    Args:
        planned: the case.
        step: gives the sizes.
        rank: this rank.
        device: where they live.

    Attributes:
        leaves: x and scores require gradients.
    """

    def __init__(self, planned: Planned, step: Step, rank: int, device: str) -> None:
        self._rank = rank
        inputs = draw_inputs(planned.case, step)[rank]
        self.leaves = Tensors(**{name: getattr(inputs, name).to(device) for name in TENSORS})
        for name in ("x", "scores"):
            getattr(self.leaves, name).requires_grad_()

    def fill(self, inputs: list[Tensors]) -> None:
        """Take over the values of this rank."""
        with torch.no_grad():
            for name in TENSORS:
                getattr(self.leaves, name).copy_(getattr(inputs[self._rank], name))

    def outcome(self, rows: Tensor, counts: Tensor, out: Tensor, grads: tuple[Tensor, Tensor]) -> Outcome:
        """Return what a replay gave, with the gradients where those of a backward would be."""
        copies = Tensors(**{name: getattr(self.leaves, name).detach().clone() for name in TENSORS})
        copies.x.grad, copies.scores.grad = grads
        return Outcome(copies, rows, counts, out)


def numbered(step: Step, number: int) -> Step:
    """Return a step of the same sizes and other values."""
    return replace(step, number=100 + number)


def run(journal: Journal, device: str) -> None:
    """Check replays over all ranks of a world, of small messages and of large ones."""
    planned = planned_case("padded-bf16", device)
    with VirtualWorld(planned.config(), planned.world_size, device) as world:
        ranks = range(planned.world_size)
        for size, step in (("large", planned.steps[0]), ("small", _small(planned.steps[0]))):
            with journal.check(f"graph of a world, {size} messages") as notes, np.errstate(all="ignore"):
                buffers = [Buffers(planned, step, rank, device) for rank in ranks]
                leaves = [one.leaves for one in buffers]

                def once(leaves: list[Tensors] = leaves) -> tuple[list[Tensor], ...]:
                    rows, counts, handles = world.dispatch(
                        [one.x for one in leaves], [one.scores for one in leaves], [one.ids for one in leaves]
                    )
                    outs = world.combine(rows, handles)
                    wanted = [one.x for one in leaves] + [one.scores for one in leaves]
                    grads = torch.autograd.grad(outs, wanted, [one.grad_out for one in leaves])
                    return rows, counts, outs, list(grads)

                (rows, counts, outs, grads), again = repeatable(device, once)
                before = world.dispatchers[0].stats()
                for replay in range(REPLAYS if device != "cpu" else REPLAYS_ON_CPU):
                    oracle = Oracle(planned, numbered(step, replay), plain=True)
                    for one in buffers:
                        one.fill(oracle.inputs)
                    again()
                    found = []
                    for rank, one in enumerate(buffers):
                        both = grads[rank], grads[len(buffers) + rank]
                        outcome = one.outcome(rows[rank], counts[rank], outs[rank], both)
                        found += oracle.differences(rank, outcome)
                    require(found)
                done = world.dispatchers[0].stats() - before
                notes["replays"] = done.exchanges["dispatch"]
                require([f"{done.launches} launches in replays"] if done.launches else [])
                # The next capture takes these addresses.
                del rows, counts, outs, grads, again


def _small(step: Step) -> Step:
    return replace(step, tokens=tuple(min(tokens, 20) for tokens in step.tokens))
