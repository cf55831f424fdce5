"""`python -m symm_a2a`: what is here; `python -m symm_a2a check`: does it work here."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from symm_a2a import check, environment

_SPARSE = 15.0
"""Seconds between lines of progress where stderr is no terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code.

    Args:
        arguments: of the command line; None takes the process's.

    Returns:
        0 if all is well, 1 if a check found a mismatch or could not run a case, 130 if it was
        interrupted before it found any.
    """
    options = _parser().parse_args(arguments)
    if options.command == "check":
        return _check(options)
    found = environment.collect()
    print(json.dumps(found.as_dict(), indent=2) if options.json else _described(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    as_json = argparse.ArgumentParser(add_help=False)
    # Not given: the other parser's value stands, so that the option may come before or after the command.
    as_json.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    parser = argparse.ArgumentParser(
        prog="python -m symm_a2a",
        description="Report versions, GPUs, and which backend a group here would get.",
        parents=[as_json],
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    checker = commands.add_parser(
        "check",
        parents=[as_json],
        help="compare random exchanges between processes with the standard all-to-all",
        description=(
            "Run random cases over real rank processes, forward and backward, and compare them with the "
            "standard all-to-all and with fp64. Exit code 0: cases were run and none was wrong."
        ),
    )
    checker.add_argument(
        "--ranks", type=_positive, default=4, help="processes; a GPU each if there are enough"
    )
    checker.add_argument(
        "--seconds", type=_duration, default=30.0, help="for all of it; at least one case is run"
    )
    checker.add_argument(
        "--chaos", action="store_true",
        help="meanwhile ranks are stopped, raise, come late and are killed, and nothing may be left of them",
    )  # fmt: skip
    checker.add_argument("--seed", type=int, help="of the first case; the n-th after it has seed + n")
    parser.set_defaults(json=False)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return int(text)


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text}")
    return value


def _check(options: argparse.Namespace) -> int:
    progress = _Progress()
    run = check.soak if options.chaos else check.check
    result = run(options.ranks, options.seconds, options.seed, progress)
    progress.end()
    if options.json:
        print(json.dumps({**asdict(result), "passed": result.passed}, indent=2))
    else:
        print(_outcome(result))
    if result.passed:
        return 130 if result.interrupted else 0
    return 130 if result.interrupted and not result.mismatches else 1


class _Progress:
    """How far a check is, on stderr: a line that changes on a terminal, now and then a line elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._shown = False

    def __call__(self, result: check.Result) -> None:
        """Show a result so far."""
        text = f"{result.seconds:.0f} s: {result.cases} cases, {result.steps} steps, {_wrong(result)}"
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            self._shown = True
        elif time.monotonic() - self._last >= _SPARSE:
            print(text, file=sys.stderr, flush=True)
            self._last = time.monotonic()

    def end(self) -> None:
        """Clear the line that changes."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _wrong(result: check.Result) -> str:
    return f"{result.mismatches} mismatch{'' if result.mismatches == 1 else 'es'}"


def _aligned(lines: Sequence[tuple[str, Any]]) -> str:
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{width}}{value}".rstrip() for name, value in lines)


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _described(found: environment.Environment) -> str:
    """Return the environment for a reader."""
    lines: list[tuple[str, Any]] = [(name, version or "none") for name, version in found.versions.items()]
    lines += [("platform", found.platform), ("CPUs", found.cpus)]
    lines += [
        (f"GPU {index}", f"{gpu.name}, {_size(gpu.memory_bytes)}, capability {gpu.capability}")
        for index, gpu in enumerate(found.gpus)
    ] or [("GPUs", "none")]
    if found.peer_access is not None:
        lines.append(("peer access", _peers(found.peer_access)))
    support = found.symmetric_memory
    offers = {"NVSHMEM": support.nvshmem, "multicast": support.multicast}
    extras = "".join(f", {name}" for name, there in offers.items() if there)
    allocator = f"imports, CUDA allocator {support.cuda_backend or 'none'}{extras}"
    lines += [
        ("SymmetricMemory", allocator if support.importable else "cannot be imported"),
        ("/dev/shm", f"{_size(found.shm_free_bytes)} free of {_size(found.shm_total_bytes)}"),
        ("kernels", f"{found.kernels}: {found.kernels_reason}"),
        (f"backend, {found.group_size} ranks", f"{found.backend}: {found.backend_reason}"),
    ]
    lines += [("problem", problem) for problem in found.problems]
    return _aligned(lines)


def _peers(access: list[list[bool]]) -> str:
    """Return the pairs without access, or that there are none."""
    pairs = [f"{i} to {j}" for i, row in enumerate(access) for j, there in enumerate(row) if not there]
    return f"all but GPU {', '.join(pairs)}" if pairs else "all pairs" if len(access) > 1 else "one GPU"


def _acts(result: check.Result) -> list[tuple[str, Any]]:
    """Return lines on what befell the ranks, and what rank 0 held at the beginning and at the end."""
    if not result.acts:
        return []
    lines: list[tuple[str, Any]] = [
        ("acts", ", ".join(f"{number} {kind}" for kind, number in sorted(result.acts.items())))
    ]
    if held := result.resident_bytes:
        lines.append(("memory of rank 0", " to ".join(_size(count) for count in (held[0], held[-1]))))
    return lines


def _outcome(result: check.Result) -> str:
    """Return a check's result for a reader."""
    parts = []
    for detail in result.details:
        rest = dict(detail)
        where = [f"{name} {rest.pop(name)}" for name in ("seed", "step", "rank") if name in rest]
        index = f" at {rest.pop('index')}" if "index" in rest else ""
        share = f" ({rest.pop('wrong')} of {rest.pop('of')} elements)" if "wrong" in rest else ""
        expected = f"expected {rest.pop('expected')}, " if "expected" in rest else ""
        parts.append(f"{', '.join(where)}: {rest.pop('what')}{index}: {expected}got {rest.pop('got')}{share}")
        parts.append("    " + ", ".join(f"{name}={value}" for name, value in rest.items()))
    if result.failures:
        # The others mostly fail for want of the first.
        first = result.failures[0]
        parts.append(f"rank {first['rank']} failed first:\n{first['text'].rstrip()}")
    if result.details:
        seed = result.details[0]["seed"]
        chaos = "--chaos " if result.acts else ""
        again = f"python -m symm_a2a check {chaos}--ranks {result.ranks} --seed {seed} --seconds 0"
        parts.append(f"to run the first of these cases again: {again}")
    rate = result.cases / result.seconds if result.seconds else 0.0
    lines = [
        ("ranks", result.ranks),
        ("backend", f"{result.backend}: {result.backend_reason}"),
        ("kernels", result.kernels),
        ("seed", result.seed),
        ("cases", f"{result.cases}, of {result.steps} steps; {rate:.2f} cases per second"),
        *_acts(result),
        ("mismatches", result.mismatches),
        ("seconds", f"{result.seconds:.1f}" + (", then interrupted" if result.interrupted else "")),
    ]
    parts.append(_aligned(lines))
    return "\n".join(parts)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever reads has seen enough; what is left to write would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
