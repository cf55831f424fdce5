"""Read the kernels' source: a loop that runs as often as memory says may read through atomics only."""

from __future__ import annotations

import ast
from pathlib import Path

_PURE = ("tl.min", "tl.max", "tl.minimum", "tl.maximum", "tl.where")
"""What a loop may call that reads nothing."""


def poll_faults(source: str) -> tuple[str, ...]:
    r"""Return what is wrong with the `while` loops of a source; nothing where all is well.

    A plain load may be served from a cache, and each warp reads for itself.

    Example:
        >>> poll_faults("while tl.load(flag_ptr) < epoch:\n    pass")
        ('line 1: a while reads through tl.load',)
    """
    faults = []
    for loop in ast.walk(ast.parse(source)):
        if not isinstance(loop, ast.While):
            continue
        calls = [ast.unparse(node.func) for node in ast.walk(loop) if isinstance(node, ast.Call)]
        reads = [call for call in calls if call not in _PURE]
        others = sorted({call for call in reads if not call.startswith("tl.atomic_")})
        if others:
            faults.append(f"line {loop.lineno}: a while reads through {', '.join(others)}")
        elif not reads:
            faults.append(f"line {loop.lineno}: a while waits for nothing")
    return tuple(faults)


def loops_by_file(folder: Path) -> dict[str, int]:
    """Return the number of `while` loops of each source file that has any."""
    counts = {
        file.name: sum(isinstance(node, ast.While) for node in ast.walk(ast.parse(file.read_text())))
        for file in sorted(folder.glob("*.py"))
    }
    return {name: count for name, count in counts.items() if count}
