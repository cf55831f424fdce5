"""What the pictures share: a head that says what and where, and panels of one operation each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench.plot.load import Measured, Run
from bench.style import BLUE, GREY, INK, ORANGE, PALE

LOOKS = {
    "symm": (BLUE, "symm_a2a"),
    "all_to_all": (ORANGE, "all-to-all collectives"),
    # Green, purple and vermilion of Okabe and Ito.
    "all_gather": ("#009E73", "all-gather"),
    "replicated": ("#CC79A7", "replicated"),
    "local": ("#D55E00", "local"),
}
TITLES = {
    "dispatch": "Dispatch",
    "combine": "Combine",
    "forward-backward": "Forward and backward",
    "counts": "Count broadcast",
    "flags": "Flag round trip",
    "even": "Even all-to-all",
}
WARNING = "INTERPRETED, on CPUs in Triton's interpreter: no measure of the library's speed"

WIDTH, HEAD, TOP, FOOT, LINE, PANEL, GAP = 9.0, 1.2, 0.3, 0.75, 0.36, 3.0, 0.25
"""Inches: of the head, across and down; of a panel's title, of its axis, of a line of it; of its width, at
least; between panels."""


def figure_of(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches, wide enough for the head."""
    return Figure(figsize=(max(width, WIDTH), height), dpi=150, facecolor="white")


def write_head(figure: Figure, run: Run, title: str, about: str, backends: Sequence[str] = ()) -> None:
    """Write the title, what is shown and where it was measured, whether interpreted; and a legend."""
    width, height = figure.get_size_inches()

    def write(text: str, inches: float, **look: Any) -> None:
        figure.text(0.2 / width, 1 - inches / height, text, va="center", **look)

    write(title, 0.26, fontsize=14, fontweight="bold")
    write(about, 0.53, fontsize=10, color=GREY)
    write(_setting(run), 0.75, fontsize=8.5, color=GREY)
    if run.interpreted:
        write(WARNING, 0.96, fontsize=9.5, fontweight="bold", color="#B3261E")
    if backends:
        marks = [Patch(color=LOOKS[backend][0], label=LOOKS[backend][1]) for backend in backends]
        figure.legend(
            handles=marks, loc="upper right", frameon=False, fontsize=10, ncols=len(marks),
            bbox_to_anchor=(1 - 0.1 / width, 1 - 0.12 / height), borderaxespad=0,
        )  # fmt: skip


def _setting(run: Run) -> str:
    cases = [one.case for one in run.measured if one.case["routing"] not in ("even", "none")]
    shapes = [
        f"{case['shape']}: {case['tokens']} tokens x {case['hidden']}, top-{case['top_k']} of "
        f"{case['experts']}, {case['dtype']}"
        for case in cases
    ]
    shapes = list(dict.fromkeys(shapes))
    if len(shapes) > 1:
        shapes = list(dict.fromkeys(case["shape"] for case in cases))
    parts = [f"{run.ranks} ranks, {run.setting['device']}", ", ".join(shapes)]
    if any(one.case["graph"] == "True" for one in run.measured):
        parts.append("symm_a2a as CUDA graphs")
    parts += [f"torch {run.setting['torch']}, triton {run.setting['triton']}", run.setting["date"][:10]]
    return "; ".join(part for part in parts if part)


def panels(
    run: Run,
    measured: Sequence[Measured],
    title: str,
    about: str,
    line: float,
    backends: Sequence[str] = (),
    curves: Sequence[str] = (),
) -> tuple[Figure, list[tuple[Axes, list[Measured]]]]:
    """Return a figure with a panel for each operation, at most three beside each other.

    Args:
        run: where it was measured.
        measured: what is drawn.
        title: of the figure.
        about: what it shows.
        line: inches of each label's line.
        backends: for a legend.
        curves: operations whose panel has curves, and no lines.
    """
    ops = [op for op in TITLES if any(one.op == op for one in measured)]
    parts = [[one for one in measured if one.op == op] for op in ops]
    columns = min(3, len(ops))
    tall = [
        max(1.6 if op in curves else 0.6, line * len({one.label for one in part}))
        for op, part in zip(ops, parts, strict=True)
    ]
    rows = [TOP + FOOT + max(tall[first : first + columns]) for first in range(0, len(ops), columns)]
    # Beside the panels of a column, room for the longest of their labels.
    rooms = [max(_room(part) for part in parts[column::columns]) for column in range(columns)]
    # One or two panels are as wide as the head.
    across = max(PANEL, (WIDTH - sum(rooms)) / columns - GAP)
    figure = figure_of(sum(rooms) + columns * (across + GAP), HEAD + sum(rows))
    write_head(figure, run, title, about, backends)
    width, height = figure.get_size_inches()
    made = []
    for number, (op, part) in enumerate(zip(ops, parts, strict=True)):
        row, column = divmod(number, columns)
        left = sum(rooms[: column + 1]) + column * (across + GAP)
        bottom = height - HEAD - sum(rows[:row]) - TOP - tall[number]
        axes = figure.add_axes((left / width, bottom / height, across / width, tall[number] / height))
        axes.set_title(TITLES[op], loc="left", fontsize=11, fontweight="bold", color=INK)
        made.append((axes, part))
    return figure, made


def _room(part: Sequence[Measured]) -> float:
    return 0.45 + 0.078 * max(len(one.label) for one in part)


def label_lines(axes: Axes, labels: Sequence[str]) -> None:
    """Give a panel a line for each label, from the top down."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=PALE, linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)


def write_beside(axes: Axes, x: float, y: float, text: str, colour: str, points: float = 5) -> None:
    """Write a number to the right of a place, or with negative points to its left."""
    axes.annotate(
        text, (x, y), (points, 0), textcoords="offset points", va="center",
        ha="left" if points > 0 else "right", fontsize=8.5, color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},
    )  # fmt: skip


def log_axis(axes: Axes, text: Callable[[float], str]) -> None:
    """Make the x axis logarithmic, with the numbers of a function."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=2)
