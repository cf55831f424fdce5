"""Tokens that every rank has: gradients are whole everywhere, and what differs is found."""

import pytest
import torch
import torch.distributed as dist

from symm_a2a.baselines import ReplicatedTokenDispatcher
from symm_a2a.errors import ExpertIdError, InputError
from symm_a2a.testing import run_ranks
from tests.test_baselines import Case, close, coded, config, experts, layer

RANKS = 4


def steps(rank, group):
    """Two layers with a router before the second: what reaches it from all ranks is whole."""
    cfg = config(pad_multiple=2)
    case = Case(cfg, (16,))
    gen = torch.Generator().manual_seed(5)
    router_DE = torch.randn(5, 8, generator=gen, dtype=torch.float64)
    results = []
    for alone in (False, True):
        weight_EDD = case.weight_EDD if alone else case.weight_EDD.chunk(RANKS)[rank]
        x_TD, router, weight = (t.clone().requires_grad_() for t in (case.xs[0], router_DE, weight_EDD))
        dispatcher = ReplicatedTokenDispatcher(cfg, group if not alone else single(rank))
        hidden_TD = x_TD + layer(dispatcher, x_TD, case.scores[0], case.ids[0], weight)
        scores_TK, ids_TK = (hidden_TD @ router).softmax(-1).topk(cfg.top_k)
        out_TD = hidden_TD + layer(dispatcher, hidden_TD, scores_TK, ids_TK, weight)
        (out_TD * case.grads[0]).sum().backward()
        weight_grad = weight.grad.chunk(RANKS)[rank] if alone else weight.grad
        results.append((out_TD.detach(), x_TD.grad, router.grad, weight_grad))
    for shared, alone in zip(*results, strict=True):
        close(shared, alone)
    return [t.numpy() for t in results[0][:3]]


def single(rank):
    return dist.new_subgroups(1)[0]


def test_a_model_trains_as_on_a_single_rank():
    first, *others = run_ranks(steps, RANKS)
    for other in others:
        for one, expected in zip(other, first, strict=True):
            # Not close: ranks whose replicas drift apart have other tokens soon.
            assert (one == expected).all()


def uneven(rank, group):
    dispatcher = ReplicatedTokenDispatcher(config(top_k=1), group)
    dispatcher.warmup()
    # A token for each rank's experts. One rank needs no gradients; another's experts ignore their rows.
    needed = rank != 2
    x_TD = coded(0, RANKS, 5, torch.float64).requires_grad_(needed)
    scores_TK = torch.ones(RANKS, 1, dtype=torch.float64, requires_grad=needed)
    rows_RD, _, handle = dispatcher.dispatch(x_TD, scores_TK, torch.arange(RANKS)[:, None] * 2)
    assert torch.equal(rows_RD, x_TD[rank : rank + 1])
    out_TD = dispatcher.combine(rows_RD.detach() if rank == 1 else rows_RD, handle)
    assert torch.equal(out_TD, x_TD)
    out_TD.sum().backward()
    if needed:
        assert torch.equal(x_TD.grad, (torch.arange(RANKS) != 1).double()[:, None].expand(RANKS, 5))
        assert torch.equal(scores_TK.grad, x_TD.detach().sum(1, keepdim=True))
    else:
        assert x_TD.grad is None


def test_ranks_that_need_no_gradient_or_whose_experts_give_none():
    run_ranks(uneven, RANKS, timeout=30)


def differing(rank, group):
    dispatcher = ReplicatedTokenDispatcher(config(), group)
    case = Case(config(), (6,))
    same = [case.xs[0], case.scores[0].float(), case.ids[0].int()]
    same[0][0, 0] = float("nan")
    dispatcher.check_replicated(*same)
    dispatcher.check_replicated(*(t[:0] for t in same))
    if rank == 2:
        other = [t.clone() for t in same]
        other[1][5, 2] += 1e-7
        other[2][0, 0] = (other[2][0, 0] + 1) % 8
    else:
        other = same
    with pytest.raises(InputError, match="got other scores_TK and topk_ids_TK on rank 2 than on rank 0"):
        dispatcher.check_replicated(*other)
    with pytest.raises(
        InputError, match=r"every rank, got x_TD \(6, .* on rank 0 and x_TD \(5, .* on rank 2"
    ):
        dispatcher.check_replicated(*(t[: 5 if rank == 2 else 6] for t in same))
    # Before anything is sent: collectives of different sizes end a process.
    for place, other in (
        (0, same[0].half()),
        (1, same[1].bfloat16()),
        (1, same[1][:, :2]),
        (2, same[2].long()),
    ):
        changed = [other if rank == 1 and place == i else t for i, t in enumerate(same)]
        with pytest.raises(InputError, match=r"on rank 0 and x_TD .* on rank 1"):
            dispatcher.check_replicated(*changed)
    with pytest.raises(InputError, match="got other topk_ids_TK on rank 1 than on rank 0"):
        dispatcher.check_replicated(*same[:2], (same[2] + (rank == 1)) % 8)
    # An id out of range is out of range on every rank.
    wrong = case.ids[0].clone()
    wrong[3, 1] = 8
    with pytest.raises(ExpertIdError, match=r"expected topk_ids_TK in \[-1, 8\), got 8$"):
        dispatcher.dispatch(same[0], same[1], wrong)
    rows_RD, counts_L, handle = dispatcher.dispatch(*same)
    assert handle.num_rows == len(experts(rows_RD, counts_L, case.weight_EDD.chunk(RANKS)[rank]))


def test_tokens_that_differ_are_named():
    run_ranks(differing, RANKS, timeout=30)
