"""What a registration holds: shared by models, closed once, told apart by name."""

import pytest
import torch

import symm_a2a
from symm_a2a.integrations.transformers import register
from symm_a2a.testing import run_ranks

pytest.importorskip("transformers")

from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from tests.integrations import hf_models as hf


def two_models(rank, group):
    kinds = (("olmoe", 16), ("mixtral", 16), ("mixtral", 24))
    want = [hf.expected(hf.whole_model(name, hidden), 2) for name, hidden in kinds]
    with register(max_tokens_per_rank=10) as pool:
        mesh = hf.mesh_of(group)
        models = [hf.shard_experts(hf.whole_model(name, hidden), mesh) for name, hidden in kinds]
        all_logits = [model(hf.tokens_of(rank), use_cache=False).logits for model in models]
        sum(hf.loss_of(logits, rank) for logits in all_logits).backward()
        for model, logits, (want_logits, want_grads) in zip(models, all_logits, want, strict=True):
            hf.assert_near(logits.detach(), want_logits[rank], "logits")
            hf.assert_gradients(model, want_grads)
        return [
            (one.cfg.hidden_dim, one.num_lanes, one.stats().exchanges["dispatch"]) for one in pool.dispatchers
        ]


def test_models_share_what_has_their_sizes():
    assert run_ranks(two_models, 2) == [[(16, 1, 4), (24, 1, 2)]] * 2


def names_and_ends(rank, group):
    exact = register(max_tokens_per_rank=10)
    dropping = register("dropping", max_tokens_per_rank=10, capacity=4, overflow="drop")
    mesh = hf.mesh_of(group)
    models = [hf.shard_experts(hf.whole_model("olmoe"), mesh, name) for name in ("symm_a2a", "dropping")]
    with torch.inference_mode():
        logits, fewer = (model(hf.tokens_of(rank)).logits for model in models)
    assert not torch.allclose(logits, fewer)
    assert exact.dispatchers[0].dropped_rows == 0
    assert dropping.dispatchers[0].dropped_rows > 0

    exact.close()
    exact.close()
    assert exact.dispatchers == ()
    with pytest.raises(symm_a2a.ClosedError, match="register again, then build the model again"):
        models[0](hf.tokens_of(rank))
    with pytest.raises(symm_a2a.ClosedError, match="register again"):
        hf.shard_experts(hf.whole_model("olmoe"), mesh)
    with torch.inference_mode():
        assert torch.equal(models[1](hf.tokens_of(rank)).logits, fewer)
    dropping.close()

    with register(max_tokens_per_rank=10):
        again = hf.shard_experts(hf.whole_model("olmoe"), mesh)
        # Memory made in inference mode, and used in it, serves training all the same.
        with torch.inference_mode():
            assert torch.equal(again(hf.tokens_of(rank)).logits, logits)
        hf.forward_backward(again, rank)
    return True


def test_names_are_apart_and_a_closed_pool_says_so():
    assert all(run_ranks(names_and_ends, 2))


def failing(rank, group):
    try:
        with register(max_tokens_per_rank=10, timeout=60):
            model = hf.shard_experts(hf.whole_model("olmoe"), hf.mesh_of(group))
            model(hf.tokens_of(rank))
            if rank == 0:
                raise KeyError("a batch that cannot be read")
            model(hf.tokens_of(rank))
    except KeyError:
        return "failed"
    except symm_a2a.PeerLostError as error:
        return str(error)


def test_a_rank_that_fails_ends_the_others_at_once():
    """Long before the timeout, which run_ranks would not wait for."""
    mine, theirs = run_ranks(failing, 2, timeout=30)
    assert mine == "failed"
    assert "peer 0 gave up" in theirs


def test_what_is_registered_is_an_implementation_of_transformers():
    with register("ours", max_tokens_per_rank=10):
        assert issubclass(EPImplementationInterface()["ours"], EPImplementation)


def test_policies_are_checked_when_they_are_registered():
    with pytest.raises(symm_a2a.ConfigError, match="max_tokens_per_rank"):
        register("wrong", max_tokens_per_rank=0)
    assert "wrong" not in EPImplementationInterface()
