"""Whether two trainings differ by rounding alone.

Both dispatchers move the same rows and add up the same terms, in another order. What that may do to the
losses was measured, by training with an all-to-all whose every row, score and gradient is off by a random
half unit in the last place (65 steps, seeds 0 to 7, losses from 5.6 to 1.7):

- Seven of eight times until the end, and the eighth until step 30, the losses differed by 6e-7 or less:
  three units in the last place, and not growing.
- The other one had a token whose second and third expert were as good as equal. Rounding chose another
  one, which is a difference like any other: the weights part, and 30 steps later the losses differ by
  4e-3. With a flip in every 300 steps or so, four steps have none 99 times in 100.

Bugs are not like that. Two rows swapped in one rank's combine show in the first step (4e-5 to 1e-4). One slot
whose score has no gradient, or two rows swapped in one rank's dispatch backward, show in the second or
third (2e-5 and more), and in the tenth it is 1e-3. So: until the routing parts, the losses must be equal up
to `ROUNDING`; the routing may part, but not in the first `CALM` steps, and not for more than
`MOST_MOVED` slots at once; and after that the losses must stay close, as two good trainings do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ROUNDING = 2e-6
"""Relative; 16 units in the last place of fp32, five times what was measured."""

CALM = 4
"""Steps at the start in which no token may be routed differently."""

MOST_MOVED = 4
"""Slots that may go elsewhere in the step where routing parts: one token, in two layers, and another."""

PARTED = 0.05
"""Relative difference allowed after the routing parted; ten times what was measured."""


@dataclass(frozen=True)
class Agreement:
    """How two trainings compare.

    Attributes:
        agree: they differ by what rounding explains.
        largest: the largest difference of their losses.
        parted_at: the first step (from 0) with another number of slots for some expert, or None.
        text: all that in a sentence.
    """

    agree: bool
    largest: float
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
        '... Step 2: the losses are 2.0000000 and 2.0000100; rounding explains 2e-06 of them'
        >>> compare(one, Curves(losses=[3.0, 2.0], loads=[[2, 2], [3, 1]])).text
        '... Step 2: 1 slots went to other experts; rounding moves 0 at most'
    """
    moved_S = [
        sum(abs(m - n) for m, n in zip(a, b, strict=True)) // 2
        for a, b in zip(first.loads, second.loads, strict=True)
    ]
    parted_at = next((step for step, moved in enumerate(moved_S) if moved), None)
    differences = [abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)]
    fault = _first_fault(first.losses, second.losses, moved_S, parted_at)
    if fault is not None:
        text = f"the trainings differ by more than rounding. {fault}"
    else:
        routing = "every token went to the same experts"
        if parted_at is not None:
            routing = f"from step {parted_at + 1} on, rounding sent tokens to other experts"
        text = f"the trainings agree: their losses differ by {max(differences):.1e} at most, and {routing}"
    return Agreement(fault is None, max(differences), parted_at, text)


def _first_fault(
    first: list[float], second: list[float], moved_S: list[int], parted_at: int | None
) -> str | None:
    """Return what rounding does not explain, where it first shows; None if it explains everything."""
    for step, (a, b) in enumerate(zip(first, second, strict=True)):
        if step == parted_at:
            most = MOST_MOVED if step >= CALM else 0
            if moved_S[step] > most:
                return f"Step {step + 1}: {moved_S[step]} slots went to other experts; rounding moves {most} at most"
        tolerance = ROUNDING if parted_at is None or step < parted_at else PARTED
        # The negation: a loss that is not a number differs.
        if not abs(a - b) <= tolerance * max(abs(a), abs(b)):
            return f"Step {step + 1}: the losses are {a:.7f} and {b:.7f}; rounding explains {tolerance:.0e} of them"
    return None
