"""How evenly the slots of dispatches fell on experts and ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from symm_a2a.placement import Placement


@dataclass(frozen=True)
class Load:
    """What all ranks' dispatches sent where, counted before padding and drops; equal on every rank.

    Attributes:
        slots_E: for each expert the slots of all ranks that went to it, its replicas together.
        rows_W: for each rank the rows that its experts got.
        copies_WW: for each origin rank (outer) the rows that it sent to each rank, one for each token that
            has an expert there.
    """

    slots_E: list[int]
    rows_W: list[int]
    copies_WW: list[list[int]]

    @property
    def cv(self) -> float:
        """Standard deviation of `slots_E` over their mean; 0 is even, and so is nothing at all.

        Example:
            >>> Load([3, 1], [3, 1], [[0, 0], [0, 0]]).cv
            0.5
        """
        return _cv(self.slots_E)

    @property
    def max_over_mean(self) -> float:
        """The busiest expert's slots over the mean of all experts; 1 is even."""
        return _max_over_mean(self.slots_E)

    @property
    def rank_cv(self) -> float:
        """Standard deviation of `rows_W` over their mean."""
        return _cv(self.rows_W)

    @property
    def rank_max_over_mean(self) -> float:
        """The busiest rank's rows over the mean: the others wait that much longer than they compute."""
        return _max_over_mean(self.rows_W)

    def as_dict(self) -> dict[str, object]:
        """Return the counts and what is made of them, as JSON has it."""
        return {
            "slots_E": self.slots_E,
            "rows_W": self.rows_W,
            "copies_WW": self.copies_WW,
            "cv": self.cv,
            "max_over_mean": self.max_over_mean,
            "rank_cv": self.rank_cv,
            "rank_max_over_mean": self.rank_max_over_mean,
        }

    def __sub__(self, earlier: Load) -> Load:
        return Load(
            _minus(self.slots_E, earlier.slots_E),
            _minus(self.rows_W, earlier.rows_W),
            [_minus(mine, theirs) for mine, theirs in zip(self.copies_WW, earlier.copies_WW, strict=True)],
        )

    def __add__(self, other: Load) -> Load:
        none = Load([0] * len(self.slots_E), [0] * len(self.rows_W), [[0] * len(r) for r in self.copies_WW])
        return self - (none - other)


def load_of(totals: Sequence[int], world_size: int, placement: Placement | None) -> Load:
    """Return what a dispatcher's ledger says.

    Args:
        totals: `(W * L + W * W,)`: slots of each place, then copies from each rank to each.
        world_size: W.
        placement: what is at the places; None where experts are places.

    Example:
        >>> load_of([3, 1, 0, 2, 2, 1, 1, 2], 2, Placement(((0, 1), (1, 2)))).slots_E
        [3, 1, 2]
    """
    W, places = world_size, len(totals) - world_size**2
    num_local = places // W
    slots_P = torch.tensor(totals[:places], device="cpu")
    return Load(
        slots_E=(slots_P if placement is None else placement.of_experts(slots_P)).tolist(),
        rows_W=[sum(totals[w * num_local : (w + 1) * num_local]) for w in range(W)],
        copies_WW=[list(totals[places + w * W : places + (w + 1) * W]) for w in range(W)],
    )


def _minus(mine: list[int], theirs: list[int]) -> list[int]:
    return [a - b for a, b in zip(mine, theirs, strict=True)]


def _cv(values: list[int]) -> float:
    mean = statistics.fmean(values)
    return statistics.pstdev(values) / mean if mean else 0.0


def _max_over_mean(values: list[int]) -> float:
    mean = statistics.fmean(values)
    return max(values) / mean if mean else 1.0
