"""Checkpoints between a micro-batch's yields, and what must not change while a launch may read it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from symm_a2a import Domino, EPConfig, InputError, SymmTokenDispatcher
from symm_a2a.testing import run_ranks
from tests.cases import apply_experts

E, K, D = 4, 2, 5


def sizes(**changes):
    fields = dict(num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=8, dtype=torch.float64)
    return EPConfig(**(fields | changes))


def parameters(rank, ranks):
    gen = torch.Generator().manual_seed(3)
    router = torch.randn(D, E, generator=gen, dtype=torch.float64)
    weight = torch.randn(E, D, D, generator=gen, dtype=torch.float64)
    mine = weight.chunk(ranks)[rank].clone()
    return router.requires_grad_(), mine.requires_grad_()


def trained(rank, group, micro_batches, lanes, how):
    """Gradients of a block with a synchronous layer, in a checkpoint or not, before one that yields."""
    with SymmTokenDispatcher(sizes(num_lanes=lanes), group, device="cpu") as dispatcher:
        router, weight = parameters(rank, dispatcher.world_size)

        def synchronous(x):
            scores, ids = (x @ router).softmax(-1).topk(K)
            rows, counts, handle = dispatcher.dispatch(x, scores, ids)
            return x + dispatcher.combine(apply_experts(rows, counts, weight), handle)

        def block(x):
            for _ in range(2):
                if how == "plain":
                    x = synchronous(x)
                else:
                    x = checkpoint(synchronous, x, use_reentrant=how == "reentrant")
                scores, ids = (x @ router).softmax(-1).topk(K)
                rows, counts, handle = yield dispatcher.dispatch_async(x, scores, ids)
                x = x + (yield dispatcher.combine_async(apply_experts(rows, counts, weight), handle))
            return x

        gen = torch.Generator().manual_seed(rank)
        xs = [torch.randn(T, D, generator=gen, dtype=torch.float64) for T in (5, 0, 3, 8)[:micro_batches]]
        xs = [x.requires_grad_() for x in xs]
        outs = Domino(dispatcher, micro_batches).run(block, xs)
        sum(out.square().sum() for out in outs).backward()
        return [t.detach() for t in outs], [*(x.grad for x in xs), router.grad, weight.grad]


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize(("micro_batches", "lanes"), [(2, 2), (3, 2), (3, 3), (2, 1)])
def test_a_checkpoint_between_yields_runs_its_exchanges_again_in_an_idle_lane(micro_batches, lanes, how):
    (plain_outs, plain), (outs, grads) = (
        trained(0, None, micro_batches, lanes, way) for way in ("plain", how)
    )
    assert all(map(torch.equal, outs, plain_outs))
    close(grads, plain)


def test_so_it_does_over_processes():
    for (plain_outs, plain), (outs, grads) in zip(
        *(run_ranks(trained, 2, 3, 2, way) for way in ("plain", "not reentrant")), strict=True
    ):
        assert all(map(torch.equal, outs, plain_outs))
        close(grads, plain)


@pytest.mark.parametrize("name", ["x_TD", "scores_TK", "topk_ids_TK"])
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_dispatched_may_not_change_before_the_join(name, grad):
    with SymmTokenDispatcher(sizes(), device="cpu") as dispatcher, torch.set_grad_enabled(grad):
        given = {
            "x_TD": torch.ones(3, D, dtype=torch.float64),
            "scores_TK": torch.ones(3, K, dtype=torch.float64),
            "topk_ids_TK": torch.zeros(3, K, dtype=torch.int64),
        }
        pending = dispatcher.dispatch_async(*given.values())
        given[name].add_(1)
        with pytest.raises(InputError, match=f"expected {name} as it was when the dispatch was launched"):
            pending.join()
        # The lane is idle again, and the peers have been served.
        dispatcher.dispatch_async(*given.values()).join()
