"""The picture of what placements make of a routing: each rank's rows, and what crosses the links."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.plot.load import Measured, Run
from bench.plot.matrix import rows_of
from bench.plot.panels import HEAD, WIDTH, figure_of, write_head
from bench.style import BLUE, GREY, INK, ORANGE, PALE, short

LEFT, GAP, TITLE, PANEL, FOOT = 0.95, 0.3, 0.75, 1.9, 0.55
"""Inches: left of the first panel, between two, above a line of them, of its height, below it."""


def placements(run: Run) -> Figure | None:
    """Draw the rows of each rank's experts in a dispatch of symm: a routing a line, a placement a column."""
    routings: dict[tuple[str, str], list[Measured]] = {}
    for one in run.measured:
        if one.op == "dispatch" and one.backend == "symm" and "rows_max_over_mean" in one.metrics:
            routings.setdefault((one.case["shape"], one.case["routing"]), []).append(one)
    routings = {name: part for name, part in routings.items() if len(part) > 1}
    if not routings:
        return None
    columns = max(map(len, routings.values()))
    across = (max(WIDTH, LEFT + columns * 2.0) - LEFT) / columns - GAP
    figure = figure_of(LEFT + columns * (across + GAP), HEAD + len(routings) * (TITLE + PANEL + FOOT))
    about = "rows of each rank's experts in a dispatch; all ranks wait for the busiest; dashed: the mean"
    write_head(figure, run, "What a placement does to a routing", about)
    width, height = figure.get_size_inches()
    for line, (name, part) in enumerate(routings.items()):
        bottom = height - HEAD - line * (TITLE + PANEL + FOOT) - TITLE - PANEL
        most = max(_rows(one, run.ranks).max() for one in part)
        for column, one in enumerate(part):
            left = LEFT + column * (across + GAP)
            axes = figure.add_axes((left / width, bottom / height, across / width, PANEL / height))
            _draw(axes, one, run.ranks, most)
            axes.set_ylabel(f"{', '.join(name)}\nrows" if column == 0 else "")
            axes.tick_params(labelleft=column == 0)
    return figure


def _rows(one: Measured, ranks: int) -> np.ndarray:
    return np.array([one.metrics[f"expert_rows[{rank}]"] for rank in range(ranks)])


def _draw(axes: Axes, one: Measured, ranks: int, most: float) -> None:
    rows_W, copies_WW = _rows(one, ranks), rows_of(one, ranks)
    crossed = copies_WW.sum() - np.trace(copies_WW)
    colours: Sequence[str] = [ORANGE if rows == rows_W.max() else BLUE for rows in rows_W]
    axes.bar(range(ranks), rows_W, 0.72, color=colours)
    axes.axhline(rows_W.mean(), color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 1.05 * most)
    axes.set_xticks(range(ranks))
    axes.set_xlabel("rank")
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color=PALE, linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    write = partial(axes.text, 0, transform=axes.transAxes)
    write(1.24, one.case["placement"], fontsize=10.5, fontweight="bold")
    write(1.14, f"busiest rank {one.metrics['rows_max_over_mean']:.2f}x the mean", fontsize=9)
    write(1.05, f"{short(crossed)} copies over links", fontsize=9, color=GREY)
