"""A plan as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.plan import measured_file
from bench.plan.hardware import figures_of
from bench.plan.make import Plan
from bench.plan.schedules import Schedule, gain
from bench.plan.verdict import fits
from bench.plan.work import Computed


def object_of(plan: Plan) -> dict[str, Any]:
    """Return all figures: seconds, bytes and shares."""
    return {
        "computed": True,
        "work": _work(plan),
        "schedules": [_schedule(plan, one) for one in (plan.together, *plan.interleaved)],
        "imbalance": [
            {**asdict(one), "gain": one.gain, "micro_batches": plan.verdict.micro_batches}
            for one in plan.uneven
        ],
        "verdict": {**asdict(plan.verdict), "helps": plan.verdict.helps},
    }


def _work(plan: Plan) -> dict[str, Any]:
    work = plan.work
    if not isinstance(work, Computed):
        return {"measured": measured_file.as_object(work), "lanes": work.lanes, "checkpoint": work.checkpoint}
    names = (
        "tokens",
        "ranks",
        "layers",
        "context",
        "lanes",
        "exact",
        "checkpoint",
        "how",
        "bytes_per_parameter",
    )
    return {
        "model": asdict(work.model),
        "hardware": figures_of(work.profile),
        **{name: getattr(work, name) for name in names},
    }


def _schedule(plan: Plan, one: Schedule) -> dict[str, Any]:
    return {
        "micro_batches": one.micro_batches,
        "seconds": one.seconds,
        "gain": gain(plan.together.seconds, one.seconds),
        "exposed": one.exposed,
        "compute": one.compute,
        "joins": one.joins,
        "hidden_forward": one.hidden_forward,
        "hidden_backward": one.hidden_backward,
        "memory": None if one.memory is None else {**asdict(one.memory), "total": one.memory.total},
        "fits": fits(one, plan.capacity),
    }
