"""Ranks as processes that share one GPU, through real SymmetricMemory; the same over shared memory.

They take turns on the GPU, and a kernel that waits for another rank waits for its turn: right, and slow.
"""

import pytest
import torch
import torch.distributed as dist

import symm_a2a
from bench.gpu_check.launches import repeatable
from symm_a2a import reference
from symm_a2a.testing import RankError, run_ranks
from tests.ranks import SHARED, C, E, config, inputs

W = 2


def oracle(step, capacity, tokens=None):
    """Rows, outputs, and gradients of x and scores of all ranks, for experts that double their rows."""
    xs, scores, ids = zip(
        *(inputs(rank, step, torch.float32, "cpu", tokens) for rank in range(W)), strict=True
    )
    xs, scores = ([t.double().requires_grad_() for t in tensors] for tensors in (xs, scores))
    rows, _ = reference.dispatch(xs, ids, E, 1, capacity)
    outs = reference.combine([2 * r for r in rows], scores, ids, E, 1, capacity)
    grads = torch.autograd.grad(sum((out**2).sum() for out in outs), [*xs, *scores])
    return [list(rows), list(outs), list(grads[:W]), list(grads[W:])]


def step_of(dispatcher, x, scores, ids, form):
    if form == "split":
        rows, _, handle = dispatcher.dispatch_async(x, scores, ids, lane=1).join()
        out = dispatcher.combine_async(2 * rows, handle).join()
    else:
        rows, _, handle = dispatcher.dispatch(x, scores, ids)
        out = dispatcher.combine(2 * rows, handle)
    return rows, out, *torch.autograd.grad((out**2).sum(), [x, scores])


def against_the_oracle(rank, group, device, capacity, form):
    with symm_a2a.SymmTokenDispatcher(config(capacity=capacity), group, device=device) as dispatcher:
        dispatcher.warmup()
        for step in range(4):
            x, scores, ids = inputs(rank, step, torch.float32, device)
            found = step_of(dispatcher, x.requires_grad_(), scores.requires_grad_(), ids, form)
            for ours, theirs in zip(found, oracle(step, capacity), strict=True):
                torch.testing.assert_close(
                    ours.detach().cpu().double(), theirs[rank].detach(), rtol=1e-5, atol=1e-5
                )
        dispatcher.barrier()
        x, scores, ids = inputs(rank, 9, torch.float32, device)
        counts = dispatcher.broadcast_counts(ids)
        assert torch.equal(counts[rank].cpu(), torch.bincount(ids[ids >= 0].cpu(), minlength=E).int())
    return True


@pytest.mark.parametrize("device", SHARED)
@pytest.mark.parametrize("form", ["synchronous", "split"])
@pytest.mark.parametrize("capacity", ["exact", 2 * C * 3])
def test_equals_the_oracle(device, capacity, form):
    assert all(run_ranks(against_the_oracle, W, device, capacity, form, device=device))


def replayed(rank, group, device):
    with symm_a2a.SymmTokenDispatcher(config(capacity=2 * C * 3), group, device=device) as dispatcher:
        dispatcher.warmup()
        x, scores, ids = inputs(rank, 0, torch.float32, device, C)
        leaves = x.requires_grad_(), scores.requires_grad_(), ids

        def run():
            rows, _, handle = dispatcher.dispatch(*leaves)
            out = dispatcher.combine(rows, handle)
            return out, *torch.autograd.grad(out, leaves[:2], torch.ones_like(out))

        # In the interpreter the host waits for the peers, which a replay would leave out.
        found, again = repeatable(device, run) if device != "cpu" else (None, run)
        for step in range(1, 4):
            with torch.no_grad():
                for mine, new in zip(leaves, inputs(rank, step, torch.float32, device, C), strict=True):
                    mine.copy_(new)
            found = again() or found
            out = found[0].detach().cpu().double()
            xs, all_scores, all_ids = zip(
                *(inputs(other, step, torch.float32, "cpu", C) for other in range(W)), strict=True
            )
            rows, _ = reference.dispatch([t.double() for t in xs], all_ids, E, 1, "exact")
            outs = reference.combine(rows, [t.double() for t in all_scores], all_ids, E, 1, "exact")
            torch.testing.assert_close(out, outs[rank], rtol=1e-5, atol=1e-5)
    return True


@pytest.mark.parametrize("device", SHARED)
def test_a_graph_captured_in_every_rank_is_replayed_in_step(device):
    assert all(run_ranks(replayed, W, device, device=device))


def one_rank_is_missing(rank, group, device):
    dispatcher = symm_a2a.SymmTokenDispatcher(config(timeout=2, capacity=200), group, device=device)
    dispatcher.warmup()
    if rank == 0:
        dispatcher.dispatch(*inputs(rank, 0, torch.float32, device))
        if device != "cpu":
            torch.cuda.synchronize()
        dispatcher.stats()
        dispatcher.dispatch(*inputs(rank, 0, torch.float32, device))
    dist.barrier(group)


@pytest.mark.parametrize("device", SHARED)
def test_a_missing_rank_is_named_after_a_bounded_wait(device):
    with pytest.raises(RankError, match=r"PeerTimeoutError: rank 0 waited for its copies.* peer 1 "):
        run_ranks(one_rank_is_missing, W, device, device=device)
