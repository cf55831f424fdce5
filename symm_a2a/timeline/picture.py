"""A timeline as a picture: a row for each lane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from symm_a2a.errors import EnvironmentUnsupportedError, RecordingError
from symm_a2a.timeline.exchanges import Interval, Timeline

_COLORS = {"compute": "#4c78a8", "launch and join": "#9ecae9", "in flight": "#f2b701", "waiting": "#d64550"}
_INK = "#333333"


def save_picture(path: str | Path, timelines: dict[str, Timeline], title: str = "") -> None:
    """Draw timelines one above the other, over one scale of time.

    In each a row for every lane: above what the rank did for that lane's micro-batch, below what was in
    flight. Red is time in which it waited.

    Args:
        path: of the PNG.
        timelines: by what is to stand above each.
        title: of the whole.

    Raises:
        RecordingError: no timeline to draw.
        EnvironmentUnsupportedError: matplotlib is not installed.
    """
    if not timelines:
        raise RecordingError("expected at least one timeline to draw, got none")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise EnvironmentUnsupportedError(
            "expected matplotlib, which draws the picture, got none; pip install matplotlib, or save_trace"
        ) from error
    rows = sum(len(timeline.lanes()) for timeline in timelines.values())
    figure = Figure(figsize=(12, 1.3 + 0.75 * rows + 0.7 * len(timelines)), layout="constrained")
    all_axes = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False,
        height_ratios=[max(1, len(timeline.lanes())) for timeline in timelines.values()],
    )[:, 0]  # fmt: skip
    longest = max(timeline.span.seconds for timeline in timelines.values())
    unit, per_second = ("s", 1.0) if longest >= 2 else ("ms", 1e3) if longest >= 2e-3 else ("µs", 1e6)
    for axes, (name, timeline) in zip(all_axes, timelines.items(), strict=True):
        _draw(axes, timeline, per_second)
        axes.set_title(name, loc="left", fontsize=10, color=_INK)
    all_axes[-1].set_xlabel(unit, color=_INK)
    all_axes[-1].set_xlim(0, longest * per_second)
    figure.legend(
        handles=[Patch(color=color, label=label) for label, color in _COLORS.items()],
        loc="outside lower center", ncols=len(_COLORS), frameon=False, fontsize=9,
    )  # fmt: skip
    if title:
        figure.suptitle(title, fontsize=12, color=_INK)
    figure.savefig(path, dpi=130)


def _draw(axes: Any, timeline: Timeline, per_second: float) -> None:
    lanes = timeline.lanes()

    def bar(kind: str, lane: int, bottom: float, height: float, intervals: list[Interval]) -> None:
        pieces = [((i.begin - timeline.span.begin) * per_second, i.seconds * per_second) for i in intervals]
        axes.broken_barh(pieces, (lanes.index(lane) + bottom, height), color=_COLORS[kind], linewidth=0)

    for lane in lanes:
        mine = [exchange for exchange in timeline.exchanges if exchange.lane == lane]
        computed = [Interval(c.begin, c.end) for c in timeline.compute() if c.lane == lane]
        waits = [exchange.wait for exchange in mine]
        bar("compute", lane, 0.1, 0.45, computed)
        bar("launch and join", lane, 0.1, 0.45, [i for e in mine for i in (e.launch, e.join)])
        bar("in flight", lane, 0.6, 0.22, [exchange.flight for exchange in mine])
        bar("waiting", lane, 0.1, 0.45, waits)
    axes.set_ylim(max(1, len(lanes)), 0)
    axes.set_yticks([row + 0.45 for row in range(len(lanes))], [f"lane {lane}" for lane in lanes])
    axes.tick_params(colors=_INK, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
