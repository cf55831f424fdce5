"""torchtitan's debug models train as they do over its own all-to-all: eager, compiled, checkpointed."""

import pytest

from symm_a2a.testing import run_ranks
from tests.integrations import titan_models as titan

# isort: split
# What imports torchtitan comes after the module that makes it use the CPU.
from symm_a2a.integrations.torchtitan import use_symm_a2a

# Compiling takes minutes where inductor's cache is cold and the machine busy.
pytestmark = pytest.mark.timeout(900)

ALL = titan.STEPS * titan.MOE_LAYERS
REPEATED = 2 * ALL

# The model, its checkpointing, compiled or not, and the dispatches of four steps. Compiled, torchtitan's
# Qwen3 with selective checkpointing fails in torch 2.13, with its own dispatcher too.
CASES = {
    ("deepseek_v3", "none", False): ALL,
    ("deepseek_v3", "selective", False): ALL,
    ("deepseek_v3", "full", False): REPEATED,
    ("deepseek_v3", "selective", True): ALL,
    ("deepseek_v3", "full", True): REPEATED,
    ("qwen3", "none", False): ALL,
    ("qwen3", "selective", False): ALL,
    ("qwen3", "full", False): REPEATED,
    ("qwen3", "none", True): ALL,
}
NOT_SAVED = ("deepseek_v3", "selective, exchanges not saved", False)


def run(rank, case):
    """Return the losses, and what the dispatchers of the model counted together."""
    name, checkpointing, compiled = case
    config = titan.config_of(name, checkpointing.split(",")[0], compiled=compiled)
    with use_symm_a2a(config) as pool:
        if case == NOT_SAVED:
            config.override.imports.clear()
        losses = titan.train(config, rank)
        (dispatcher,) = pool.dispatchers
        return losses, dispatcher.stats()


def run_all(rank, group):
    results = {name: titan.train(titan.config_of(name), rank) for name in titan.MODELS}
    return results | {case: run(rank, case) for case in (*CASES, NOT_SAVED)}


@pytest.fixture(scope="module")
def results():
    return run_ranks(run_all, 2, timeout=800)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_are_those_of_torchtitans_own_dispatcher(results, case):
    for of_rank in results:
        losses, stats = of_rank[case]
        assert losses == pytest.approx(of_rank[case[0]], abs=1e-3)
        assert len(set(losses)) == titan.STEPS
        assert stats.exchanges["dispatch"] == CASES[case]
        assert stats.exchanges["dispatch_backward"] == stats.exchanges["combine_backward"] == ALL


def test_the_ranks_have_batches_of_their_own(results):
    assert results[0]["qwen3"] != pytest.approx(results[1]["qwen3"], abs=1e-2)


def test_selective_checkpointing_that_saves_no_exchange_repeats_all(results):
    for of_rank in results:
        losses, stats = of_rank[NOT_SAVED]
        assert losses == pytest.approx(of_rank["deepseek_v3"], abs=1e-3)
        assert (stats.exchanges["dispatch"], stats.exchanges["combine"]) == (REPEATED, REPEATED)
        _, saved = of_rank["deepseek_v3", "selective", False]
        assert (saved.exchanges["dispatch"], saved.exchanges["combine"]) == (ALL, ALL)
