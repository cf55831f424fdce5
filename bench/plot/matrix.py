"""The picture of who sends how many rows to whom."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from bench.plot.load import Measured, Run
from bench.plot.panels import HEAD, LOOKS, WIDTH, figure_of, write_head
from bench.style import INK, PALE, short

LEFT, GAP, TITLE = 0.85, 0.62, 0.35
"""Inches: left of the first matrix, between two, above the first line of them."""

COLUMNS = 5
"""Routings beside each other, at most; then comes another band of them."""


def copies(run: Run) -> Figure | None:
    """Draw the rows that each rank sends to each in a dispatch: a backend a line, a routing a column.

    The backends of a single routing stand beside each other.
    """
    found = {
        (one.backend, one.label): rows_of(one, run.ranks)
        for one in run.measured
        if one.op == "dispatch" and "copies[0,0]" in one.metrics
    }
    if not found:
        return None
    labels = list(dict.fromkeys(label for _, label in found))
    backends = [backend for backend in LOOKS if any(backend == name for name, _ in found)]
    beside = len(labels) == 1
    columns = len(backends) if beside else min(COLUMNS, len(labels))
    lines = 1 if beside else len(backends)
    # Two or three beside each other fill the width of the head.
    side = max(1.9, 0.26 * run.ranks, (WIDTH - LEFT) / max(2, columns) - GAP)
    band = TITLE + lines * (side + GAP)
    figure = figure_of(LEFT + columns * (side + GAP), HEAD + -(-len(labels) // columns) * band + 0.15)
    about = "from each rank to each: symm_a2a sends a copy per token and rank, collectives a row per slot"
    write_head(figure, run, "Rows that a dispatch sends", about)
    width, height = figure.get_size_inches()
    for (backend, label), rows_WW in found.items():
        line, place = backends.index(backend), labels.index(label)
        line, place = (0, line) if beside else (line, place)
        above, column = divmod(place, columns)
        left = LEFT + column * (side + GAP)
        bottom = height - HEAD - above * band - TITLE - side - line * (side + GAP)
        axes = figure.add_axes((left / width, bottom / height, side / width, side / height))
        # One scale for a routing, so that copies and slots compare.
        most = max(rows.max() for (_, other), rows in found.items() if other == label)
        _draw_matrix(axes, rows_WW, most)
        total = f"{short(rows_WW.sum())} {'copies' if backend == 'symm' else 'rows'}"
        axes.set_title(f"{label}\n{total}" if line == 0 else total, fontsize=9.5, color=INK)
        axes.set_xlabel("to rank" if line == lines - 1 else "")
        axes.set_ylabel(f"{LOOKS[backend][1]}\nfrom rank" if column == 0 or beside else "")
    return figure


def rows_of(one: Measured, ranks: int) -> np.ndarray:
    """Return `(W, W)`, the rows from each rank to each."""
    return np.array([[one.metrics[f"copies[{i},{j}]"] for j in range(ranks)] for i in range(ranks)])


def _draw_matrix(axes: Axes, rows_WW: np.ndarray, most: float) -> None:
    ranks = len(rows_WW)
    colours = LinearSegmentedColormap.from_list("rows", ["#FFFFFF", "#9CCBEA", "#3E9BD1"])
    axes.imshow(rows_WW, cmap=colours, vmin=0, vmax=max(1.0, most))
    for (sender, receiver), rows in np.ndenumerate(rows_WW):
        axes.text(
            receiver, sender, short(rows), ha="center", va="center", fontsize=min(9.0, 80 / ranks),
            color=INK if rows else PALE,
        )  # fmt: skip
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(ranks))
    axes.tick_params(length=0, labelsize=8.5)
    # White lines, so that an even matrix is still one of ranks.
    axes.set_xticks(np.arange(ranks - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(ranks - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
