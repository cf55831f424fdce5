"""Starts the ranks, watches them, and reports."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from unittest import mock

import torch

from symm_a2a.check.journal import Journal, Result
from symm_a2a.check.ranks import run_cases
from symm_a2a.kernels.blocks import INTERPRETED
from symm_a2a.memory import choose_backend
from symm_a2a.testing import RankError, run_ranks


def check(
    ranks: int, seconds: float, seed: int | None = None, progress: Callable[[Result], None] | None = None
) -> Result:
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
    begin, stop = time.monotonic(), threading.Event()
    on_gpus = not INTERPRETED and torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device = "cuda" if on_gpus else "cpu"
    backend, reason = choose_backend(torch.device(device), ranks)
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    result = Result(ranks, backend, reason, "compiled" if on_gpus else "interpreted", seed)
    # Time to start and to end the last case; and a slow machine's first imports take long.
    limit = max(seconds + 15.0, 60.0)
    # Also beside GPUs that are too few.
    environ = mock.patch.dict(os.environ, {} if on_gpus else {"TRITON_INTERPRET": "1"})
    with tempfile.TemporaryDirectory(prefix="symm_a2a-check-") as folder, environ:
        journal, work = Journal(folder, result), (seed, begin + seconds, device, folder)

        def watch() -> None:
            while not stop.wait(0.25):
                journal.read()
                result.seconds = time.monotonic() - begin
                if progress:
                    progress(result)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            try:
                run_ranks(run_cases, ranks, *work, timeout=limit, device=device)
            finally:
                stop.set()
                watcher.join()
                journal.read()
        except RankError as error:
            journal.blame(error)
        except KeyboardInterrupt:
            result.interrupted = True
    result.seconds = time.monotonic() - begin
    return result
