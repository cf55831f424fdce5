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

COMMANDS = ("a2av", "kernels", "limits", "plan", "plot", "train", "ulysses")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments choose; return its exit code, 130 if it is interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] not in COMMANDS:
        return _list_commands(arguments)
    name = arguments[0]
    try:
        return _run(name, arguments[1:])
    except KeyboardInterrupt:
        print(f"bench {name}: interrupted", file=sys.stderr)
        return 130


def _run(name: str, arguments: Sequence[str]) -> int:
    import tyro

    kind = import_module(f"bench.{name}.options").Options
    # Not as one of all commands: what is said of a wrong option is to point to this command's help.
    options = tyro.cli(kind, prog=f"python -m bench {name}", args=arguments)
    return import_module(f"bench.{name}.command").run(options)


def _list_commands(arguments: Sequence[str]) -> int:
    import tyro

    options = {name: import_module(f"bench.{name}.options").Options for name in COMMANDS}
    tyro.extras.subcommand_cli_from_dict(options, prog="python -m bench", args=arguments)
    return 2


if __name__ == "__main__":
    sys.exit(main())
