"""How long a matrix product takes. A model, and not a measurement.

A product of `m` rows with a matrix of `k` by `n` does `2 m k n` operations. Its speed is the peak, times the
efficiency of a large product, times two factors for the rows: how full the tiles are, and `m / (m + r)`,
which is a half at `r` rows and stands for all that a small product does not amortise: filling the pipeline,
waves of tiles that do not fill the device, loads of the matrix that few rows share. An expert gets as many
rows as happen to come, so that its last tile is half full in the mean. A product is never faster than
memory: the matrix is read once for each, however few its rows, and the rows once.
"""

from __future__ import annotations

from math import ceil

from bench.plan.assumptions import TILE_ROWS
from bench.plan.hardware import Profile

ITEMSIZE = 2
"""Bytes of a bf16 element."""


def efficiency(rows: float, half_speed_rows: float, *, chance: bool = False) -> float:
    """Return the share of its best speed that a product with so many rows of one matrix reaches.

    Args:
        rows: of a matrix, in the mean.
        half_speed_rows: r.
        chance: whether the rows are as many as happen to come.

    Example:
        >>> [round(efficiency(rows, 64), 2) for rows in (64, 128, 512, 4096)]
        [0.25, 0.67, 0.89, 0.98]
        >>> [round(efficiency(rows, 64, chance=True), 2) for rows in (64, 128, 512, 4096)]
        [0.25, 0.44, 0.79, 0.97]
    """
    if rows <= 0:
        return 1.0
    paid = max(TILE_ROWS, rows + TILE_ROWS / 2) if chance else ceil(rows / TILE_ROWS) * TILE_ROWS
    return rows / paid * rows / (rows + half_speed_rows)


def seconds(
    profile: Profile,
    rows: float,
    inner: int,
    columns: int,
    *,
    experts: int | None = None,
    backward: bool = False,
) -> float:
    """Return the seconds of a product, or of the two of its backward.

    Args:
        profile: whose speed.
        rows: of each matrix, in the mean.
        inner: k.
        columns: n.
        experts: of a rank, products alike in one launch; None for a product that is none of an expert.
        backward: the gradients of the rows and of the matrix, instead. The second adds up over `rows`, so
            that few of them slow it down alike; it reads and writes the matrix's gradient.
    """
    matrices, share = experts or 1, efficiency(rows, profile.half_speed_rows, chance=experts is not None)
    flops = 2.0 * rows * inner * columns * matrices
    speed = profile.flops * profile.gemm_efficiency * share
    moved = ITEMSIZE * matrices * (inner * columns + rows * (inner + columns))
    memory = profile.memory * profile.memory_efficiency
    one = max(flops / speed, moved / memory)
    if not backward:
        return one
    gradients = moved + ITEMSIZE * matrices * inner * columns
    return one + max(flops / speed, gradients / memory)
