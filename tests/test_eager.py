"""What launches kernels by itself, called from code that is compiled."""

import pytest
import torch

import symm_a2a
from symm_a2a import align_blocks
from tests.domino_blocks import IDS, SCORES, K, X, carrier

__all__ = ["carrier"]
ROUTED = torch.zeros(3, K, dtype=torch.int64)


def launched_and_joined(dispatcher):
    def run(x):
        rows, _, handle = dispatcher.dispatch_async(x, SCORES, IDS).join()
        again = dispatcher.dispatch_again_async(x, handle).join()
        return dispatcher.combine_async(rows + again, handle).join()

    return run


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()


CALLS = {
    "launch and join": launched_and_joined,
    "barrier": lambda dispatcher: lambda x: dispatcher.barrier() or x + 1,
    "counts": lambda dispatcher: lambda x: dispatcher.broadcast_counts(IDS) + x.sum(),
    "warm-up": lambda dispatcher: lambda x: dispatcher.warmup() or x + 1,
    "alignment": lambda dispatcher: lambda x: align_blocks(IDS, 2, 4)[0] + x.sum(),
}


@pytest.mark.parametrize("what", CALLS)
def test_it_runs_between_two_graphs(carrier, what):
    run = CALLS[what](carrier)
    compiled = torch.compile(run, backend="aot_eager")
    for x in (X, X + 1):
        assert torch.equal(compiled(x), run(x))
    # The lane is idle.
    carrier.dispatch(X, SCORES, IDS)


@pytest.mark.parametrize("what", CALLS)
def test_one_graph_is_refused_and_leaves_the_lane_idle(carrier, what):
    with pytest.raises(Exception, match="expected eager mode, got"):
        torch.compile(CALLS[what](carrier), backend="aot_eager", fullgraph=True)(X)
    carrier.dispatch(X, SCORES, IDS)


@pytest.mark.parametrize("capacity", [1.5, 4, "exact"])
def test_every_capacity_compiles_in_one_graph(capacity):
    cfg = symm_a2a.EPConfig(
        num_experts=2, top_k=1, hidden_dim=4, max_tokens_per_rank=4, dtype=torch.float32, capacity=capacity
    )
    with symm_a2a.SymmTokenDispatcher(cfg, device="cpu") as dispatcher:

        def layer(x):
            rows, _, handle = dispatcher.dispatch(x, torch.ones(len(x), 1), torch.zeros(len(x), 1).long())
            return dispatcher.combine(rows, handle)

        x = torch.randn(3, 4)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
