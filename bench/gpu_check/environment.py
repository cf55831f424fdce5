"""What this machine has: the library's own report, and the driver's version."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any


def describe() -> dict[str, Any]:
    """Return what `python -m symm_a2a --json` reports.

    Raises:
        RuntimeError: it does not run; with what it said.
    """
    command = [sys.executable, "-m", "symm_a2a", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(
            f"expected python -m symm_a2a to run, got exit code {done.returncode}:\n{done.stderr}"
        )
    return json.loads(done.stdout)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, where its tool says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[
            0
        ]
    return None


def lines_of(environment: dict[str, Any], driver: str | None) -> list[str]:
    """Return the report for a reader."""
    gpus = [f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB" for gpu in environment["gpus"]]
    entries = {
        "gpus": "; ".join(gpus) or "none",
        "driver": driver or "none found",
        "versions": ", ".join(
            f"{name} {version}" for name, version in environment["versions"].items() if version
        ),
        "cpus": environment["cpus"],
        "kernels": f"{environment['kernels']}: {environment['kernels_reason']}",
        "problems": "; ".join(environment["problems"]) or "none",
    }
    return [f"  {name:<10}{value}" for name, value in entries.items()]
