"""The pictures of a benchmark: latency, bandwidth, speed-up, and who sent how many rows to whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench.plot.load import Measured, Run, size
from bench.plot.loads import placements
from bench.plot.matrix import copies
from bench.plot.panels import LINE, LOOKS, label_lines, log_axis, panels, write_beside
from bench.style import BLUE, GREY, INK, PALE, STYLE

RATES = ("logical_bandwidth", "remote_bandwidth")
UNITS = (("GB/s", 1.0), ("MB/s", 1e-3), ("kB/s", 1e-6))
"""Of rates, each with one of it in GB/s, as files have them."""

APART = 0.36
"""How far two backends stand apart on their line, of which there is one for each case."""


def draw(run: Run, folder: Path) -> list[Path]:
    """Write the pictures that there are figures for; return their files.

    Args:
        run: of `load`.
        folder: to write to; it exists.
    """
    files = []
    with matplotlib.rc_context(STYLE):
        for name, maker in PICTURES.items():
            figure = maker(run)
            if figure is not None:
                files.append(folder / f"{name}.png")
                figure.savefig(files[-1])
    return files


def latency(run: Run) -> Figure | None:
    """Draw the median of the slowest rank's times, from the 20th to the 80th percentile, of every case."""
    measured = run.measured
    about = "median, and from the 20th to the 80th percentile; logarithmic"
    title = "Latency of the slowest rank"
    figure, made = panels(run, measured, title, about, _line(measured), _backends(measured))
    low = min(one.metrics["latency_p20"] for one in measured)
    high = max(one.metrics["latency_p80"] for one in measured)
    for axes, part in made:
        for one, y in _lines(axes, part):
            p20, p50, p80 = (one.metrics[f"latency_p{p}"] for p in (20, 50, 80))
            colour = LOOKS[one.backend][0]
            axes.plot([p20, p80], [y, y], color=colour, linewidth=2.5, alpha=0.55, solid_capstyle="butt")
            axes.plot(p50, y, "o", color=colour, markersize=5.5)
            write_beside(axes, p80, y, _time(p50), colour, 6)
        log_axis(axes, _time)
        axes.set_xlim(low / 1.6, high * max(2.0, (high / low) ** 0.3))
        axes.set_xlabel("time")
    return figure


def bandwidth(run: Run) -> Figure | None:
    """Draw what all rows, and what crossed a link, make of the median time; and that by size."""
    measured = [one for one in run.measured if "remote_bandwidth" in one.metrics]
    if not measured:
        return None
    title, about = "Bandwidth of the busiest rank", "solid: what crossed a link; pale: all of its rows"
    unit, measured = _in_one_unit(measured)
    peak = next((one.metrics["link_peak"] for one in measured if "link_peak" in one.metrics), None)
    if peak is not None:
        about += f"; dotted: the link's peak, {peak:g} {unit}"
    figure, made = panels(run, measured, title, about, _line(measured), _backends(measured), ["even"])
    rates = [
        one.metrics[f"{kind}_bandwidth"]
        for one in measured if one.op != "even" for kind in ("logical", "remote")
    ]  # fmt: skip
    for axes, part in made:
        if part[0].op == "even":
            _draw_sweep(axes, part, peak, unit)
            continue
        for one, y in _lines(axes, part):
            colour = LOOKS[one.backend][0]
            logical, remote = (one.metrics[f"{kind}_bandwidth"] for kind in ("logical", "remote"))
            thick = min(0.3, 0.7 / len(_backends(part)))
            axes.barh(y, logical, thick, color=colour, alpha=0.3)
            axes.barh(y, remote, thick, color=colour)
            write_beside(axes, max(logical, remote), y, _digits(remote), colour)
        axes.set_xlim(0, 1.2 * max(*rates, peak or 0.0))
        if peak is not None:
            axes.axvline(peak, color=GREY, linewidth=0.9, linestyle=(0, (2, 3)), zorder=0)
        axes.set_xlabel(unit)
    return figure


def _in_one_unit(measured: Sequence[Measured]) -> tuple[str, list[Measured]]:
    """Return the unit in which the highest rate is a number of 1 to 1000, and all rates in it."""
    most = max(one.metrics[name] for one in measured for name in RATES if name in one.metrics)
    unit, of_one = next(((unit, one) for unit, one in UNITS if most >= one), UNITS[-1])
    rates = [
        {name: value / of_one for name, value in one.metrics.items() if name in (*RATES, "link_peak")}
        for one in measured
    ]
    return unit, [replace(one, metrics=metrics) for one, metrics in zip(measured, rates, strict=True)]


