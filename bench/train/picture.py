"""The picture of a run: the losses, who sent how much to whom, and how the experts were used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from bench.style import BLUE, GREY, INK, ORANGE, PALE, STYLE, short
from bench.train.agreement import Agreement
from bench.train.options import Options
from bench.train.results import Training

LOOKS: dict[str, dict[str, Any]] = {
    "local": {"color": PALE, "linewidth": 10, "label": "all experts on every rank"},
    "all_to_all": {"color": ORANGE, "linewidth": 6, "alpha": 0.55, "label": "all-to-all collectives"},
    "all_gather": {"color": "#009E73", "linewidth": 4.4, "alpha": 0.6, "label": "all-gather, reduce-scatter"},
    "replicated": {"color": "#CC79A7", "linewidth": 3.2, "label": "all tokens on every rank"},
    "symm": {"color": BLUE, "linewidth": 1.8, "label": "symmetric memory"},
}
SENT = {
    "symm": "One copy per token and rank",
    "all_to_all": "One row per slot",
    "all_gather": "Every token to every rank",
    "replicated": "Every rank has all tokens",
    "local": "Every rank has all experts",
}
THRESHOLD = {"color": GREY, "linewidth": 0.9, "linestyle": (0, (2, 3)), "zorder": 0}
MOST_SHARES = 3.0
"""Where the colours of an expert's load end, in even shares."""


def draw(
    path: Path,
    options: Options,
    trainings: dict[str, Training],
    landmarks: Sequence[tuple[str, float]],
    agreement: Agreement | None,
) -> None:
    """Write the picture of one training or several.

    Args:
        path: of the PNG.
        options: of the run.
        trainings: by the dispatcher's name; the last two panels show the first.
        landmarks: names and losses of simpler models, to compare with.
        agreement: of several trainings.
    """
    name, first = next(iter(trainings.items()))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15.5, 5.4), dpi=150, facecolor="white")
        grid = figure.add_gridspec(
            2, 3, width_ratios=[1.2, 0.95, 1.12], height_ratios=[3.1, 1], left=0.052, right=0.985,
            bottom=0.105, top=0.835, wspace=0.19, hspace=0.14,
        )  # fmt: skip
        losses = figure.add_subplot(grid[0, 0] if agreement else grid[:, 0])
        _draw_losses(losses, trainings, landmarks)
        if agreement:
            _draw_difference(figure.add_subplot(grid[1, 0], sharex=losses), agreement)
            losses.tick_params(labelbottom=False)
            number = ("Two", "Three", "Four", "Five")[len(trainings) - 2]
            curves = "one curve" if agreement.agree else f"{'two' if number == 'Two' else 'several'} curves"
            _title(losses, f"{number} dispatchers, {curves}")
        else:
            losses.set_xlabel("step")
            _title(losses, "The loss")
        _subtitle(losses, "a byte-level transformer with experts learns Python's help texts")

        sent = figure.add_subplot(grid[:, 1])
        _draw_sent(sent, first)
        _title(sent, SENT[name])
        _subtitle(sent, _about_sent(name, first.rows_sent, options.slots))

        loads = figure.add_subplot(grid[:, 2])
        _title(loads, "How the experts share the work")
        _subtitle(loads, f"slots of each of the {options.experts} experts; 1 is an even share")
        _draw_loads(figure, loads, options, first)
        figure.savefig(path)


def _title(axes: Axes, text: str) -> None:
    axes.figure.text(axes.get_position().x0, 0.945, text, fontsize=14, fontweight="bold", va="center")


def _subtitle(axes: Axes, text: str) -> None:
    axes.figure.text(axes.get_position().x0, 0.885, text, fontsize=10.5, color=GREY, va="center")


