"""Numbers: what is no number stays in its rows, bits are kept, and the same inputs give the same bits."""

import mmap
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symm_a2a import EPConfig, SymmTokenDispatcher, VirtualWorld, reference
from symm_a2a.memory import VirtualMemory
from symm_a2a.testing import run_ranks
from tests.cases import Case, cases, examples, use_small_blocks
from tests.ranks import config, forward_backward, inputs, weights

NO_RESERVE = 0x4000
"""Of mmap; Python names it from 3.13 on."""

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def any_bits(shape, dtype, seed):
    """Rows of random bits: every NaN there is, denormals, infinities, both zeros."""
    gen = torch.Generator().manual_seed(seed)
    integer = INTEGERS[dtype.itemsize]
    bits = torch.randint(
        torch.iinfo(integer).min, torch.iinfo(integer).max, shape, generator=gen, dtype=integer
    )
    edges = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).smallest_normal / 2]
    )
    chosen = torch.randint(0, 12, shape, generator=gen)
    for number, edge in enumerate(edges.to(dtype).view(integer)):
        bits[chosen == number] = edge
    return bits.view(dtype)


@settings(max_examples=examples(5), deadline=None)
@given(cases(max_ranks=4), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**20))
def test_dispatch_keeps_every_bit(case, dtype, small, seed):
    integer, ids = INTEGERS[dtype.itemsize], case.ids()
    xs = [any_bits((T, case.hidden_dim), dtype, seed + rank) for rank, T in enumerate(case.tokens)]
    expected, _ = reference.dispatch([x.view(integer) for x in xs], ids, case.num_experts, case.pad_multiple)
    with VirtualWorld(case.config(dtype=dtype), case.world_size, "cpu") as world:
        if small:
            use_small_blocks(world)
        rows, _, handles = world.dispatch(xs, case.scores(torch.float32), ids)
        again = world.dispatch_again(xs, handles)
    for one, other, right in zip(rows, again, expected, strict=True):
        assert torch.equal(one.view(integer), right)
        assert torch.equal(other.view(integer), right)


CASE = Case(
    num_local_experts=2, top_k=3, hidden_dim=5, tokens=(6, 0, 5), skew="none", masked=0.2,
    ids_dtype=torch.int64, pad_multiple=2, seed=11,
)  # fmt: skip


