"""`python -m bench COMMAND`: the demonstration, instruments and benchmarks.

A command NAME is a package `bench.NAME` with two modules: `options` has `Options`, a dataclass whose
docstrings are the command's help, and `command` has `run(options)`, which returns the exit code.

Ranks import this module again, as multiprocessing does with a caller's main module, so what a command
needs is imported only when it is chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = ("a2av", "kernels", "limits", "plot", "train")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments choose; return its exit code."""
    import tyro

    options = {name: import_module(f"bench.{name}.options").Options for name in COMMANDS}
    chosen = tyro.extras.subcommand_cli_from_dict(options, prog="python -m bench", args=arguments)
    name = next(name for name, kind in options.items() if type(chosen) is kind)
    return import_module(f"bench.{name}.command").run(chosen)


if __name__ == "__main__":
    sys.exit(main())
