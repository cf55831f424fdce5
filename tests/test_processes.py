"""Ranks as processes over shared memory: against the baseline, in groups, over lanes."""

import time

import pytest
import torch
import torch.distributed as dist

import symm_a2a
from symm_a2a import SymmTokenDispatcher
from symm_a2a.baselines import AllToAllTokenDispatcher
from symm_a2a.testing import run_ranks
from tests.cases import apply_experts
from tests.ranks import (
    BOTH,
    C,
    D,
    E,
    K,
    config,
    device_of,
    forward_backward,
    inputs,
    wait_as_on_a_gpu,
    weights,
)


def against_the_baseline(rank, group, dtype):
    device = device_of(group)
    weight = weights(rank, dist.get_world_size(group), dtype, device)
    ours = SymmTokenDispatcher(config(dtype=dtype), group)
    theirs = AllToAllTokenDispatcher(config(dtype=dtype), group)
    for step in range(6):
        x, scores, ids = inputs(rank, step, dtype, device)
        time.sleep(0.05 * float(torch.rand((), generator=torch.Generator().manual_seed(97 * step + rank))))
        mine = forward_backward(ours, x, scores, ids, weight, lane=(None, 0, 1)[step % 3])
        base = forward_backward(theirs, x, scores, ids, weight)
        assert torch.equal(mine[0], base[0])
        assert torch.equal(mine[1], base[1])
        close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.05, atol=0.1)
        torch.testing.assert_close(mine[2:], base[2:], **close)
    ours.close()
    theirs.close()
    return True


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_all_to_all_baseline(device, dtype):
    ranks = 4 if device == "cpu" else min(4, torch.cuda.device_count())
    assert all(run_ranks(against_the_baseline, ranks, dtype, device=device))


def rounding_errors(rank, group):
    """Errors of bfloat16 sums over slots: [combine, dispatch backward] by [ours, steps, once].

    `steps` is the standard path of GPU trainers: every product rounded, then added in bfloat16,
    rounded again. `once` is the standard path as PyTorch runs it on a CPU, where `index_add`
    rounds the sum once: our baseline there.
    """
    device, low = device_of(group), torch.bfloat16
    exact = SymmTokenDispatcher(config(dtype=torch.float64), group)
    ours = SymmTokenDispatcher(config(dtype=low), group)
    base = AllToAllTokenDispatcher(config(dtype=low), group)
    squares = torch.zeros(2, 3, dtype=torch.float64)
    for step in range(2):
        x, scores, ids = inputs(rank, step, low, device, tokens=C)

        def of_slot(rows, k, ids=ids):
            """What each token's k-th slot has among the rows, exactly; zeros where masked."""
            pick = torch.nn.functional.one_hot(torch.tensor(k), K).expand(C, K).double().to(device)
            _, _, handle = exact.dispatch(torch.zeros(C, D, dtype=torch.float64, device=device), pick, ids)
            return exact.combine(rows.double(), handle)

        results = []
        for dispatcher in (ours, base):
            leaf = x.clone().requires_grad_()
            rows, _, handle = dispatcher.dispatch(leaf, scores, ids)
            gen = torch.Generator().manual_seed(step)
            y = torch.randn(rows.shape, generator=gen).to(low).to(device)
            out = dispatcher.combine(y, handle)
            rows.backward(y)
            results.append((out, leaf.grad))
        for i, weight in enumerate((scores, torch.ones_like(scores))):
            parts = [of_slot(y, k) * weight[:, k : k + 1].double() for k in range(K)]
            truth, steps = sum(parts), torch.zeros_like(x)
            for part in parts:
                steps = steps + part.float().to(low)
            for j, result in enumerate((results[0][i], steps, results[1][i])):
                squares[i, j] += ((result.double() - truth) ** 2).sum().cpu()
    return squares


