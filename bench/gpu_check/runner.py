"""Runs parts as processes, several at once, each with a limit; tells how far they are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.gpu_check.journal import FAIL, Journal, read
from bench.gpu_check.parts import Part


class Runner:
    """Runs parts, and collects what they write.

    Args:
        device: `"cuda"` or `"cpu"`.
        folder: for journals.
        seconds: for all parts; one that would begin later fails.
    """

    def __init__(self, device: str, folder: Path, seconds: float) -> None:
        self._device, self._folder = device, folder
        self._begin = time.monotonic()
        self._seconds = seconds
        self._stopped = threading.Event()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    def say(self, name: str, text: str) -> None:
        """Print a line of progress."""
        # In one piece: several threads print.
        print(f"[{self.elapsed:6.1f} s] {name:<18} {text}\n", end="", flush=True)

    def run(self, parts: list[Part], jobs: int) -> list[dict[str, Any]]:
        """Run parts, at most `jobs` at once, then those that are to be alone; return all entries."""
        together, alone = ([part for part in parts if part.alone == only] for only in (False, True))
        deadline = self._begin + self._seconds
        # However slow the machine is, some of the time is for those that come last.
        reserved = min(sum(part.limit for part in alone), self._seconds) / 2
        with ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(lambda part: self._run(part, deadline - reserved), together))
            except BaseException:
                self._stopped.set()
                raise
        for part in alone:
            self._run(part, deadline)
        return [entry for part in parts for entry in read(self._path(part))]

    def _path(self, part: Part) -> Path:
        return self._folder / f"{part.name}.jsonl"

    def _run(self, part: Part, deadline: float) -> None:
        """Run a part to its end or its limit; whatever becomes of it is in its journal afterwards."""
        begin, journal = time.monotonic(), Journal(self._path(part), part.name)
        limit = min(part.limit, deadline - begin)
        if limit < 1:
            self._fail(journal, part, "no time was left for it", begin)
            return
        self.say(part.name, "begins")
        command = [sys.executable, "-m", __package__, "--device", self._device, "--part", part.name]
        command += ["--journal", str(self._path(part))]
        # A session of its own, so that its ranks end with it.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            reader = threading.Thread(target=self._show, args=(part.name, process.stdout), daemon=True)
            reader.start()
            try:
                how = self._wait(process, begin + limit)
            finally:
                _end(process)
            reader.join(5)
        if how:
            self._fail(journal, part, how, begin)
        elif not read(self._path(part)):
            self._fail(journal, part, "it found nothing out", begin)
        self.say(part.name, f"ends after {time.monotonic() - begin:.1f} s")

    def _wait(self, process: subprocess.Popen[str], until: float) -> str:
        """Wait for a part; return what went wrong, or an empty text."""
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.5)
                return f"it ended with exit code {code}, see above" if code else ""
            if self._stopped.is_set():
                return "it was interrupted"
            if time.monotonic() > until:
                return "it took longer than its limit, and was ended"

    def _fail(self, journal: Journal, part: Part, how: str, begin: float) -> None:
        self.say(part.name, f"{FAIL}: {how}")
        journal.outcome(f"{part.name} as a whole", how, time.monotonic() - begin, show=False)

    def _show(self, name: str, lines: Any) -> None:
        for line in lines:
            self.say(name, line.rstrip())


def _end(process: subprocess.Popen[str]) -> None:
    """End a part that still runs, its ranks too; those of one that has ended have ended with it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
