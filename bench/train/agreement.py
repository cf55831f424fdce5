"""Whether two trainings differ by rounding alone.

All dispatchers move the same rows and add up the same terms, in another order. What that may do to the
losses was measured, by training 22 times with an all-to-all that multiplies every row, score and gradient
by 1 plus a random 6e-8, half a unit in the last place, and once without: top-2 of 16 experts for 55 steps
of 4 x 512 tokens, top-4 for 70 steps of 4 x 256, losses from 5.6 to 1.9, a seed each.

- As long as every expert got the same number of slots, the losses differed by 9e-7 of themselves or less,
  eight units in the last place; in the first five steps by 1e-7, which is one.
- In 12 of the 22, rounding at last decided between two experts that a token found equally good, in step
  25 at the earliest, for one or two slots. Such a flip is a difference like any other: the weights part,
  and in the end the losses differed by up to 3e-3.

Both schedules add up the same terms in another order as well. In 30 steps of 2 x 256 tokens, cut in two
micro-batches and whole, the losses differed by 2e-7 of themselves or less, and the routing was the same.

Bugs are not like that. Two rows swapped in one rank's combine, two rows swapped in one rank's dispatch
backward, one slot whose score gets no gradient: each makes a difference of 3e-6 and more in the first or
second step, and of 1e-5 by the fourth. So: while the routing is the same, the losses must be equal up to
`EARLY_ROUNDING`, and from step `CALM` on up to `ROUNDING`; the routing may part, but not before, and not for
more than `MOST_MOVED` slots at once; and then the losses must stay as close as those of two good trainings
on the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

CALM = 5
"""Steps at the start in which no token may be routed differently."""

EARLY_ROUNDING = 1e-6
"""Of a loss: the difference allowed in those steps; ten times what was measured."""

ROUNDING = 1e-5
"""Of a loss: the difference allowed after them, while the routing is the same; the same ten times."""

MOST_MOVED = 4
"""Slots that may go to other experts in the step where routing parts; twice what was measured."""

PARTED = 0.05
"""Of a loss: the difference allowed once the routing has parted."""


@dataclass(frozen=True)
class Agreement:
    """How two trainings compare, or one with each of several.

    Attributes:
        agree: they differ by what rounding explains.
        differences: of the losses, in each step; not a number where a loss is not. Of several, of those that
            are furthest apart for what is allowed.
        allowed: how large they may be.
        parted_at: the first step (from 0) with another number of slots for some expert, or None.
        text: all that in a sentence.
    """

    agree: bool
    differences: list[float]
    allowed: list[float]
    parted_at: int | None
    text: str


class Curves(Protocol):
    """What is compared of a training, a `Training` for example."""

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        ...

    @property
    def loads(self) -> list[list[int]]:
        """The slots that went to each expert, in each step."""
        ...


def compare(first: Curves, second: Curves) -> Agreement:
    """Compare the losses of two trainings, and the slots that went to each expert, step by step.

    Example:
        >>> from types import SimpleNamespace as Curves
        >>> one = Curves(losses=[3.0, 2.0], loads=[[2, 2], [2, 2]])
        >>> compare(one, Curves(losses=[3.0, 2.000001], loads=one.loads)).agree
        True
        >>> compare(one, Curves(losses=[3.0, 2.00001], loads=one.loads)).text
        '... Step 2: the losses are 2.0000000 and 2.0000100; rounding explains 2e-06.'
        >>> compare(one, Curves(losses=[3.0, 2.0], loads=[[2, 2], [3, 1]])).text
        '... Step 2: 1 slots went to other experts; rounding moves 0 at most.'
    """
    moved_S = [
        sum(abs(m - n) for m, n in zip(a, b, strict=True)) // 2
        for a, b in zip(first.loads, second.loads, strict=True)
    ]
    parted_at = next((step for step, moved in enumerate(moved_S) if moved), None)
    differences, allowed = [], []
    for step, (a, b) in enumerate(zip(first.losses, second.losses, strict=True)):
        rounding = EARLY_ROUNDING if step < CALM else ROUNDING
        share = rounding if parted_at is None or step < parted_at else PARTED
        differences.append(abs(a - b))
        allowed.append(share * max(abs(a), abs(b)))
    # The negation: a difference that is not a number is too large.
    too_far = next((step for step, d in enumerate(differences) if not d <= allowed[step]), None)
    most = MOST_MOVED if parted_at is not None and parted_at >= CALM else 0

    agree, routing = False, "every token went to the same experts"
    if parted_at is not None:
        routing = f"from step {parted_at + 1} on, rounding sent tokens to other experts"
    if parted_at is not None and moved_S[parted_at] > most:
        fault = f"{moved_S[parted_at]} slots went to other experts; rounding moves {most} at most"
        text = f"The trainings differ by more than rounding. Step {parted_at + 1}: {fault}."
    elif too_far is not None:
        a, b = first.losses[too_far], second.losses[too_far]
        fault = f"the losses are {a:.7f} and {b:.7f}; rounding explains {allowed[too_far]:.0e}"
        text = f"The trainings differ by more than rounding. Step {too_far + 1}: {fault}."
    else:
        agree = True
        text = f"The trainings agree: their losses differ by {max(differences):.1e} at most, and {routing}."
    return Agreement(agree, differences, allowed, parted_at, text)


def compare_all(trainings: Mapping[str, Curves]) -> Agreement | None:
    """Compare the first training with each of the others; None where there is but one.

    Example:
        >>> from types import SimpleNamespace as Curves
        >>> loads = [[2, 2], [2, 2]]
        >>> losses = {"a": [3.0, 2.0], "b": [3.0, 2.0], "c": [3.0, 2.5]}
        >>> result = compare_all({name: Curves(losses=each, loads=loads) for name, each in losses.items()})
        >>> result.agree, result.differences
        (False, [0.0, 0.5])
        >>> print(result.text)
        a and b: The trainings agree: their losses differ by 0.0e+00 at most, and every ...
        a and c: The trainings differ by more than rounding. Step 2: ...
    """
    (first, curves), *others = trainings.items()
    pairs = {f"{first} and {name}": compare(curves, other) for name, other in others}
    if len(pairs) < 2:
        return next(iter(pairs.values()), None)
    steps = zip(*(zip(one.differences, one.allowed, strict=True) for one in pairs.values()), strict=True)
    # What is not a number is furthest apart.
    worst = [
        max(step, key=lambda pair: pair[0] / pair[1] if pair[0] == pair[0] else math.inf) for step in steps
    ]
    return Agreement(
        agree=all(one.agree for one in pairs.values()),
        differences=[difference for difference, _ in worst],
        allowed=[allowed for _, allowed in worst],
        parted_at=min((one.parted_at for one in pairs.values() if one.parted_at is not None), default=None),
        text="\n".join(f"{names}: {one.text}" for names, one in pairs.items()),
    )
