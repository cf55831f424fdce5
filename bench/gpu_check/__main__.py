"""`python -m bench.gpu_check`: all parts, or one of them in this process."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_check.journal import Journal, read
from bench.gpu_check.parts import ALL_LIMIT, Part, parts_for
from bench.outputs import prepare


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say.

    Returns:
        0 if all checks passed, 1 if one failed, 2 for arguments, an interpreter or a device that will not do.
    """
    options = _parser().parse_args(arguments)
    if options.device == "cpu":
        # Beside a GPU too; read when a kernel is decorated.
        os.environ["TRITON_INTERPRET"] = "1"
    parts = list(parts_for(options.device))
    names = [part.name for part in parts]
    wanted = options.only or names
    for name in [*wanted, *([options.part] if options.part else [])]:
        if name not in names:
            print(f"gpu_check: expected parts of {', '.join(names)}, got {name}", file=sys.stderr)
            return 2
    if options.part:
        return run_part(parts[names.index(options.part)], options.device, options.journal)
    try:
        _need("torch", "triton", "numpy")
        prepare(options.json)
    except (RuntimeError, ValueError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    return _run_all([part for part in parts if part.name in wanted], options)


def run_part(part: Part, device: str, path: Path) -> int:
    """Run a part's tasks here; return 0 if the part got to its end, whatever it found."""
    journal = Journal(path, part.name)
    if device != "cpu":
        import torch

        torch.cuda.set_device(0)
    for task in part.tasks:
        module, name = task.target.split(":")
        try:
            getattr(importlib.import_module(module), name)(journal, device, *task.args)
        except Exception:
            journal.outcome(
                f"{' '.join((module.rpartition('.')[2], *task.args))}", traceback.format_exc(), 0.0
            )
    return 0


def _need(*packages: str) -> None:
    """Import packages.

    Raises:
        RuntimeError: one cannot be imported; says which, and how to choose another interpreter.
    """
    try:
        for package in packages:
            importlib.import_module(package)
    except (ImportError, OSError) as error:
        raise RuntimeError(
            f"expected an interpreter with {', '.join(packages)}, got {sys.executable}: {error}; "
            "PYTHON=/path/to/python chooses another"
        ) from error


def _run_all(parts: list[Part], options: argparse.Namespace) -> int:
    from bench.gpu_check.environment import describe, driver_version, lines_of
    from bench.gpu_check.report import as_json, text_of
    from bench.gpu_check.runner import Runner

    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        runner = Runner(options.device, Path(folder), options.seconds)
        runner.say("environment", "begins")
        journal, environment, driver = Path(folder) / "environment", {}, driver_version()
        with Journal(journal, "environment").check("environment: python -m symm_a2a"):
            environment = describe()
            print("\n".join(lines_of(environment, driver)), flush=True)
        if options.device != "cpu" and environment and not environment["gpus"]:
            print("gpu_check: expected a CUDA device, got none; try --device cpu", file=sys.stderr)
            return 2
        entries = [*read(journal), *runner.run(parts, options.jobs)]
        result = as_json(options.device, environment, driver, entries, runner.elapsed)
    print("", text_of(result), "", sep="\n")
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(f"Wrote {options.json}")
    return 0 if result["passed"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/gpu_check.sh",
        description="Check and time the library on one GPU. Exit code 0: every check passed.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, interpreted")
    parser.add_argument("--json", type=Path, default=Path("out/gpu_check.json"), help="where all of it goes")
    parser.add_argument("--only", nargs="+", metavar="PART", help="some of the parts")
    parser.add_argument("--seconds", type=float, default=ALL_LIMIT, help="for all parts together")
    jobs = max(2, min(12, os.cpu_count() or 2))
    parser.add_argument("--jobs", type=int, default=jobs, help="parts that run at once")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
