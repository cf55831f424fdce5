"""What a check found, and the files through which its ranks say so."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from symm_a2a.testing import RankError

_MOST_DETAILS = 50
"""Mismatches that a report describes; the others are only counted."""


@dataclass
class Result:
    """What a check found.

    Attributes:
        kernels: `"compiled"` or `"interpreted"`.
        seed: of the first case; the n-th has `seed + n`.
        cases: run, the one that failed included.
        acts: run, by their kind; see `soak`.
        resident_bytes: of rank 0 after each act, shared memory included.
        mismatches: cases with a wrong result on any rank, or that failed or hung.
        details: of the mismatches, at most 50.
        failures: what became of the ranks, the first failure first, where a case failed or hung, or none
            could be started; `rank` and `text` of each.
    """

    ranks: int
    backend: str
    backend_reason: str
    kernels: str
    seed: int
    cases: int = 0
    steps: int = 0
    acts: dict[str, int] = field(default_factory=dict)
    resident_bytes: list[int] = field(default_factory=list)
    mismatches: int = 0
    seconds: float = 0.0
    details: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False

    def count(self, act: str) -> None:
        """Count an act of a kind."""
        self.acts[act] = self.acts.get(act, 0) + 1

    @property
    def passed(self) -> bool:
        """Whether cases were run, and all were right."""
        return self.cases > 0 and self.mismatches == 0 and not self.failures


class Journal:
    """Adds to a result what each rank writes into its file of a folder, as it is written.

    A rank writes a line of JSON when it begins a case, of what the case is, and one when it ends it:
    the number of its steps, and the mismatches found.
    """

    def __init__(self, folder: str, result: Result) -> None:
        self._folder = Path(folder)
        self._result = result
        self._read: Counter[int] = Counter()
        self._case: dict[int, dict[str, Any]] = {}
        self._wrong: set[int] = set()

    def read(self) -> None:
        """Add what is new."""
        for path in sorted(self._folder.glob("*.jsonl")):
            rank = int(path.stem)
            data = path.read_bytes()[self._read[rank] :]
            # The last line may not be complete yet.
            complete = data[: data.rfind(b"\n") + 1]
            self._read[rank] += len(complete)
            for entry in map(json.loads, complete.splitlines()):
                if rank not in self._case:
                    self._case[rank] = entry
                    continue
                case = self._case.pop(rank)
                for mismatch in entry["found"]:
                    self._add({**case, **mismatch})
                if rank == 0:
                    self._result.cases += 1
                    self._result.steps += entry["steps"]
                    if "act" in case:
                        self._result.count(case["act"])
                        self._result.resident_bytes.append(entry["resident"])

    def blame(self, error: RankError) -> None:
        """Add that the ranks failed, in the case that the first of them had begun, if it had."""
        self._result.failures = [asdict(failure) for failure in error.failures]
        self._result.cases += 0 in self._case
        first = error.failures[0]
        if first.rank in self._case:
            lines = first.text.strip().splitlines()
            why = lines[-1 if lines[0].startswith("Traceback") else 0]
            self._add({**self._case[first.rank], "rank": first.rank, "what": "case failed", "got": why})

    def _add(self, mismatch: dict[str, Any]) -> None:
        self._result.mismatches += mismatch["seed"] not in self._wrong
        self._wrong.add(mismatch["seed"])
        if len(self._result.details) < _MOST_DETAILS:
            self._result.details.append(mismatch)
