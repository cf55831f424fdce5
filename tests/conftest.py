import signal

import hypothesis
import pytest
import torch

from symm_a2a.kernels.blocks import INTERPRETED

hypothesis.settings.register_profile("symm_a2a", deadline=None, print_blob=True)
hypothesis.settings.load_profile("symm_a2a")

# A shell starts its background jobs with interrupts ignored, and what they start inherits that: tests that
# interrupt what they started would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
