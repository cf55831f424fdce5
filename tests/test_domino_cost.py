"""What a schedule adds to the exchanges themselves: nothing that waits, nothing that computes."""

import pytest
import torch

import symm_a2a
from symm_a2a.testing import HiddenSyncError, OpGuard

T, D, K, E = 200, 8, 2, 4


def dispatcher(capacity):
    return symm_a2a.SymmTokenDispatcher(
        symm_a2a.EPConfig(
            num_experts=E,
            top_k=K,
            hidden_dim=D,
            max_tokens_per_rank=T,
            dtype=torch.float32,
            capacity=capacity,
        ),
        device="cpu",
    )


def step(schedule, carrier, xs, scores, ids):
    """Two layers of exchanges and nothing else, forward and backward."""

    def layers(x):
        for _ in range(2):
            rows, _, handle = yield carrier.dispatch_async(x, scores, ids)
            x = yield carrier.combine_async(rows, handle)
        return x

    outs = schedule.run(layers, xs)
    torch.autograd.backward(outs, xs)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_micro_batches_make_no_host_wait_and_no_operator_computes(micro_batches):
    with dispatcher(T * K) as carrier:
        carrier.warmup()
        xs = [torch.ones(T, D, requires_grad=True) for _ in range(micro_batches)]
        scores, ids = torch.ones(T, K, requires_grad=True), torch.zeros(T, K, dtype=torch.int64)
        before = carrier.stats()
        with OpGuard() as guard:
            step(symm_a2a.Domino(carrier, micro_batches), carrier, xs, scores, ids)
        done = carrier.stats() - before
    assert done.host_syncs == 0
    assert not guard.host_syncs
    assert done.launches == 2 * 9 * micro_batches
    # Scores are used by every layer and micro-batch: autograd adds up their gradients, and no more.
    assert set(guard.compute_ops) <= {"add", "add_"}


def test_exact_capacity_waits_once_for_each_dispatch():
    with dispatcher("exact") as carrier:
        xs = [torch.ones(T, D, requires_grad=True) for _ in range(2)]
        scores, ids = torch.ones(T, K), torch.zeros(T, K, dtype=torch.int64)
        before = carrier.stats()
        step(symm_a2a.Domino(carrier, 2), carrier, xs, scores, ids)
        assert (carrier.stats() - before).host_syncs == 2 * 2


def test_a_read_between_the_yields_is_seen():
    """One published trap: counts copied to the host hold up the next micro-batch's launch."""
    with dispatcher(T * K) as carrier:
        scores, ids = torch.ones(T, K), torch.zeros(T, K, dtype=torch.int64)

        def block(x):
            rows, counts, handle = yield carrier.dispatch_async(x, scores, ids)
            counts.tolist()
            return (yield carrier.combine_async(rows, handle))

        with pytest.raises(HiddenSyncError), OpGuard():
            symm_a2a.Domino(carrier, 2).run(block, [torch.ones(T, D)] * 2)
