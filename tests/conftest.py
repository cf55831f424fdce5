import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("symm_a2a", deadline=None, print_blob=True)
hypothesis.settings.load_profile("symm_a2a")


@pytest.fixture(autouse=True)
def _one_thread():
    """Two cores, several ranks: a thread pool a rank would only wait for its turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine has no GPU for, saying so."""
    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker) and have < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), got {have}"))
