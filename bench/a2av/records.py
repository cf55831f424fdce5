"""The tidy file: one row per case, backend and metric."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.a2av.cases import Mode
from bench.a2av.figures import Result

CASE_COLUMNS: tuple[str, ...] = (
    "op", "backend", "shape", "routing", "placement", "ranks", "tokens", "hidden", "experts", "top_k",
    "dtype", "capacity", "bytes_per_peer", "graph",
)  # fmt: skip
COLUMNS: tuple[str, ...] = (
    *CASE_COLUMNS,
    "metric",
    "value",
    "unit",
    "note",
    "device",
    "torch",
    "triton",
    "date",
    "mode",
)


@dataclass(frozen=True)
class Setting:
    """Where and when a benchmark ran.

    Attributes:
        device: the GPU's name, or "CPU".
        torch: its version.
        triton: its version.
        date: UTC, to the second.
        mode: "interpreted" where times say nothing about the library's speed.
    """

    device: str
    torch: str
    triton: str
    date: str
    mode: Mode


def to_rows(results: Iterable[Result], setting: Setting) -> list[dict[str, Any]]:
    """Return a row per metric, with all of `COLUMNS`; what does not apply is None."""
    return [
        {
            **asdict(result.case),
            # The collectives have rows as they come, whatever was asked for.
            "capacity": result.case.capacity if result.backend == "symm" else "exact",
            "backend": result.backend,
            "graph": result.graph,
            "metric": metric.name,
            "value": _rounded(metric.value),
            "unit": metric.unit,
            "note": metric.note,
            **asdict(setting),
        }
        for result in results
        for metric in result.metrics
    ]


def _rounded(value: float | None) -> float | None:
    """Return a figure to six digits, a count as it is."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the same rows as a list of objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{name: row[name] for name in COLUMNS} for row in rows], indent=1) + "\n")
