"""One experts module, called as its block calls it: masks, ranks without rows, dtypes, wrong batches."""

import itertools

import pytest
import torch

import symm_a2a
from symm_a2a.integrations.transformers import register
from symm_a2a.testing import run_ranks

pytest.importorskip("transformers")

from tests.integrations import hf_models as hf

D = 16
EXPERTS = ("eager", "grouped_mm", "batched_mm")
# What the ids are drawn from, on each rank, and how many tokens it has. E and more are masks.
ROUTINGS = {
    "masks": ((0, hf.E + 3), (6, 4)),
    "no masks": ((0, hf.E), (6, 4)),
    "no tokens on one rank": ((0, hf.E), (0, 5)),
    "no rows on one rank": ((0, hf.E // 2), (3, 3)),
    "no rows at all": ((hf.E, hf.E + 2), (2, 1)),
}


def experts_of(model):
    return model.model.layers[0].mlp.experts


def arguments(rank, routing, dtype=torch.float32):
    """Tokens, ids, weights and the factors of the loss; leaves where they need gradients."""
    (low, high), tokens = ROUTINGS[routing]
    gen = torch.Generator().manual_seed(300 + rank)
    shape = (tokens[rank], hf.K)
    x = torch.randn(tokens[rank], D, generator=gen, dtype=torch.float64)
    ids = torch.randint(low, high, shape, generator=gen)
    scores = torch.rand(shape, generator=gen, dtype=torch.float64)
    factors = torch.randn(tokens[rank], D, generator=gen, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), ids, scores.to(dtype).requires_grad_(), factors.to(dtype)


def forward_backward(experts, rank, routing, dtype=torch.float32):
    x, ids, scores, factors = arguments(rank, routing, dtype)
    if not experts._is_expert_parallel:
        ids = ids.clamp(max=hf.E)  # the one mask that whole experts know
    out = experts(x, ids, scores)
    if out.requires_grad:  # not where whole experts got no row
        (out * factors).sum().backward()
    zeros = torch.zeros_like
    return [out.detach(), *(zeros(leaf) if leaf.grad is None else leaf.grad for leaf in (x, scores))]


def every_routing(rank, group):
    compare_every_routing(rank, group)
    compare_every_routing(rank, group, capacity=24)
    compare_every_routing(rank, group, pad_multiple=4, overflow="drop", timeout=20, num_programs=8)
    return True


def compare_every_routing(rank, group, **policies):
    whole, model = hf.whole_model("olmoe"), hf.whole_model("olmoe")
    whole.set_experts_implementation("eager")  # the others skip masks only where experts are split
    with register(max_tokens_per_rank=6, **policies) as pool:
        experts = experts_of(hf.shard_experts(model, hf.mesh_of(group)))
        for implementation in EXPERTS:
            model.set_experts_implementation(implementation)
            for routing in ROUTINGS:
                what = f"{policies}, {implementation}, {routing}"
                whole.zero_grad()
                want = [forward_backward(experts_of(whole), other, routing) for other in range(2)][rank]
                model.zero_grad()
                got = forward_backward(experts, rank, routing)
                for mine, theirs in zip(got, want, strict=True):
                    if mine.numel():
                        hf.assert_near(mine, theirs, what)
                for name, parameter in experts_of(whole).named_parameters():
                    # On every rank, also where no row arrived.
                    grad = experts.get_parameter(name).grad
                    assert grad is not None, f"{what}: {name}"
                    none = torch.zeros_like(parameter)
                    hf.assert_near(
                        grad.full_tensor(), none if parameter.grad is None else parameter.grad, what
                    )
        assert pool.dispatchers[0].cfg == symm_a2a.EPConfig(
            num_experts=hf.E, top_k=hf.K, hidden_dim=D, max_tokens_per_rank=6, dtype=torch.float32,
            num_lanes=1, **policies,
        )  # fmt: skip


def test_masks_and_ranks_without_rows():
    assert all(run_ranks(every_routing, 2))


def errors(rank, group):
    return [errors_in(rank, group, dtype) for dtype in (torch.bfloat16, torch.float16)]


def errors_in(rank, group, dtype):
    """Root mean square errors of out, x.grad and scores.grad: ours, and those of transformers' all-to-all."""
    exact = hf.whole_model("olmoe").double()
    exact.set_experts_implementation("eager")  # the others know no fp64
    want = forward_backward(experts_of(exact), rank, "no masks", torch.float64)
    found = []
    with register(max_tokens_per_rank=6):
        for implementation in ("symm_a2a", "all_to_all"):
            model = hf.shard_experts(hf.whole_model("olmoe").to(dtype), hf.mesh_of(group), implementation)
            got = forward_backward(experts_of(model), rank, "no masks", dtype)
            assert all(tensor.dtype == dtype for tensor in got)
            pairs = zip(got, want, strict=True)
            found.append([(low - exact).square().mean().sqrt().item() for low, exact in pairs])
    return found


def test_half_precision_is_as_near_to_fp64_as_the_all_to_all_of_transformers():
    """Most of the error is the experts' own; partial sums, rounded once at each rank, may add a little."""
    for ours, theirs in itertools.chain(*run_ranks(errors, 2)):
        assert 0 < ours[0] <= theirs[0]
        assert all(mine <= 1.3 * other for mine, other in zip(ours, theirs, strict=True))


def too_many_tokens(rank, group):
    with register(max_tokens_per_rank=5):
        experts = experts_of(hf.shard_experts(hf.whole_model("olmoe"), hf.mesh_of(group)))
        x, ids, scores, _ = arguments(0, "no masks")
        with pytest.raises(symm_a2a.InputError) as caught:
            experts(x, ids, scores)
        assert experts(x[:5], ids[:5], scores[:5]).shape == (5, D)
        return str(caught.value)


def test_a_larger_batch_says_what_to_register():
    for message in run_ranks(too_many_tokens, 2):
        assert message.startswith(
            "expected at most max_tokens_per_rank = 5 tokens on a rank, got 6; pass fewer"
        )
        assert "batch size * sequence length" in message