def _draw_sweep(axes: Axes, part: Sequence[Measured], peak: float | None, unit: str) -> None:
    """Draw the bandwidth of even exchanges by their size."""
    sizes = sorted({float(one.case["bytes_per_peer"]) for one in part})
    for backend in _backends(part):
        mine = sorted(
            (float(one.case["bytes_per_peer"]), one.metrics["remote_bandwidth"])
            for one in part if one.backend == backend
        )  # fmt: skip
        axes.plot(*zip(*mine, strict=True), "o-", color=LOOKS[backend][0], markersize=4.5)
    if peak is not None:
        axes.axhline(peak, color=GREY, linewidth=0.9, linestyle=(0, (2, 3)), zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes[:: -(-len(sizes) // 4)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.grid(color=PALE, linewidth=0.6, alpha=0.6)
    axes.set_xlabel("from each rank to each")
    axes.set_ylabel(f"{unit} across a link")


def speedup(run: Run) -> Figure | None:
    """Draw how many times as long as this library's the collectives' median is, where a case has both."""
    theirs = {one.key: one.metrics["latency_p50"] for one in run.measured if one.backend == "all_to_all"}
    both = [
        replace(one, metrics={"ratio": theirs[one.key] / one.metrics["latency_p50"]})
        for one in run.measured if one.backend == "symm" and one.key in theirs
    ]  # fmt: skip
    if not both:
        return None
    about = "median time of the collectives over that of symm_a2a; right of 1, symm_a2a is faster"
    figure, made = panels(run, both, "Speed-up over all-to-all collectives", about, LINE)
    low = min([1.0, *(one.metrics["ratio"] for one in both)])
    high = max([1.0, *(one.metrics["ratio"] for one in both)])
    # Room for the numbers at the bars' ends.
    room = max(1.5, (high / low) ** 0.45)
    for axes, part in made:
        label_lines(axes, [one.label for one in part])
        for y, one in enumerate(part):
            ratio = one.metrics["ratio"]
            axes.plot([1, ratio], [y, y], color=BLUE, linewidth=5, solid_capstyle="butt")
            write_beside(axes, ratio, y, f"{ratio:.2g}x", BLUE, 5 if ratio >= 1 else -5)
        axes.axvline(1, color=INK, linewidth=0.9)
        log_axis(axes, lambda value: f"{value:g}x")
        axes.set_xlim(low / room if low < 1 else 1 / 1.2, high * room if high > 1 else 1.2)
        if high * room / (low / room) < 30:
            axes.set_xticks(
                [
                    tick
                    for tick in (0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10)
                    if low / room < tick < high * room
                ]
            )
        axes.set_xlabel("speed-up, logarithmic")
    return figure


PICTURES: dict[str, Callable[[Run], Figure | None]] = {
    "latency": latency,
    "bandwidth": bandwidth,
    "speedup": speedup,
    "copies": copies,
    "placements": placements,
}
"""By name; none where a run has no figures for one."""


def _backends(measured: Sequence[Measured]) -> list[str]:
    return [name for name in LOOKS if any(one.backend == name for one in measured)]


def _line(measured: Sequence[Measured]) -> float:
    """Return the height of a case's line, in inches: room for each backend's number."""
    return LINE * max(1.25, 0.55 * len(_backends(measured)))


def _lines(axes: Axes, part: Sequence[Measured]) -> list[tuple[Measured, float]]:
    """Label the lines of a panel; return what is drawn, each with its place."""
    labels = list(dict.fromkeys(one.label for one in part))
    label_lines(axes, labels)
    names = _backends(part)
    apart, middle = min(APART, 0.8 / len(names)), (len(names) - 1) / 2
    return [(one, labels.index(one.label) + (names.index(one.backend) - middle) * apart) for one in part]


def _time(microseconds: float) -> str:
    """Return a time in a few characters.

    Example:
        >>> _time(3.14159), _time(314.159), _time(31415.9), _time(2e6)
        ('3.1 us', '314 us', '31 ms', '2 s')
    """
    for unit, one in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= one:
            return f"{_digits(microseconds / one)} {unit}"
    return f"{_digits(microseconds)} us"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
