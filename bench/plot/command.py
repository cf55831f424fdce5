"""`python -m bench plot`: read a CSV, write pictures."""

from __future__ import annotations

import json
import sys

from bench.outputs import prepare
from bench.plot.load import load
from bench.plot.options import Options
from bench.plot.pictures import PICTURES, draw


def run(options: Options) -> int:
    """Draw what the file has figures for; return the exit code.

    Args:
        options: what to do.

    Returns:
        0; or 2 if the file does not fit or a picture or the JSON file cannot be written.
    """
    try:
        results = load(options.csv)
        prepare(*(options.out / f"{name}.png" for name in PICTURES), options.json)
    except ValueError as error:
        print(f"bench plot: {error}", file=sys.stderr)
        return 2
    files = draw(results, options.out)
    if options.json:
        cases = [{**one.case, "metrics": one.metrics} for one in results.measured]
        options.json.write_text(json.dumps(dict(setting=results.setting, cases=cases), indent=2) + "\n")
        files = [*files, options.json]
    print("Wrote " + ", ".join(map(str, files)))
    return 0
