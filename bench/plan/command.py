"""`python -m bench plan`: whether Domino will pay, and what it would look like."""

from __future__ import annotations

import json
import sys

from bench.outputs import prepare
from bench.plan.figures import object_of
from bench.plan.make import make
from bench.plan.options import Options
from bench.plan.pictures import save_picture, save_trace
from bench.plan.table import text_of


def run(options: Options) -> int:
    """Print the plan, save its timelines; return the exit code: 0, or 2 if options or files do not fit."""
    picture, trace = options.out / "plan.png", options.out / "plan.trace.json"
    try:
        plan = make(options)
        prepare(picture, trace, options.json)
    except ValueError as error:
        print(f"bench plan: {error}", file=sys.stderr)
        return 2
    print(text_of(plan))
    save_picture(plan, picture)
    save_trace(plan, trace)
    files = [picture, trace]
    if options.json:
        options.json.write_text(json.dumps(object_of(plan), indent=2) + "\n")
        files.append(options.json)
    print("\nWrote " + ", ".join(map(str, files)))
    return 0
