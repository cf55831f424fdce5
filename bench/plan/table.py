"""A plan as text."""

from __future__ import annotations

import textwrap

from bench.limits.table import Table
from bench.plan.assumptions import GIB
from bench.plan.make import Plan
from bench.plan.schedules import Schedule, gain
from bench.plan.verdict import fits
from bench.plan.work import Computed

WIDTH = 108


def text_of(plan: Plan) -> str:
    """Return all that is printed."""
    parts = [_about(plan), _steps(plan).format(markdown=False)]
    if plan.uneven:
        parts.append(_uneven(plan).format(markdown=False))
    parts.append("\n".join(textwrap.wrap(plan.verdict.text, WIDTH)))
    return "\n\n".join(parts)


def name_of(schedule: Schedule) -> str:
    """Return what a schedule is called."""
    return "sync" if schedule.micro_batches == 1 else f"Domino, M = {schedule.micro_batches}"


def _about(plan: Plan) -> str:
    work = plan.work
    if not isinstance(work, Computed):
        return f"Computed from measured stages: {len(work.ranks)} ranks, {work.layers} layers."
    model, checkpoint = work.model, ", a checkpoint per layer" if work.checkpoint else ""
    batches = "one batch in parts" if work.how == "split" else "accumulated batches"
    text = (
        f"Computed, not measured: {model.title} on {work.profile.name}, EP {work.ranks}, {work.tokens} "
        f"tokens of each rank in sequences of {work.context}, {work.layers} of {model.layers} layers, "
        f"{batches}, {'exact' if work.exact else 'static'} capacity{checkpoint}. Times are of the forward "
        "and backward of one batch."
    )
    return "\n".join(textwrap.wrap(text, WIDTH))


def _steps(plan: Plan) -> Table:
    schedules = (plan.together, *plan.interleaved)
    rows = [_step(plan, one) for one in schedules]
    title = (
        "Milliseconds of the step; what it gains; waiting for exchanges; compute alone, and taking what has\n"
        "arrived, on the rank with most. Shares of the flights that are hidden, forward and backward."
    )
    headers = ["schedule", "step", "gain", "exposed", "hidden f", "hidden b", "compute", "joins"]
    if plan.together.memory is not None:
        headers += ["activations", "symmetric", "all"]
        title += "\nGiB of activations, of symmetric memory, and of all with parameters; ! does not fit."
    return Table(title, headers, rows)


def _step(plan: Plan, one: Schedule) -> list[str]:
    alone = one is plan.together
    # Without shared experts nothing but the host's own work lies between a launch and its join.
    nothing_beside = alone and isinstance(plan.work, Computed) and not plan.work.shared
    hidden = [f"{share:.0%}" for share in (one.hidden_forward, one.hidden_backward)]
    cells = [
        name_of(one),
        _ms(one.seconds),
        "" if alone else f"{gain(plan.together.seconds, one.seconds):+.1%}",
        _ms(one.exposed),
        *(["-", "-"] if nothing_beside else hidden),
        _ms(one.compute),
        _ms(one.joins),
    ]
    if one.memory is not None:
        kept = (one.memory.activations / GIB, one.memory.symmetric / GIB)
        mark = "" if fits(one, plan.capacity) else " !"
        cells += [*(f"{part:.2f}" for part in kept), f"{one.memory.total / GIB:.1f}{mark}"]
    return cells


def _uneven(plan: Plan) -> Table:
    rows = [
        [
            f"{one.variation:.2f}",
            f"{one.busiest:.2f}",
            _ms(one.together),
            _ms(one.interleaved),
            f"{one.gain:+.1%}",
        ]
        for one in plan.uneven
    ]
    title = (
        "If tokens per expert vary: their coefficient of variation; rows of the busiest rank, which\n"
        "all wait for, as a multiple of the mean; milliseconds of the step, without Domino and with."
    )
    return Table(title, ["CV", "busiest", "sync", name_of(plan.best), "gain"], rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
