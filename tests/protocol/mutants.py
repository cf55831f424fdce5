"""What breaks the protocol, as changes of what kernels do."""

from __future__ import annotations

from collections.abc import Callable

from tests.protocol.model import KernelsOf, System
from tests.protocol.steps import Step, Steps, World, kernels

Change = Callable[[Steps], Steps]


def changed(change: Change, world: World, world_size: int) -> KernelsOf:
    """Return kernels that all do something else."""
    return lambda rank: {key: change(steps) for key, steps in kernels(world, world_size, rank).items()}


def _each(steps: Steps, change: Callable[[tuple[Step, ...]], tuple[Step, ...]]) -> Steps:
    return Steps(tuple(change(program) for program in steps.programs), change(steps.last))


def without_credit(steps: Steps) -> Steps:
    """Launch without a look at the free flags."""
    kept = ("wait", "check")
    return _each(steps, lambda p: tuple(s for s in p if s.what not in kept or not s.region.endswith("_free")))


def flag_before_rows(steps: Steps) -> Steps:
    """Publish when the first program begins, not when the last one ends."""
    flags = tuple(s for s in steps.last if s.what == "publish" and s.region.endswith("_ready"))
    if not flags or not any(s.what == "write" for program in steps.programs for s in program):
        return steps
    first, *others = steps.programs
    return Steps(((*flags, *first), *others), tuple(s for s in steps.last if s not in flags))


def flag_of_the_first_program(steps: Steps) -> Steps:
    """Publish when the first program ends, whatever the others still write."""
    if len(steps.programs) < 2 or not any(s.what == "publish" for s in steps.last):
        return steps
    first, *others = steps.programs
    return Steps(((*first, *steps.last), *others), ())


def flag_before_counts(steps: Steps) -> Steps:
    """Publish the counts before they are written."""

    def change(program: tuple[Step, ...]) -> tuple[Step, ...]:
        flags = [s for s in program if s.what == "publish" and s.region == "counts_ready"]
        if not flags or not any(s.region == "counts" for s in program):
            return program
        at = next(i for i, s in enumerate(program) if s.region == "counts")
        rest = [s for s in program if s not in flags]
        return (*rest[:at], *flags, *rest[at:])

    return _each(steps, change)


def counts_before_credit(steps: Steps) -> Steps:
    """Write the counts, and wait then."""
    counts = tuple(s for s in steps.last if s.what == "write" and s.region == "counts")
    return steps._replace(last=(*counts, *(s for s in steps.last if s not in counts)))


def freed_before_read(steps: Steps) -> Steps:
    """Free the sections when a join begins."""
    frees = tuple(s for s in steps.last if s.what == "publish" and s.region.endswith("_free"))
    if not frees:
        return steps
    first, *others = steps.programs
    return Steps(((*frees, *first), *others), ())


def joined_unseen(steps: Steps) -> Steps:
    """Read without a look at the ready flags, and end launches without a wait for them."""
    looks = ("wait", "check")
    return _each(
        steps, lambda p: tuple(s for s in p if s.what not in looks or not s.region.endswith("_ready"))
    )


def in_one_program(steps: Steps) -> Steps:
    """Run in one program, which is the last one as well."""
    return Steps(steps.programs[:1], steps.last)


def spinning_joins(steps: Steps) -> Steps:
    """Let every program of a join wait, and no launch, which is in one program."""
    if any(s.what == "publish" and s.region.endswith("_ready") for s in steps.last):
        return Steps(steps.programs[:1], tuple(s for s in steps.last if s.what != "wait"))
    seen = (tuple(_waiting(s) for s in program) for program in steps.programs)
    return Steps(tuple(seen), steps.last)


def _waiting(step: Step) -> Step:
    return step._replace(what="wait") if step.what == "check" else step


def without_epochs(system: System) -> System:
    """Take a flag of any epoch for that of one's own."""
    system.streams = [
        (rank, tuple(work._replace(
            programs=tuple(tuple(_any_epoch(op) for op in program) for program in work.programs),
            last=tuple(_any_epoch(op) for op in work.last),
        ) for work in works))
        for rank, works in system.streams
    ]  # fmt: skip
    return system


def _any_epoch(op):
    return op._replace(epoch=min(op.epoch, 1)) if op.what in ("wait", "check") else op
