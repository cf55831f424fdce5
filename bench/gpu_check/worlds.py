"""All ranks of a group on one device: each case forward and backward, against the reference."""

from __future__ import annotations

import numpy as np
import torch

from bench.gpu_check.agreement import Oracle
from bench.gpu_check.cases import planned_case, poison
from bench.gpu_check.journal import Journal, require
from symm_a2a import VirtualWorld
from symm_a2a.check.cases import Step
from symm_a2a.check.flow import Outcome, experts
from symm_a2a.check.inputs import Tensors, lay_out, place


def run(journal: Journal, device: str, name: str) -> None:
    """Check every step of a case, in one world."""
    planned = planned_case(name, device)
    with VirtualWorld(planned.config(), planned.world_size, device) as world:
        dropped = 0
        for step in planned.steps:
            title = f"{name} step {step.number}, {step.routing} routing, {sum(step.tokens)} tokens"
            # NumPy, which interprets the kernels on a CPU, warns of NaN.
            with journal.check(title) as notes, np.errstate(all="ignore"):
                oracle = Oracle(planned, step)
                leaves = [place(rank, step, i, torch.device(device)) for i, rank in enumerate(oracle.inputs)]
                poison(device)
                outcomes = forward_backward(world, step, leaves)
                require([f for i, one in enumerate(outcomes) for f in oracle.differences(i, one)])
                dropped += sum(oracle.dropped)
                notes["dropped"] = counted = sum(rank.dropped_rows for rank in world.dispatchers)
                require([f"dropped {counted} rows, {dropped} by the reference"] if counted != dropped else [])


def forward_backward(world: VirtualWorld, step: Step, leaves: list[Tensors]) -> list[Outcome]:
    """Run a step on every rank; gradients end up in the leaves."""
    rows, counts, handles = world.dispatch(
        [rank.x for rank in leaves], [rank.scores for rank in leaves], [rank.ids for rank in leaves]
    )
    ys = [
        lay_out(experts(*one, constant=False), step.strides[3])
        for one in zip(rows, counts, leaves, strict=True)
    ]
    outs = world.combine(ys, handles)
    torch.autograd.backward(outs, [rank.grad_out for rank in leaves])
    return [Outcome(*one) for one in zip(leaves, rows, counts, outs, strict=True)]
