"""One layer of torchtitan's experts: rows and gradients are those of its own all-to-all."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import symm_a2a
from symm_a2a.testing import run_ranks
from tests.integrations.titan_models import set_spmd_backend

# isort: split
# What imports torchtitan comes after the module that makes it use the CPU.
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from symm_a2a.integrations.torchtitan import SymmEPTokenDispatcher

W, E, K, D, F, C = 2, 6, 3, 40, 24, 20
L = E // W
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = {"uniform": (C, 13), "to rank 0 alone": (7, 9), "none on rank 1": (11, 0)}


def inputs(rank, case, dtype=torch.float32):
    """Random rows, no two alike; T differs between the ranks."""
    gen = torch.Generator().manual_seed(rank)
    T = TOKENS[case][rank]
    scores = torch.rand(T, E, generator=gen)
    if case == "to rank 0 alone":
        scores[:, L:] = -1
    scores, ids = scores.topk(K, dim=-1)
    return torch.randn(T, D, generator=gen).to(dtype), scores, ids


def counted(ids):
    return torch.bincount(ids.flatten(), minlength=E)


def mesh():
    return init_device_mesh("cpu", (W,), mesh_dim_names=("ep",))


def symmetric(**changes):
    sizes = dict(num_experts=E, top_k=K, hidden_dim=D, num_max_tokens_per_rank=C, dtype=torch.float32)
    return SymmEPTokenDispatcher.Config(**(sizes | changes))


def wired(config):
    dispatcher = config.build()
    dispatcher.wire_meshes(ep_mesh=mesh())
    return dispatcher


def layer(dispatcher, rank, case, dtype):
    """Return rows, counts, output, and the gradients of tokens, scores and the experts' weights."""
    x, scores, ids = inputs(rank, case, dtype)
    x.requires_grad_(), scores.requires_grad_()
    experts = GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=L).build()
    gen = torch.Generator().manual_seed(50 + rank)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, generator=gen) / 5)
    rows, counts, metadata = dispatcher.dispatch(x, scores, ids, counted(ids))
    out = dispatcher.combine(experts(rows, counts), metadata, x)
    (out * torch.randn(out.shape, generator=gen)).sum().backward()
    return rows, counts, out, x.grad, scores.grad, *[weight.grad for weight in experts.parameters()]


def side_by_side(rank, dtype):
    set_spmd_backend("partial_dtensor")
    theirs = wired(AllToAllTokenDispatcher.Config(num_experts=E, top_k=K))
    config = symmetric(dtype=dtype)
    with config.pool:
        ours = wired(config)
        return {
            case: [
                [t.detach() for t in layer(dispatcher, rank, case, dtype)] for dispatcher in (theirs, ours)
            ]
            for case in TOKENS
        }


def static(rank):
    """Return what a static capacity and padding give beside what arrives."""
    x, scores, ids = inputs(rank, "uniform")
    config = symmetric()
    with config.pool as pool:
        exact, counts, _ = wired(config).dispatch(x, scores, ids, counted(ids))
        # One after the other: a lane takes one exchange at a time.
        roomy = wired(symmetric(pool=pool, non_blocking_capacity_factor=1.0, pad_multiple=4))
        before = pool.dispatchers[0].stats()
        rows, padded, handle = roomy.dispatch(x, scores, ids, counted(ids))
        out = roomy.combine(rows, handle, x)
        waits = (pool.dispatchers[0].stats() - before).host_syncs
        return exact, counts.tolist(), rows, padded.tolist(), out, waits, len(pool.dispatchers)


def shared(rank):
    """Return the arenas that layers have, by number, which are closed with a pool, and errors after that."""
    config = symmetric()
    layers = [wired(config), wired(config), wired(copy.deepcopy(config))]
    of_a_stage = copy.deepcopy(config.build())
    of_a_stage.wire_meshes(ep_mesh=mesh())
    layers.append(of_a_stage)
    layers.append(wired(symmetric(pool=config.pool, num_max_tokens_per_rank=C + 1)))
    layers.append(wired(symmetric()))
    arenas = [layer.symm.arena for layer in layers]
    numbers = [arenas.index(arena) for arena in arenas]
    config.pool.close()
    config.pool.close()
    errors = []
    for call in (lambda: wired(config), lambda: layers[0].dispatch(*inputs(rank, "uniform"), None)):
        with pytest.raises(symm_a2a.ClosedError) as caught:
            call()
        errors.append(str(caught.value))
    closed = [arena.closed for arena in arenas]
    layers[-1].config.pool.close()
    return numbers, closed, errors


