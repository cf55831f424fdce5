"""What chaos is made of: cases, and what befalls the ranks meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass

WEIGHTS = {
    "plain": 4,
    "stopped": 4,
    "domino": 3,
    "wrong": 2,
    "groups": 2,
    "forgotten": 1,
    "thrown": 4,
    "late": 2,
    "killed": 2,
}
"""The kinds of acts, and how often each comes. What they are is said at `run_act`."""


@dataclass(frozen=True)
class Act:
    """One thing that happens to all ranks.

    Attributes:
        seed: of the act, and of its case; the act follows from it and from the number of ranks.
        kind: a key of `WEIGHTS`.
        victim: the rank that it happens to.
        at: before which of the victim's phases: launches, joins and backwards are counted.
        members: of `"groups"`, the parts that the ranks are split into.
    """

    seed: int
    kind: str
    victim: int
    at: int
    members: tuple[tuple[int, ...], ...]


def draw_act(seed: int, world_size: int) -> Act:
    """Return the act of a seed."""
    rng = random.Random(f"act {seed}")
    (kind,) = rng.choices([*WEIGHTS], [*WEIGHTS.values()])
    ranks = rng.sample(range(world_size), world_size)
    cut = rng.randint(0, world_size)
    parts = tuple(tuple(sorted(part)) for part in (ranks[:cut], ranks[cut:]) if part)
    return Act(seed, kind, rng.randrange(world_size), rng.randint(1, 14), parts)