@pytest.mark.parametrize("device", BOTH)
def test_bfloat16_errors_against_the_standard_path(device):
    ranks = 4 if device == "cpu" else min(4, torch.cuda.device_count())
    errors = sum(run_ranks(rounding_errors, ranks, device=device)).sqrt()
    ours, steps, baseline = errors.T
    assert (ours <= steps).all(), errors
    # Sums over slots are rounded once a rank and once more, a CPU's `index_add` rounds once.
    assert ours[0] <= 1.05 * baseline[0], errors
    assert ours[1] <= 1.35 * baseline[1], errors


def two_groups(rank, group):
    device = device_of(group)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    place = dist.get_rank(mine)
    with SymmTokenDispatcher(config(), mine) as d, AllToAllTokenDispatcher(config(), mine) as base:
        for step in range(3):
            x, scores, ids = inputs(rank, step, torch.float32, device)
            weight = weights(place, 2, torch.float32, device)
            ours = forward_backward(d, x, scores, ids, weight)
            theirs = forward_backward(base, x, scores, ids, weight)
            assert torch.equal(ours[0], theirs[0])
            torch.testing.assert_close(ours[2:], theirs[2:], rtol=1e-4, atol=1e-4)
    return True


@pytest.mark.parametrize("device", BOTH)
def test_two_groups_at_once(device):
    if device == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs 4 CUDA devices")
    assert run_ranks(two_groups, 4, device=device) == [True] * 4


def some_need_gradients(rank, group):
    """Inputs that need gradients on one rank only, scores that need none, weights of the experts."""
    device = device_of(group)
    weight = weights(rank, dist.get_world_size(group), torch.float64, device)
    results = []
    for dispatcher in (SymmTokenDispatcher(config(dtype=torch.float64), group), None):
        grads = []
        for x_needs, out_used in ((rank == 0, True), (False, rank != 1), (True, False)):
            x, scores, ids = inputs(rank, 3, torch.float64, device, tokens=6)
            scores = scores.double()
            local = weight.clone().requires_grad_()
            x = x.requires_grad_(x_needs)
            d = dispatcher or AllToAllTokenDispatcher(config(dtype=torch.float64), group)
            rows, counts, handle = d.dispatch(x, scores, ids)
            out = d.combine(apply_experts(rows, counts, local), handle)
            # A loss that ignores this rank's output still reaches it, with zeros.
            (out**2 * float(out_used)).sum().backward()
            grads += [local.grad, x.grad if x_needs else torch.zeros(())]
        results.append(grads)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert results[0][0].abs().sum() > 0
    return True


@pytest.mark.parametrize("device", BOTH)
def test_gradients_where_only_some_are_needed(device):
    assert run_ranks(some_need_gradients, 2, device=device) == [True] * 2


def two_lanes(rank, group):
    """Both lanes in flight at once, joined in order; the backward too."""
    results = []
    with SymmTokenDispatcher(config(dtype=torch.float64), group) as d:
        batches = [inputs(rank, step, torch.float64, device_of(group)) for step in range(2)]
        weight = weights(rank, 2, torch.float64, device_of(group))
        for overlapped in (True, False):
            xs = [x.clone().requires_grad_() for x, _, _ in batches]
            local = weight.clone().requires_grad_()
            time.sleep(0.02 * rank)
            if overlapped:
                flights = [
                    d.dispatch_async(x, s.double(), i, lane=lane)
                    for lane, (x, (_, s, i)) in enumerate(zip(xs, batches, strict=True))
                ]
                routed = [f.join() for f in flights]
                backs = [d.combine_async(apply_experts(r, n, local), h) for r, n, h in routed]
                outs = [b.join() for b in backs]
            else:
                outs = []
                for x, (_, s, i) in zip(xs, batches, strict=True):
                    rows, counts, handle = d.dispatch(x, s.double(), i)
                    outs.append(d.combine(apply_experts(rows, counts, local), handle))
            sum((out**2).sum() for out in outs).backward()
            results.append([*outs, *(x.grad for x in xs), local.grad])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    return True


@pytest.mark.parametrize("device", BOTH)
def test_two_lanes_in_flight(device):
    assert run_ranks(two_lanes, 2, device=device) == [True, True]