def misuse(rank):
    """Return the errors of an unwired dispatcher, of another dtype, and of a mesh that does not fit."""
    x, scores, ids = inputs(rank, "uniform")
    errors = []

    def fails(kind, call):
        with pytest.raises(kind) as caught:
            call()
        errors.append(str(caught.value))

    with symmetric().pool as pool:
        config = symmetric(pool=pool)
        fails(symm_a2a.ConfigError, lambda: config.build().dispatch(x, scores, ids, counted(ids)))
        fails(symm_a2a.ConfigError, lambda: config.build().wire_meshes(ep_mesh=None))
        fails(symm_a2a.ConfigError, lambda: wired(symmetric(pool=pool, num_experts=5)))
        fails(symm_a2a.ConfigError, lambda: wired(symmetric(pool=pool, num_max_tokens_per_rank=None)))
        fails(symm_a2a.InputError, lambda: wired(config).dispatch(x.bfloat16(), scores, ids, counted(ids)))
        return errors


def run_all(rank, group):
    of_dtypes = {dtype: side_by_side(rank, dtype) for dtype in DTYPES}
    return of_dtypes | {"static": static(rank), "shared": shared(rank), "misuse": misuse(rank)}


@pytest.fixture(scope="module")
def results():
    return run_ranks(run_all, W)


def assert_near(ours, theirs, dtype):
    """Sums of few terms in another order: two roundings of the largest of them, the CPU's own in bfloat16."""
    atol = 4 * torch.finfo(dtype).eps * (theirs.abs().max().item() if theirs.numel() else 1.0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_weight_gradients_are_equal_bit_for_bit(results, dtype):
    for rank, of_rank in enumerate(results):
        for case, (theirs, ours) in of_rank[dtype].items():
            (rows, counts, out, grad_x, grad_scores, *grad_weights), named = ours, (rank, case)
            assert torch.equal(rows, theirs[0]), named
            assert rows.dtype == dtype
            assert counts.tolist() == theirs[1].tolist(), named
            # The gradient of an expert's output is one product: no order of a sum to differ in.
            for mine, other in zip(grad_weights, theirs[5:], strict=True):
                assert torch.equal(mine, other), named
                assert mine.abs().max() > 0 or rows.shape[0] == 0
            assert_near(out, theirs[2], dtype)
            assert_near(grad_x, theirs[3], dtype)
            assert_near(grad_scores, theirs[4], torch.bfloat16)
            assert grad_scores.dtype == torch.float32


def test_a_capacity_factor_never_makes_the_host_wait_and_pads(results):
    capacity = W * C * min(K, L) + L * 3
    capacity += -capacity % 4
    for rank, (exact, counts, rows, padded, out, waits, num_arenas) in enumerate(
        of_rank["static"] for of_rank in results
    ):
        assert rows.shape == (capacity, D)
        assert padded == [count + -count % 4 for count in counts]
        for mine, other in zip(
            rows.split([*padded, capacity - sum(padded)]), exact.split([*counts, 0]), strict=True
        ):
            assert torch.equal(mine[: len(other)], other)
            assert not mine[len(other) :].any()
        x, scores, _ = inputs(rank, "uniform")
        assert_near(out, x * scores.sum(-1, keepdim=True), torch.float32)
        assert (waits, num_arenas) == (0, 1)


def test_layers_share_an_arena_by_their_sizes_until_the_pool_is_closed(results):
    for numbers, closed, errors in (of_rank["shared"] for of_rank in results):
        assert numbers == [0, 0, 0, 0, 4, 5]
        assert closed == [True] * 5 + [False]
        assert "use_symm_a2a" in errors[0]


def test_errors_say_what_to_do(results):
    for of_rank in results:
        unwired, no_mesh, indivisible, unfilled, dtype = of_rank["misuse"]
        assert "wire_meshes" in unwired
        assert "expert_parallel_degree" in no_mesh
        assert "5 experts for 2 ranks" in indivisible
        assert "num_max_tokens_per_rank" in unfilled
        assert "expected tokens of torch.float32, got torch.bfloat16" in dtype
        assert "mixed_precision_param" in dtype
