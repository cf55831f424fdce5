"""Generation: ranks with different numbers of prompts, that finish apart."""

import pytest
import torch
import torch.distributed as dist

import symm_a2a
from symm_a2a.integrations.transformers import register
from symm_a2a.testing import run_ranks

pytest.importorskip("transformers")

from tests.integrations import hf_models as hf

PROMPTS = ((3, 5), (1, 4))
"""(prompts, their length) of each rank."""
NEW_TOKENS = (2, 6)
TIMEOUT = 5.0


def generate(model, rank, **more):
    prompts = hf.tokens_of(rank, PROMPTS[rank])
    return model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=NEW_TOKENS[rank],
        eos_token_id=None, **more,
    )  # fmt: skip


def in_step(rank, group):
    return [generate_in_step(rank, group, name) for name in hf.MODELS]


def generate_in_step(rank, group, name):
    want = generate(hf.whole_model(name), rank)
    with register(max_tokens_per_rank=15) as pool:
        model = hf.shard_experts(hf.whole_model(name), hf.mesh_of(group))
        assert torch.equal(generate(model, rank, synced_gpus=True), want)
        # As many steps on every rank as the longest takes, two layers each, and no backward.
        exchanges = pool.dispatchers[0].stats().exchanges
        assert exchanges["dispatch"] == exchanges["combine"] == 2 * max(NEW_TOKENS)
        assert exchanges["dispatch_backward"] == exchanges["combine_backward"] == 0
        # And the model still trains.
        hf.forward_backward(model, rank)
    return want.shape


def test_synced_generation_equals_that_of_one_process():
    assert run_ranks(in_step, 2) == [[(3, 7)] * 3, [(1, 10)] * 3]


def out_of_step(rank, group):
    with register(max_tokens_per_rank=15, timeout=TIMEOUT):
        model = hf.shard_experts(hf.whole_model("olmoe"), hf.mesh_of(group))
        message = None
        if rank == 0:
            generate(model, rank)
        else:
            with pytest.raises(symm_a2a.PeerTimeoutError) as caught:
                generate(model, rank)
            message = str(caught.value)
        # Rank 0 is alive and late, until rank 1 has given up.
        dist.barrier(group)
        return message


def test_generation_out_of_step_ends_with_an_error_that_names_the_peer():
    message = run_ranks(out_of_step, 2, timeout=60)[1]
    assert "rank 1 waited for its counts in dispatch" in message
    assert f"peer 0 did not take part within {TIMEOUT:g} s" in message


def in_step_by_itself(rank, group, folder):
    want = generate(hf.whole_model("mixtral"), rank)
    with register(max_tokens_per_rank=15):
        model = hf.load(folder, hf.layout(fsdp_size=2, ep_size=2))
        return torch.equal(generate(model, rank), want)


def test_a_model_under_fsdp_needs_no_flag(tmp_path):
    """transformers keeps ranks in step by itself where it finds FSDP."""
    hf.whole_model("mixtral").save_pretrained(tmp_path)
    assert all(run_ranks(in_step_by_itself, 2, tmp_path))