def compiled_with_idle_ranks(rank, group, backend):
    """A compiled layer whose ranks have no tokens in turn: a graph may not drop their exchange."""
    torch.manual_seed(0)
    device = device_of(group)
    with SymmTokenDispatcher(config(timeout=10), group) as dispatcher:
        router = torch.nn.Linear(D, E).to(device)

        def layer(x):
            scores, ids = router(x).softmax(-1).topk(K)
            rows, _, handle = dispatcher.dispatch(x, scores, ids)
            return x + dispatcher.combine(torch.tanh(rows), handle)

        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
        for step, tokens in enumerate(((5, 7), (0, 4), (3, 0), (1, 1), (0, 0), (6, 2))):
            x = inputs(rank, step, torch.float32, device, tokens=tokens[rank])[0]
            results = []
            for run in (compiled, layer):
                leaf = x.clone().requires_grad_()
                out = run(leaf)
                (out**2).sum().backward()
                with torch.no_grad():
                    results.append((out.detach(), leaf.grad, run(x)))
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    return True


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_layers_on_ranks_without_tokens(device, backend):
    assert run_ranks(compiled_with_idle_ranks, 2, backend, device=device) == [True, True]


def waits_in_kernels(rank, group, capacity):
    wait_as_on_a_gpu()
    W = dist.get_world_size(group)
    weight = weights(rank, W, torch.float32, "cpu")
    cfg = config(capacity=capacity)
    with SymmTokenDispatcher(cfg, group) as ours, AllToAllTokenDispatcher(config(), group) as theirs:
        for step in range(4):
            x, scores, ids = inputs(rank, step, torch.float32, "cpu")
            time.sleep(0.05 * ((rank + step) % W))
            lane = (None, 0, 1)[step % 3]
            mine = forward_backward(ours, x, scores, ids, weight, lane)
            base = forward_backward(theirs, x, scores, ids, weight)
            assert torch.equal(mine[0][: len(base[0])], base[0])
            assert torch.equal(mine[1], base[1])
            torch.testing.assert_close(mine[2:], base[2:], rtol=1e-5, atol=1e-5)
            # One direction twice in a row: the credit is waited for by a kernel of its own.
            rows, _, handle = ours.dispatch(x, scores, ids)
            first = ours.combine(rows, handle)
            time.sleep(0.05 * ((rank + step) % W))
            assert torch.equal(ours.combine(rows, handle), first)
    return True


@pytest.mark.parametrize("capacity", ["exact", 3 * C * K])
def test_kernels_that_wait_as_on_a_gpu(capacity):
    assert run_ranks(waits_in_kernels, 2, capacity) == [True, True]


def interleaves(rank, group):
    wait_as_on_a_gpu()
    given = [inputs(rank, step, torch.float64, "cpu") for step in range(3)]
    results = []
    for together in (False, True):
        weight = weights(rank, 2, torch.float64, "cpu").requires_grad_()
        with SymmTokenDispatcher(config(dtype=torch.float64), group) as dispatcher:

            def layers(x, scores, ids, dispatcher=dispatcher, weight=weight):
                for _ in range(2):
                    rows, counts, handle = yield dispatcher.dispatch_async(x, scores, ids)
                    time.sleep(0.02 * rank)
                    x = x + (yield dispatcher.combine_async(apply_experts(rows, counts, weight), handle))
                return x

            if together:
                outs = symm_a2a.Domino(dispatcher, 3).run(layers, given)
            else:
                outs = [symm_a2a.Domino(dispatcher, 1).run(layers, [one])[0] for one in given]
            torch.cat(outs).square().sum().backward()
        results.append((torch.cat(outs).detach(), weight.grad))
    (alone, alone_grad), (interleaved, interleaved_grad) = results
    assert torch.equal(alone, interleaved)
    torch.testing.assert_close(alone_grad, interleaved_grad, rtol=0, atol=1e-12)
    return True


def test_micro_batches_interleaved_over_kernels_that_wait_as_on_a_gpu():
    assert run_ranks(interleaves, 2) == [True, True]