def _draw_losses(axes: Axes, trainings: dict[str, Training], landmarks: Sequence[tuple[str, float]]) -> None:
    shown = next(iter(trainings))
    first = trainings[shown].losses
    steps, last = len(first), first[-1]
    for name, look in LOOKS.items():
        if name in trainings:
            axes.plot(range(1, steps + 1), trainings[name].losses, solid_capstyle="round", **look)
    for text, value in landmarks:
        axes.axhline(value, **THRESHOLD)
        axes.text(
            steps, value + 0.05, f"{text}: {value:.2f}", color=GREY, fontsize=9, ha="right", va="bottom"
        )
    place = (steps, min(first[-(steps // 8 + 1) :]))
    end = {"color": LOOKS[shown]["color"], "fontsize": 11, "fontweight": "bold", "ha": "right", "va": "top"}
    axes.annotate(f"{last:.2f}", place, (0, -9), textcoords="offset points", **end)
    axes.set_xlim(0, steps + 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    axes.set_ylim(min(1.0, last - 0.5), max(6.0, max(first) + 0.2))
    axes.set_ylabel("loss, nats per byte")
    axes.yaxis.set_label_coords(-0.095, 0.5)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.9), frameon=False, fontsize=10.5)


def _draw_difference(axes: Axes, agreement: Agreement) -> None:
    difference, zero = np.nan_to_num(agreement.differences, nan=1.0, posinf=1.0), 1e-8
    step = np.arange(1, len(difference) + 1)
    equal = difference == 0
    axes.plot(step[equal], np.full(equal.sum(), zero), "o", color=PALE, markersize=3)
    axes.plot(step[~equal], difference[~equal], "o", color=BLUE, markersize=3.5)
    axes.plot(step, agreement.allowed, drawstyle="steps-mid", **THRESHOLD)
    axes.text(
        step[0],
        1.6 * max(agreement.allowed[: len(step) // 2 + 1]),
        "what rounding explains",
        color=GREY,
        fontsize=9,
        va="bottom",
    )
    axes.set_yscale("log")
    powers = range(-6, 1, 2)
    axes.set_yticks(
        [zero, *(10.0**power for power in powers)], ["0", *(f"$10^{{{power}}}$" for power in powers)]
    )
    axes.minorticks_off()
    axes.set_ylim(zero / 3, 3 * np.nanmax([3e-4, difference.max(), *agreement.allowed]))
    axes.set_xlabel("step")
    axes.set_ylabel("difference")
    axes.yaxis.set_label_coords(-0.095, 0.5)


def _draw_sent(axes: Axes, training: Training) -> None:
    sent_WW = np.array(training.sent)
    ranks, even = len(sent_WW), max(1.0, sent_WW.mean())
    colours = LinearSegmentedColormap.from_list("rows", ["#FFFFFF", "#9CCBEA", "#3E9BD1"])
    middle: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": min(10.5, 68 / (ranks + 1))}
    for sender in range(ranks):
        for receiver in range(ranks):
            rows = sent_WW[sender, receiver]
            colour = colours(rows / even - 0.5)
            axes.add_patch(
                Rectangle((receiver, sender), 1, 1, facecolor=colour, edgecolor="white", linewidth=2)
            )
            axes.text(receiver + 0.5, sender + 0.5, short(rows), **middle)
        axes.text(ranks + 0.5, sender + 0.5, short(sent_WW[sender].sum()), color=GREY, **middle)
        axes.text(sender + 0.5, ranks + 0.5, short(sent_WW[:, sender].sum()), color=GREY, **middle)
    axes.text(ranks + 0.5, ranks + 0.5, short(sent_WW.sum()), fontweight="bold", **middle)
    axes.set_xlim(0, ranks + 1)
    axes.set_ylim(ranks + 1, 0)
    places = [*map(str, range(ranks)), "all"]
    axes.set_xticks(np.arange(ranks + 1) + 0.5, places)
    axes.set_yticks(np.arange(ranks + 1) + 0.5, places)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank", labelpad=4)


def _about_sent(name: str, rows: int, slots: int) -> str:
    """Return what became of the slots.

    Example:
        >>> _about_sent("symm", 30_000, 40_000)
        '40.0k slots travel as 30.0k copies: 25% fewer rows'
        >>> _about_sent("all_gather", 60_000, 40_000)
        '60.0k tokens travel, whatever their 40.0k slots'
    """
    if name in ("replicated", "local"):
        return "a dispatch sends no rows to other ranks"
    if name == "all_gather":
        return f"{short(rows)} tokens travel, whatever their {short(slots)} slots"
    if name == "symm":
        return f"{short(slots)} slots travel as {short(rows)} copies: {1 - rows / slots:.0%} fewer rows"
    return f"{short(rows)} slots travel as rows of their own"


def _draw_loads(figure: Figure, axes: Axes, options: Options, training: Training) -> None:
    load_SE = np.array(training.loads)
    share_ES = (load_SE / load_SE.sum(1, keepdims=True) * options.experts).T
    image = axes.imshow(
        share_ES, aspect="auto", interpolation="nearest",
        cmap=LinearSegmentedColormap.from_list("share", [BLUE, "#FFFFFF", ORANGE]),
        norm=TwoSlopeNorm(1.0, 0.0, MOST_SHARES), extent=(0.5, options.steps + 0.5, options.experts, 0),
    )  # fmt: skip
    local = options.experts // options.ranks
    for rank in range(1, options.ranks):
        axes.axhline(rank * local, color=INK, linewidth=0.8)
    axes.set_yticks((np.arange(options.ranks) + 0.5) * local, [str(rank) for rank in range(options.ranks)])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step")
    axes.set_ylabel("experts of rank", labelpad=6)
    bar = figure.colorbar(image, ax=axes, ticks=[0, 1, 2, 3], pad=0.03, aspect=30, extend="max")
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
