"""What a part finds, written as it is found: whoever reads it has all that came before a hang."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PASS, FAIL = "PASS", "FAIL"


class Journal:
    """Checks and figures, one JSON object a line; checks are shown on stdout too.

    Args:
        path: of the file; lines are added to it.
        part: the name of the part that writes.
    """

    def __init__(self, path: Path, part: str) -> None:
        self._path, self._part = path, part

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Run what is inside as a check, which fails where it raises; the exception ends here.

        Yields:
            A dict for what is worth noting, kept with the outcome.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "journal"
            >>> with Journal(path, "sums").check("one and one") as notes:
            ...     notes["sum"] = 1 + 1
            PASS one and one: 0.0 s
            >>> [(entry["outcome"], entry["notes"]) for entry in read(path)]
            [('PASS', {'sum': 2})]
        """
        begin, notes, error = time.perf_counter(), {}, ""
        try:
            yield notes
        except Exception:
            error = traceback.format_exc()
        self.outcome(name, error, time.perf_counter() - begin, notes)

    def outcome(
        self,
        name: str,
        error: str,
        seconds: float,
        notes: dict[str, Any] | None = None,
        *,
        show: bool = True,
    ) -> None:
        """Write the outcome of a check, and show it: failed where there is an error."""
        outcome = FAIL if error else PASS
        if show:
            print("\n".join([f"{outcome} {name}: {seconds:.1f} s", *error.splitlines()]), flush=True)
        self._write("check", name=name, outcome=outcome, seconds=seconds, error=error, notes=notes or {})

    def figure(self, kind: str, **fields: Any) -> None:
        """Write a figure."""
        self._write("figure", kind=kind, **fields)

    def _write(self, entry: str, **fields: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"entry": entry, "part": self._part, **fields}) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return a journal's entries; the last line may be cut off where its writer was ended."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            entries.append(json.loads(line))
    return entries


def require(found: list[str]) -> None:
    """Raise where there are mismatches, with the first of them.

    Raises:
        AssertionError: shows at most five.
    """
    if found:
        more = f"\n... and {len(found) - 5} more" if len(found) > 5 else ""
        raise AssertionError("expected no mismatch, got\n" + "\n".join(found[:5]) + more)
