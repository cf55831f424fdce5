"""The predicted timelines: a picture of the first layers, and a trace of all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import symm_a2a
from bench.plan.make import Plan
from bench.plan.schedules import schedule
from bench.plan.work import Computed

DRAWN_LAYERS = 2
"""Layers in the picture; of more one could see nothing."""


def save_picture(plan: Plan, path: Path) -> None:
    """Draw rank 0 of a step of the first layers, without Domino and with."""
    work, M = plan.work, plan.verdict.micro_batches
    layers = min(work.layers, DRAWN_LAYERS)
    # The costs of all layers serve for the first of them.
    few = replace(work, layers=layers)
    together, interleaved = schedule(few, 1), schedule(few, M)
    one = "one batch" if work.batches(M) == 1 else f"one batch of {M} that run one after another"
    timelines = {
        f"sync: {one}, each exchange joined where it is launched": together.replay.timelines[0],
        f"Domino: {M} micro-batches": interleaved.replay.timelines[0],
    }
    what = (
        f"{work.model.title}, {work.profile.name}, EP {work.ranks}"
        if isinstance(work, Computed)
        else "Stages measured"
    )
    title = f"Computed, not measured: {what}; forward and backward of {layers} layers"
    symm_a2a.save_picture(path, timelines, title)


def save_trace(plan: Plan, path: Path) -> None:
    """Write the step with Domino, all layers and ranks, as a trace."""
    symm_a2a.save_trace(path, plan.best.replay.timelines)
