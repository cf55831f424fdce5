"""`python -m bench plot`: read a CSV, write pictures."""

from __future__ import annotations

import sys

from bench.plot.load import load
from bench.plot.options import Options
from bench.plot.pictures import draw


def run(options: Options) -> int:
    """Draw what the file has figures for; return the exit code, 2 for a file that does not fit."""
    try:
        results = load(options.csv)
    except ValueError as error:
        print(f"bench plot: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    files = draw(results, options.out)
    print("Wrote " + ", ".join(map(str, files)))
    return 0
