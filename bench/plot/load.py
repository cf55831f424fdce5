"""Reads a benchmark's CSV into what is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from bench.a2av.records import CASE_COLUMNS, COLUMNS

SETTING = ("mode", "device", "ranks", "torch", "triton", "date")
"""Columns in which all rows of a file are to be the same."""

EMPTY = ("bytes_per_peer", "value", "unit", "note")
"""Columns in which a row may have nothing."""

MODES = ("gpu", "interpreted")

LATENCIES = ("latency_p20", "latency_p50", "latency_p80")


@dataclass(frozen=True)
class Measured:
    """One case with one backend.

    Attributes:
        case: the columns of `CASE_COLUMNS`, as text.
        metrics: the figures by name.
        label: the shape and routing in a few words, or the size.
    """

    case: dict[str, str]
    metrics: dict[str, float]
    label: str

    @property
    def op(self) -> str:
        """The operation."""
        return self.case["op"]

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.case["backend"]

    @property
    def key(self) -> tuple[str, ...]:
        """What two backends of one case have in common."""
        apart = ("backend", "graph", "capacity")
        return tuple(value for name, value in self.case.items() if name not in apart)


@dataclass(frozen=True)
class Run:
    """A file's results, in its order; errors are left out.

    Attributes:
        measured: cases with their backends.
        setting: the columns of `SETTING`, as text.
    """

    measured: list[Measured]
    setting: dict[str, str]

    @property
    def ranks(self) -> int:
        """How many."""
        return int(self.setting["ranks"])

    @property
    def interpreted(self) -> bool:
        """Whether times say nothing about the library's speed."""
        return self.setting["mode"] == "interpreted"


def load(path: Path) -> Run:
    """Read a file that `python -m bench a2av` wrote.

    Raises:
        ValueError: the file is not there, not of this kind, of several runs, or has nothing to draw.
    """
    try:
        rows = pd.read_csv(path, keep_default_na=False, dtype=str)
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"expected a CSV file of `python -m bench a2av` at {path}, got {error}") from error
    missing = [name for name in COLUMNS if name not in rows.columns]
    if missing:
        raise ValueError(
            f"expected a CSV file of `python -m bench a2av`, got {path} without columns {', '.join(missing)}"
        )
    records: list[dict[str, str]] = rows.to_dict("records")  # pyright: ignore[reportAssignmentType]
    _check_whole(records, path)
    records = [record for record in records if record["metric"] != "error"]
    if not records:
        raise ValueError(f"expected results to draw in {path}, got none that passed their checks")
    for name in SETTING:
        values = sorted({record[name] for record in records})
        if len(values) > 1:
            raise ValueError(f"expected one {name} in {path}, got {', '.join(values)}; draw them apart")
    cases: dict[tuple[str, ...], dict[str, float]] = {}
    for record in records:
        metrics = cases.setdefault(tuple(record[name] for name in CASE_COLUMNS), {})
        if record["metric"] in metrics:
            raise ValueError(f"expected each metric of a case once in {path}, got {record['metric']} again")
        try:
            metrics[record["metric"]] = float(record["value"])
        except ValueError:
            wrong = f"{record['value']!r} as {record['metric']}"
            raise ValueError(f"expected numbers as values in {path}, got {wrong}") from None
    named = [(dict(zip(CASE_COLUMNS, case, strict=True)), metrics) for case, metrics in cases.items()]
    for _, metrics in named:
        absent = [name for name in _expected(metrics, int(records[0]["ranks"])) if name not in metrics]
        if absent:
            raise ValueError(f"expected {absent[0]} of every case in {path}, got a case without")
    shapes = {case["shape"] for case, _ in named if case["routing"] not in ("even", "none")}
    measured = [Measured(case, metrics, _label(case, len(shapes) > 1)) for case, metrics in named]
    return Run(measured, {name: records[0][name] for name in SETTING})


def _check_whole(records: list[dict[str, str]], path: Path) -> None:
    """Check that every row has all that it must have.

    Raises:
        ValueError: says which row ends where; the first one below the head is row 1.
    """
    for number, record in enumerate(records, start=1):
        for name in COLUMNS:
            if name not in EMPTY and not record[name]:
                raise ValueError(
                    f"expected whole rows in {path}, got row {number} of {len(records)} without {name}; "
                    "the file may be cut off"
                )
        if record["mode"] not in MODES:
            raise ValueError(
                f"expected {' or '.join(MODES)} as mode in {path}, got {record['mode']!r} in row {number} of "
                f"{len(records)}; the file may be cut off"
            )


def _expected(metrics: dict[str, float], ranks: int) -> list[str]:
    """Return the metrics that a case must have, given those that it has."""
    names = [*LATENCIES]
    if "copies[0,0]" in metrics:
        names += [f"copies[{i},{j}]" for i in range(ranks) for j in range(ranks)]
    return names


def _label(case: dict[str, str], many_shapes: bool) -> str:
    if case["bytes_per_peer"]:
        return size(float(case["bytes_per_peer"]))
    if case["routing"] == "none":
        return "barrier"
    words = [case["shape"]] if many_shapes else []
    words += [case["routing"], case["placement"]]
    return ", ".join(word for word in words if word != "contiguous")


def size(count: float) -> str:
    """Return a number of bytes in a few characters.

    Example:
        >>> size(512), size(65536), size(4 * 2**20)
        ('512 B', '64 KiB', '4 MiB')
    """
    for unit, bytes_of_one in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= bytes_of_one:
            return f"{count / bytes_of_one:.3g} {unit}"
    return f"{count:.0f} B"
