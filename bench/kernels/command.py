"""`python -m bench kernels`: compile, read, check."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.kernels.figures import Figures
from bench.kernels.measure import in_processes, measure_named
from bench.kernels.options import Options
from bench.kernels.rules import RULES, Breach, Rule, check, check_forms, check_sources
from bench.kernels.table import format_table
from bench.outputs import prepare
from bench.progress import Progress

SOURCES = Path(__file__).parents[2] / "symm_a2a" / "kernels"


def run(options: Options, rules: Iterable[Rule] = RULES) -> int:
    """Print a table of figures and the broken rules; return the exit code.

    Args:
        options: what to do.
        rules: that the figures must keep.

    Returns:
        0; or 1 if a rule is broken or a kernel does not compile, 2 if a file cannot be written.
    """
    try:
        prepare(options.json)
    except ValueError as error:
        print(f"bench kernels: {error}", file=sys.stderr)
        return 2
    try:
        figures = _measure(options)
    except (RuntimeError, ValueError) as error:
        print(f"bench kernels: {error}", file=sys.stderr)
        return 1
    breaches = [*check(figures, rules), *check_forms(figures), *check_sources(SOURCES)]

    print(format_table(figures), "", sep="\n")
    for breach in breaches:
        print(f"BROKEN: {breach}")
    print(f"{_version()}: {len(figures)} compiled kernels, {len(breaches)} broken rules")
    if options.json:
        options.json.write_text(json.dumps(_as_json(figures, breaches), indent=2) + "\n")
        print(f"Wrote {options.json}")
    return 1 if breaches else 0


def _measure(options: Options) -> list[Figures]:
    pairs = [(shape, target) for shape in options.shapes for target in dict.fromkeys(options.arch)]
    found: dict[int, list[Figures]] = {}
    with Progress("kernels", len(pairs), unit="target") as progress:
        tasks = [(measure_named, (*pair, options.programs)) for pair in pairs]
        for number, figures in in_processes(tasks):
            found[number] = figures
            progress.advance(" for ".join(pairs[number]))
    return [kernel for number in sorted(found) for kernel in found[number]]


def _version() -> str:
    import triton

    return f"triton {triton.__version__}"


def _as_json(figures: list[Figures], breaches: list[Breach]) -> dict[str, Any]:
    return dict(
        compiler=_version(),
        figures=[dataclasses.asdict(kernel) for kernel in figures],
        breaches=[dataclasses.asdict(breach) | {"message": str(breach)} for breach in breaches],
    )
