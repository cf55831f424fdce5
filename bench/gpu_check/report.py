"""What was found, for a reader and as JSON."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

from bench.gpu_check.journal import FAIL

Entries = list[dict[str, Any]]


def as_json(
    device: str, environment: dict[str, Any], driver: str | None, entries: Entries, seconds: float
) -> Any:
    """Return everything as one object."""
    checks = [_without_kind(entry) for entry in entries if entry["entry"] == "check"]
    gpus, versions = environment.get("gpus", []), environment.get("versions", {})
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "gpu": gpus[0]["name"] if gpus and device != "cpu" else None,
        "driver": driver,
        "torch": versions.get("torch"),
        "triton": versions.get("triton"),
        "passed": bool(checks) and all(check["outcome"] != FAIL for check in checks),
        "seconds": seconds,
        "environment": environment,
        "checks": checks,
        "figures": [_without_kind(entry) for entry in entries if entry["entry"] == "figure"],
    }


def _without_kind(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "entry"}


def text_of(result: dict[str, Any]) -> str:
    """Return the tables: checks, then figures."""
    checks, figures = result["checks"], result["figures"]
    rows = [[check["outcome"], check["name"], f"{check['seconds']:.1f} s"] for check in checks]
    parts = [_table(["check", "what", "time"], rows, texts=2)]
    parts += [_kernels(result, of) for of in _groups(figures)]
    overhead = [figure for figure in figures if figure["kind"] == "overhead"]
    if overhead:
        title = f"Forward and backward of a group of one, {overhead[0]['shape']}, "
        title += f"{overhead[0]['launches']} launches{_label(overhead[0])}"
        rows = [[figure["what"], f"{figure['us']:.1f}"] for figure in overhead]
        parts.append(title + "\n" + _table(["what", "us"], rows))
    failed = [check["name"] for check in checks if check["outcome"] == FAIL]
    below = [f for f in figures if f.get("verdict") == "below target"]
    words = [f"{len(checks) - len(failed)} checks passed, {len(failed)} failed"]
    words += [f"kernels below target: {len(below)}"] if result["device"] != "cpu" else []
    parts.append("; ".join(words) + f"; {result['seconds']:.0f} s")
    return "\n\n".join([*parts, *(f"FAIL {name}" for name in failed)])


def _groups(figures: Entries) -> list[Entries]:
    """Return the kernels' figures, those of each shape and variant together."""
    kernels = [figure for figure in figures if figure["kind"] == "kernel"]
    keys = dict.fromkeys((figure["shape"], figure["variant"]) for figure in kernels)
    return [[figure for figure in kernels if (figure["shape"], figure["variant"]) == key] for key in keys]


def _kernels(result: dict[str, Any], figures: Entries) -> str:
    """Return the table of a shape and variant."""
    first = figures[0]
    title = (
        f"{first['shape']}, {first['variant']}: {first['tokens']} tokens of {first['hidden']} on each of "
        f"{first['ranks']} ranks, all on this device{_label(first)}\n"
        f"{first['capacity']} rows a rank; those past the last expert's are zeros, written and counted"
    )
    copies = [f for f in result["figures"] if f["kind"] == "copy" and f["shape"] == first["shape"]]
    if not first["interpreted"] and copies:
        title += (
            f"\na plain copy: {copies[0]['gb_s']:.0f} GB/s; no kernel at all: {copies[0]['empty_us']:.1f} us"
            "; local: stores to peers stay on this device"
        )
    headers = ["kernel", "us", "p20", "p80", "MB", "GB/s", "of a copy", "target", ""]
    rows = []
    for figure in figures:
        notes = [figure["verdict"], "local" if figure["local"] else ""]
        rows.append(
            [
                figure["kernel"],
                *(f"{figure[name]:.1f}" for name in ("us", "us_p20", "us_p80")),
                f"{figure['bytes'] / 1e6:.2f}",
                *(
                    _or_dash(figure[name], unit)
                    for name, unit in (("gb_s", ""), ("percent", " %"), ("target", " %"))
                ),
                ", ".join(filter(None, notes)),
            ]
        )
    us, moved = (sum(figure[name] for figure in figures) for name in ("us", "bytes"))
    rows.append(["sum", f"{us:.1f}", "", "", f"{moved / 1e6:.2f}", *[""] * 4])
    return title + "\n" + _table(headers, rows)


def _label(figure: dict[str, Any]) -> str:
    return ", interpreted: no figures of the library's speed" if figure["interpreted"] else ""


def _or_dash(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Return aligned columns: the first `texts` and the last, where it has no header, to the left.

    Example:
        >>> print(_table(["kernel", "us"], [["count", "4.0"], ["scatter", "120.5"]]))
        kernel      us
        -------  -----
        count      4.0
        scatter  120.5
    """
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])
    aligned = [
        "  ".join(
            cell.ljust(width) if place < texts or not header else cell.rjust(width)
            for place, (cell, width, header) in enumerate(zip(line, widths, headers, strict=True))
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in aligned)
