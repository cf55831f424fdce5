import fcntl
import pathlib
import signal
import tempfile
from contextlib import contextmanager

import hypothesis
import pytest
import torch

from symm_a2a.kernels.blocks import INTERPRETED

hypothesis.settings.register_profile("symm_a2a", deadline=None, print_blob=True)
hypothesis.settings.load_profile("symm_a2a")

# A shell starts its background jobs with interrupts ignored, and what they start inherits that: tests that
# interrupt what they started would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


ROOM = pathlib.Path(tempfile.gettempdir()) / f"symm_a2a-tests-{pathlib.Path(__file__).stat().st_ino}"


@contextmanager
def _locked(name, how):
    with ROOM.with_name(f"{ROOM.name}-{name}").open("w") as file:
        fcntl.flock(file, how)
        yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Let a test that is marked `alone` wait for those of other workers, and these for it.

    Whoever waits holds the door: of those that come later none goes ahead.
    """
    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with _locked("door", fcntl.LOCK_EX):
        room = _locked("room", how)
        room.__enter__()
    try:
        yield
    finally:
        room.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def _one_thread():
    """Two cores, several ranks: a thread pool a rank would only wait for its turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run in this process, saying why.

    Kernels are either compiled or interpreted in a process: where there is a GPU, the tests on the
    CPU want a run of their own, with TRITON_INTERPRET=1.
    """
    have = torch.cuda.device_count() if torch.cuda.is_available() and not INTERPRETED else 0
    for item in items:
        on_gpu = item.get_closest_marker("gpu") or item.get_closest_marker("multigpu")
        if not on_gpu and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="kernels are compiled here; set TRITON_INTERPRET=1"))
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker) and have < needed:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs {needed} CUDA device(s) and compiled kernels")
                )