def linear(rows, counts, weight):
    """Experts that no number saturates."""
    sizes = [*counts.tolist(), len(rows) - int(counts.sum())]
    return torch.cat([part @ one for part, one in zip(rows.split(sizes), [*weight, weight[0]], strict=True)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["x", "score", "expert", "gradient"])
def test_what_is_no_number_reaches_what_is_made_of_it_and_nothing_else(place, value):
    """One of them in one token's row, one score, one expert's weights, or one token's gradient."""
    xs, scores, ids = CASE.xs(torch.float64), CASE.scores(torch.float64), CASE.ids()
    leaves = [t.requires_grad_() for t in (*xs, *scores)]
    grads = [torch.ones_like(x) for x in xs]
    weight = [torch.randn(2, 5, 5, dtype=torch.float64) for _ in xs]
    rank, token, k = next((r, t, k) for r in (2, 0) for t in range(5) for k in range(3) if ids[r][t, k] >= 0)
    with torch.no_grad():
        if place == "x":
            xs[rank][token, 1] = value
        elif place == "score":
            scores[rank][token, k] = value
        elif place == "expert":
            expert = int(ids[rank][token, k])
            weight[expert // 2][expert % 2, 0, 0] = value
        else:
            grads[rank][token, 1] = value

    def layer(dispatch, combine):
        for leaf in leaves:
            leaf.grad = None
        rows, counts, handles = dispatch()
        outs = combine([linear(*one) for one in zip(rows, counts, weight, strict=True)], handles)
        torch.autograd.backward(outs, grads)
        return [*outs, *(leaf.grad for leaf in leaves)]

    # NumPy, which interprets the kernels, warns of what is no number.
    with VirtualWorld(CASE.config(dtype=torch.float64), 3, "cpu") as world, np.errstate(all="ignore"):
        ours = layer(lambda: world.dispatch(xs, scores, ids), world.combine)
    routing = ids, CASE.num_experts, CASE.pad_multiple
    right = layer(
        lambda: (*reference.dispatch(xs, *routing), None),
        lambda ys, _: reference.combine(ys, scores, *routing),
    )
    spread = sum(int((~t.isfinite()).sum()) for t in right)
    assert spread > 0
    for one, other in zip(ours, right, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        assert torch.allclose(one[other.isfinite()], other[other.isfinite()], rtol=1e-12, atol=1e-12)


def skewed(rank, group, dtype):
    dice = random.Random(rank)
    weight = weights(rank, group.size(), dtype, "cpu")
    found = []
    with SymmTokenDispatcher(config(dtype=dtype), group) as dispatcher:
        for run in range(10):
            time.sleep(dice.choice([0.0, 0.0, 0.001, 0.01]))
            x, scores, ids = inputs(rank, 3, dtype, "cpu")
            found.append(forward_backward(dispatcher, x, scores, ids, weight, lane=run % 2))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ten_runs_with_any_skew_give_the_same_bits(dtype):
    for runs in run_ranks(skewed, 4, dtype):
        for run in runs[1:]:
            for one, first in zip(run, runs[0], strict=True):
                assert torch.equal(one, first)


SIZES = {
    "one of everything": dict(ranks=1, experts=1, top_k=1, hidden=1, tokens=1),
    "one token a rank": dict(ranks=8, experts=8, top_k=8, hidden=3, tokens=1),
    "many ranks": dict(ranks=24, experts=48, top_k=3, hidden=2, tokens=3),
    "many experts on a rank": dict(ranks=2, experts=1030, top_k=4, hidden=2, tokens=40),
    "more choices than experts": dict(ranks=2, experts=2, top_k=33, hidden=2, tokens=9),
    "wide rows": dict(ranks=2, experts=4, top_k=2, hidden=20_001, tokens=3),
    "many tokens": dict(ranks=2, experts=4, top_k=2, hidden=1, tokens=5_000),
    "nothing is a power of two": dict(ranks=3, experts=21, top_k=5, hidden=37, tokens=129),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("capacity", ["exact", "static"])
def test_sizes_far_from_the_usual_are_right(name, capacity):
    ranks, E, K, D, T = SIZES[name].values()
    gen = torch.Generator().manual_seed(len(name))
    xs = [torch.randn(T, D, generator=gen) for _ in range(ranks)]
    scores = [torch.rand(T, K, generator=gen) for _ in range(ranks)]
    ids = [torch.randint(-1, E, (T, K), generator=gen) for _ in range(ranks)]
    rows_of, counts_of = reference.dispatch(xs, ids, E)
    most = max(len(rows) for rows in rows_of)
    cfg = EPConfig(
        num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=T, dtype=torch.float32,
        capacity="exact" if capacity == "exact" else max(1, most),
    )  # fmt: skip
    for tensor in (*xs, *scores):
        tensor.requires_grad_()
    with VirtualWorld(cfg, ranks, "cpu") as world:
        rows, counts, handles = world.dispatch(xs, scores, ids)
        outs = world.combine([2 * r for r in rows], handles)
        torch.cat(outs).sum().backward()
    for rank in range(ranks):
        right = rows_of[rank]
        assert torch.equal(rows[rank][: len(right)], right)
        assert torch.equal(counts[rank], counts_of[rank])
        taken = (ids[rank] >= 0) * scores[rank].detach()
        whole = taken.double().sum(1, keepdim=True)
        assert torch.allclose(outs[rank].double(), 2 * whole * xs[rank].double(), rtol=1e-5, atol=1e-6)
        assert torch.allclose(xs[rank].grad.double(), 2 * whole.expand(T, D), rtol=1e-5, atol=1e-6)
        sums = 2 * xs[rank].detach().double().sum(1, keepdim=True) * (ids[rank] >= 0)
        assert torch.allclose(scores[rank].grad.double(), sums, rtol=1e-4, atol=1e-3)


def test_sections_past_two_thousand_million_elements_are_reached(monkeypatch):
    """Of 34 GB that nobody has to have: pages that are not touched do not exist."""

    def untouched(cls, world_size, nbytes, device):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        pages = [mmap.mmap(-1, nbytes, flags=flags) for _ in range(world_size)]
        arenas = [torch.frombuffer(page, dtype=torch.uint8) for page in pages]
        return [cls(rank, arenas) for rank in range(world_size)]

    monkeypatch.setattr(VirtualMemory, "world", classmethod(untouched))
    D, C = 1 << 17, (1 << 14) + 2
    assert C * D > 1 << 31
    cfg = EPConfig(
        num_experts=2, top_k=1, hidden_dim=D, max_tokens_per_rank=C, dtype=torch.float16, num_lanes=1
    )
    xs = [torch.randn(2, D).half() for _ in range(2)]
    scores, ids = [torch.ones(2, 1)] * 2, [torch.tensor([[0], [1]])] * 2
    with VirtualWorld(cfg, 2, "cpu") as world:
        rows, _, handles = world.dispatch(xs, scores, ids)
        outs = world.combine(rows, handles)
    for rank in range(2):
        assert torch.equal(rows[rank], torch.stack([x[rank] for x in xs]))
        assert torch.equal(outs[rank], xs[rank])
