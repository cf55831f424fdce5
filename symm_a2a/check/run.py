"""Starts the ranks, watches them, and reports."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from symm_a2a.check.acts import draw_act
from symm_a2a.check.chaos import run_acts, run_killed
from symm_a2a.check.footprint import footprint, shared_names
from symm_a2a.check.journal import Journal, Result
from symm_a2a.check.ranks import run_cases
from symm_a2a.kernels.blocks import INTERPRETED
from symm_a2a.memory import choose_backend
from symm_a2a.testing import RankError, run_ranks

_TOGETHER = 1800.0
"""Seconds of acts that run in the same processes, before others take over."""

_PATIENCE = 15.0
"""Seconds for the ranks that survive one to notice it."""

Progress = Callable[[Result], None] | None


def check(ranks: int, seconds: float, seed: int | None = None, progress: Progress = None) -> Result:
    """Run random cases over processes of this machine; never raises for what they find.

    With a GPU for each rank the ranks use them; otherwise CPU memory and Triton's interpreter.

    Args:
        ranks: how many processes.
        seconds: for all of it, roughly; at least one case is run.
        seed: of the first case; None draws one.
        progress: called some times a second, from a thread, with what there is so far.

    Returns:
        What was found. An interrupt from the keyboard ends the run, with what there is by then.
    """
    run = _Run(ranks, seconds, seed, progress)
    with run.to_the_end():
        run.attempt(run_cases, run.result.seed, run.begin + seconds)
    return run.result


def soak(ranks: int, seconds: float, seed: int | None = None, progress: Progress = None) -> Result:
    """Run random acts, see `run_act`, over processes of this machine; never raises for what they find.

    Cases as of `check`, while ranks are stopped, raise, come late, are killed, and make groups and
    dispatchers again and again. After each act nothing may be left of it in its processes, and in the end in
    this one.

    Args:
        ranks: how many processes.
        seconds: for all of it, roughly; at least one act is run.
        seed: of the first act; None draws one.
        progress: called some times a second, from a thread, with what there is so far.

    Returns:
        What was found. An interrupt from the keyboard ends the run, with what there is by then.
    """
    run = _Run(ranks, seconds, seed, progress)
    result, until = run.result, run.begin + seconds
    names, settled = shared_names(), None
    with run.to_the_end():
        first = result.seed
        while first == result.seed or time.monotonic() < until:
            acts = sum(result.acts.values())
            # Time for the ranks that are killed, which have processes of their own.
            share = min(_TOGETHER, 0.8 * (until - time.monotonic()))
            if draw_act(first, ranks).kind != "killed":
                run.attempt(run_acts, first, time.monotonic() + share)
            if result.failures:
                return result
            ended = _after(first, ranks, sum(result.acts.values()) - acts)
            for one in range(first, ended):
                if draw_act(one, ranks).kind == "killed" and (one == first or time.monotonic() < until):
                    run.kill(one)
            first = ended
            held = footprint()
            settled = settled or held
            if held.descriptors > settled.descriptors or multiprocessing.active_children():
                run.found(first, "open descriptors, or processes", settled.descriptors, held.descriptors)
        if left := sorted(shared_names() - names):
            run.found(first, "names in shared memory", [], left)
    return result


def _after(first: int, ranks: int, acts: int) -> int:
    """Return the seed that follows so many acts of ranks that live on; one at least."""
    seed = first
    while acts > 0 or seed == first:
        acts -= draw_act(seed, ranks).kind != "killed"
        seed += 1
    return seed


class _Run:
    """One run of a check: what its ranks are told, and what was found."""

    def __init__(self, ranks: int, seconds: float, seed: int | None, progress: Progress) -> None:
        self.begin = time.monotonic()
        self._seconds = seconds
        self._progress = progress
        on_gpus = not INTERPRETED and torch.cuda.is_available() and torch.cuda.device_count() >= ranks
        self._device = "cuda" if on_gpus else "cpu"
        backend, reason = choose_backend(torch.device(self._device), ranks)
        seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
        self.result = Result(ranks, backend, reason, "compiled" if on_gpus else "interpreted", seed)
        # Also beside GPUs that are too few.
        self._environ = {} if on_gpus else {"TRITON_INTERPRET": "1"}

    @contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Run what is inside; an interrupt ends it."""
        try:
            with mock.patch.dict(os.environ, self._environ):
                yield
        except KeyboardInterrupt:
            self.result.interrupted = True
        self.result.seconds = time.monotonic() - self.begin

    def attempt(self, work: Callable[..., None], seed: int, until: float) -> None:
        """Let ranks work from a seed on, until then; blame the case of the rank that fails first."""
        # Time to start and to end the last case; and a slow machine's first imports take long.
        limit = max(until - time.monotonic() + _PATIENCE, 60.0)
        with tempfile.TemporaryDirectory(prefix="symm_a2a-check-") as folder:
            journal, given = Journal(folder, self.result), (seed, until, self._device, folder)
            try:
                with self._watching(journal):
                    run_ranks(work, self.result.ranks, *given, timeout=limit, device=self._device)
            except RankError as error:
                journal.blame(error)

    def kill(self, seed: int) -> None:
        """Run an act in which a rank is killed: it dies, and each of the others says that it lost a peer."""
        result, act = self.result, draw_act(seed, self.result.ranks)
        result.count("killed")
        result.cases += 1
        try:
            run_ranks(
                run_killed, result.ranks, seed, self._device,
                timeout=60.0, device=self._device, patience=_PATIENCE,
            )  # fmt: skip
            self.found(seed, "killed", "failures", "results")
        except RankError as error:
            for failure in error.failures:
                last = failure.text.strip().splitlines()[0 if failure.rank == act.victim else -1]
                wanted = "SIGKILL" if failure.rank == act.victim else "PeerLostError"
                if wanted not in last:
                    self.found(seed, f"killed, rank {failure.rank}", wanted, last)
        result.seconds = time.monotonic() - self.begin
        if self._progress:
            self._progress(result)

    def found(self, seed: int, what: str, expected: Any, got: Any) -> None:
        """Note a mismatch that is none of a case's numbers."""
        self.result.mismatches += 1
        self.result.details.append({"seed": seed, "what": what, "expected": expected, "got": got})

    @contextmanager
    def _watching(self, journal: Journal) -> Iterator[None]:
        """Read the journal, and show how far things are, while what is inside runs."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.25):
                journal.read()
                self.result.seconds = time.monotonic() - self.begin
                if self._progress:
                    self._progress(self.result)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()
            journal.read()
