"""What is checked, in which processes; names only, so that whoever plans needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

CASES = ("odd-bf16", "padded-bf16", "drops-fp32", "column-fp64", "budget-fp16", "twelve-ranks")
"""Of `bench.gpu_check.cases`."""

TIMED = ("olmoe", "dsv3")
"""Of `bench.shapes`."""

ALL_LIMIT = 470.0
"""Seconds for everything; a part that would begin later fails."""


@dataclass(frozen=True)
class Task:
    """A function `module:name(journal, device, *args)` that writes what it finds into a journal."""

    target: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """Tasks that share a process.

    Attributes:
        name: as in `--only`.
        tasks: in their order; one that raises does not keep the next from running.
        limit: seconds.
        alone: whether nothing else may run meanwhile.
    """

    name: str
    tasks: tuple[Task, ...]
    limit: float
    alone: bool = False


def parts_for(device: str) -> tuple[Part, ...]:
    """Return the parts, those that take longest first.

    On a CPU a process costs more than what it runs, and no figure is worth being alone for. A limit ends
    what hangs there: how long the interpreter takes is the machine's matter.
    """
    worlds = {f"world-{name}": Task(f"{__package__}.worlds:run", (name,)) for name in CASES}
    worlds["world-graph"] = Task(f"{__package__}.graphs:run")
    worlds["syncs"] = Task(f"{__package__}.syncs:run")
    ranks = {
        f"ranks-{name}": Task(f"{__package__}.processes:run", (name,))
        for name in ("exact", "static", "domino", "graph", "missing")
    }
    times = {f"times-{name}": Task(f"{__package__}.times:run", (name,)) for name in TIMED}
    times["overhead"] = Task(f"{__package__}.overhead:run")
    if device == "cpu":
        return (
            Part("worlds", tuple(worlds.values()), ALL_LIMIT),
            Part("ranks", tuple(ranks.values()), ALL_LIMIT),
            Part("times", tuple(times.values()), ALL_LIMIT),
        )
    # Triton's cache on disk hands what these compile to those that are timed.
    compiled = {f"compile-{name}": Task(f"{__package__}.times:compile_only", (name,)) for name in TIMED}
    together = [Part(name, (task,), 170) for name, task in (compiled | ranks | worlds).items()]
    return *together, *(Part(name, (task,), 100, alone=True) for name, task in times.items())
