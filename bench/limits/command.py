"""`python -m bench limits`: bytes, and the shortest times in which they could move."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from bench.limits.budget import budget_of, dispatch_overhead, rows_for_slots, whole_overhead
from bench.limits.hardware import HARDWARE, Hardware
from bench.limits.load import expected
from bench.limits.options import Options
from bench.limits.table import tables_of
from bench.limits.traffic import backward, forward
from bench.outputs import prepare
from bench.shapes import SHAPES


def run(options: Options) -> int:
    """Print the tables; return the exit code: 0, or 2 if options do not fit or a file cannot be written."""
    try:
        options.check()
        prepare(options.json)
    except ValueError as error:
        print(f"bench limits: {error}", file=sys.stderr)
        return 2
    tables = tables_of(options.shapes, options.hardware, options.table)
    print("\n\n".join(table.format(options.markdown) for table in tables))
    if options.json:
        options.json.write_text(json.dumps(figures_of(options), indent=2) + "\n")
        print(f"\nWrote {options.json}")
    return 0


def figures_of(options: Options) -> dict[str, Any]:
    """Return all figures: of each shape its load, its traffic in bytes, its times in microseconds."""
    devices = [HARDWARE[name] for name in options.hardware]
    return {"shapes": {name: _figures(name, devices) for name in options.shapes}, "hardware": _peaks(devices)}


def _figures(name: str, devices: list[Hardware]) -> dict[str, Any]:
    shape = SHAPES[name]
    load = expected(shape)
    return {
        "load": dataclasses.asdict(load),
        "forward": [dataclasses.asdict(traffic) for traffic in forward(load)],
        "backward": [dataclasses.asdict(traffic) for traffic in backward(load)],
        "microseconds": {device.name: dataclasses.asdict(budget_of(load, device)) for device in devices},
        "dispatch_overhead": dispatch_overhead(load),
        "whole_overhead": whole_overhead(load),
        "bytes_with_a_row_for_each_slot": rows_for_slots(load),
        "symmetric_bytes": shape.config().symmetric_bytes(shape.ranks),
    }


def _peaks(devices: list[Hardware]) -> dict[str, Any]:
    return {device.name: dataclasses.asdict(device) for device in devices}
