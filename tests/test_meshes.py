"""Expert parallelism on meshes: several groups in a job, and tokens that tensor-parallel ranks share."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import symm_a2a
from symm_a2a import reference
from symm_a2a.testing import run_ranks
from symm_a2a.token_shards import gather_tokens, shard_tokens, share_of
from tests.cases import apply_experts

E, K, D = 8, 3, 7


def config(**changes):
    fields = dict(
        num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=16, dtype=torch.float64, timeout=60
    )
    return symm_a2a.EPConfig(**(fields | changes))


def tokens_of(replica, count):
    gen = torch.Generator().manual_seed(100 + replica)
    x = torch.randn(count, D, generator=gen, dtype=torch.float64)
    scores = torch.rand(count, K, generator=gen, dtype=torch.float64)
    return x, scores, torch.randint(-1, E, (count, K), generator=gen)


def weights():
    return torch.randn(E, D, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def oracle(counts, ranks):
    """Outputs and gradients of batches, each of one origin; the loss is the sum of all squares."""
    xs, scores, ids = zip(*(tokens_of(replica, count) for replica, count in enumerate(counts)), strict=True)
    xs, scores = ([t.requires_grad_() for t in part] for part in (xs, scores))
    weight = weights().requires_grad_()
    # Experts that are all on one rank: whose rows they are does not matter to them.
    rows, tokens_per_expert = reference.dispatch([torch.cat(xs)], [torch.cat(ids)], E)
    ys = [apply_experts(rows[0], tokens_per_expert[0], weight)]
    (out,) = reference.combine(ys, [torch.cat(scores)], [torch.cat(ids)], E)
    out.square().sum().backward()
    return out.detach().split(counts), xs, scores, weight.grad.chunk(ranks)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def on_a_mesh(rank, group, ep, tp):
    """`[ep, tp]`: tp expert-parallel groups side by side, each with tokens of its own."""
    mesh = init_device_mesh("cpu", (ep, tp), mesh_dim_names=("ep", "tp"))
    mine, column = mesh["ep"].get_local_rank(), mesh["tp"].get_local_rank()
    counts = [3 + column, 0, 5, 1][:ep]
    with symm_a2a.SymmTokenDispatcher(config(), mesh["ep"].get_group()) as dispatcher:
        assert (dispatcher.rank, dispatcher.world_size) == (mine, ep)
        for _ in range(2):
            outs, xs, scores, weight_grads = oracle(counts, ep)
            x, score, ids = tokens_of(mine, counts[mine])
            weight = weights().chunk(ep)[mine].clone().requires_grad_()
            x, score = x.requires_grad_(), score.requires_grad_()
            rows, tokens_per_expert, handle = dispatcher.dispatch(x, score, ids)
            out = dispatcher.combine(apply_experts(rows, tokens_per_expert, weight), handle)
            out.square().sum().backward()
            close(out, outs[mine])
            for ours, theirs in ((x, xs[mine]), (score, scores[mine])):
                close(ours.grad, theirs.grad)
            close(weight.grad, weight_grads[mine])


@pytest.mark.parametrize(("ep", "tp"), [(2, 2), (4, 2)])
def test_expert_parallel_groups_side_by_side(ep, tp):
    run_ranks(on_a_mesh, ep * tp, ep, tp)


def over_shared_tokens(rank, group, dp, tp, counts):
    """`[dp, tp]`, and experts over all of them: tensor-parallel ranks hold the same tokens."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    replica, tp_group = mesh["dp"].get_local_rank(), mesh["tp"].get_group()
    outs, xs, scores, weight_grads = oracle(counts, dp * tp)
    x, score, ids = tokens_of(replica, counts[replica])
    x, score = x.requires_grad_(), score.requires_grad_()
    weight = weights().chunk(dp * tp)[rank].clone().requires_grad_()
    with symm_a2a.SymmTokenDispatcher(config(), group) as dispatcher:
        part = shard_tokens(x, score, ids, group=tp_group)
        rows, tokens_per_expert, handle = dispatcher.dispatch(*part)
        sums = dispatcher.combine(apply_experts(rows, tokens_per_expert, weight), handle)
        out = gather_tokens(sums, counts[replica], group=tp_group)
        # Every tensor-parallel rank computes the same loss of the same sums.
        out.square().sum().backward()
        sent = sum(dispatcher.stats().copies["dispatch"])
    close(out, outs[replica])
    for ours, theirs in ((x, xs[replica]), (score, scores[replica])):
        close(ours.grad, theirs.grad)
    close(weight.grad, weight_grads[rank])
    return sent


@pytest.mark.parametrize(
    ("dp", "tp", "counts"), [(2, 2, (5, 8)), (2, 2, (0, 1)), (1, 4, (7,)), (4, 2, (3, 0, 6, 1))]
)
def test_tokens_that_tensor_parallel_ranks_share_travel_once(dp, tp, counts):
    sent = sum(run_ranks(over_shared_tokens, dp * tp, dp, tp, counts))
    num_local = E // (dp * tp)
    once = 0
    for replica, count in enumerate(counts):
        ids = tokens_of(replica, count)[2]
        owner = torch.where(ids >= 0, ids // num_local, -1)
        once += sum(len(set(row) - {-1}) for row in owner.tolist())
    assert sent == once


def parts(rank, group):
    shares = [share_of(T, group) for T in (0, 1, 4, 5, 8)]
    with pytest.raises(symm_a2a.InputError, match=r"the 2 rows that are this rank's of 8 tokens, got shape"):
        gather_tokens(torch.zeros(3, D), 8, group=group)
    for wrong in (8.0, -3):
        with pytest.raises(symm_a2a.InputError, match="num_tokens to be an int, not negative, got"):
            symm_a2a.gather_tokens(torch.zeros(2, 3), wrong, group=group)
    with pytest.raises(symm_a2a.InputError, match=r"x_TD of shape \(T, D\), got \(\)"):
        symm_a2a.shard_tokens(torch.zeros(()), torch.zeros(4, 1), torch.zeros(4, 1), group=group)
    with pytest.raises(symm_a2a.InputError, match="expected scores_TK of 4 tokens, as x_TD has"):
        shard_tokens(torch.zeros(4, D), torch.zeros(3, K), torch.zeros(4, K), group=group)
    return [(share.start, share.stop) for share in shares]


def test_parts_are_whole_in_order_and_as_even_as_collectives_want_them():
    ranks = run_ranks(parts, 4)
    for number, T in enumerate((0, 1, 4, 5, 8)):
        taken = [token for shares in ranks for token in range(*shares[number])]
        assert taken == list(range(T))
        assert max(stop - start for start, stop in (shares[number] for shares in ranks)) == -(-T // 4)
