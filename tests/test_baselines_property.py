"""All baselines against the oracle, over random sizes, routings, masks, paddings and dtypes.

Hypothesis draws some tens of cases at once, for one set of rank processes to run one after another.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from symm_a2a import Placement, reference
from symm_a2a.baselines import AllGatherTokenDispatcher, AllToAllTokenDispatcher, ReplicatedTokenDispatcher
from symm_a2a.testing import run_ranks
from tests.cases import Case, apply_experts, placements_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TOLERANCE = 1e-12
"""Of sums and gradients in fp64, whose terms are of order 1 to 10, and at most some tens."""

ROUNDINGS = {
    # A product, and a sum over K slots, rounded at every step.
    AllToAllTokenDispatcher: lambda case: 1 + case.top_k,
    # A part for each rank, and their sum, rounded at every step.
    AllGatherTokenDispatcher: lambda case: 2 * case.world_size,
    ReplicatedTokenDispatcher: lambda case: 2 * case.world_size,
}


@st.composite
def cases_of(draw, world_size):
    num_local = draw(st.integers(1, 3))
    tokens = st.lists(st.integers(0, 9), min_size=world_size, max_size=world_size)
    return Case(
        num_local_experts=num_local,
        top_k=draw(st.integers(1, min(6, num_local * world_size + 1))),
        hidden_dim=draw(st.integers(1, 9)),
        tokens=tuple(draw(st.one_of(tokens, st.just([0] * world_size)))),
        skew=draw(st.sampled_from(["none", "none", "one_expert", "one_rank"])),
        masked=draw(st.sampled_from([0.0, 0.3, 1.0])),
        ids_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        pad_multiple=draw(st.sampled_from([1, 1, 4, 5])),
        seed=draw(st.integers(0, 2**20)),
    )


def with_placement(drawn):
    """Return a strategy of what was drawn with a placement, or None, for a contiguous one."""
    case, dtype = drawn
    placed = placements_of(case.world_size, case.num_experts)
    placements = st.one_of(st.none(), placed, placed)
    return st.tuples(st.just(case), st.just(dtype), placements)


class Sharded:
    """What a rank has of a case, and what is to come of it, where tokens are shared out among the ranks."""

    def __init__(self, case, dtype, placement):
        self.ids, self.xs, self.scores = case.ids(), case.xs(dtype), case.scores(torch.float64)
        self.held, self.num_places = placement.experts_of_rank, placement.num_local_experts
        places = [placement.places(ids, rank) for rank, ids in enumerate(self.ids)]
        self.route = (places, placement.num_places, case.pad_multiple)
        gen = torch.Generator().manual_seed(case.seed + 1)
        D = case.hidden_dim
        every = torch.randn(case.num_experts, D, D, generator=gen, dtype=torch.float64).to(dtype)
        self.weights = [every[list(mine)] for mine in self.held]
        self.grads = [torch.randn(x.shape, generator=gen, dtype=torch.float64).to(dtype) for x in self.xs]

    def mine(self, rank):
        """Return x, scores, ids and the gradient of the output."""
        return [part[rank] for part in (self.xs, self.scores, self.ids, self.grads)]

    def expected(self, rank):
        """Return rows and counts."""
        rows, counts = reference.dispatch(self.xs, *self.route)
        return rows[rank], counts[rank][: len(self.held[rank])]

    def differentiated(self, rank):
        """Return the output, and the gradients of x, scores and weights, in fp64."""
        leaves = [[t.clone().requires_grad_() for t in part] for part in (self.xs, self.scores, self.weights)]
        xs, scores, weights = leaves
        rows, counts = reference.dispatch(xs, *self.route)
        ys = [apply_experts(*each) for each in zip(rows, counts, self.whole(weights), strict=True)]
        outs = reference.combine(ys, scores, *self.route)
        sum((out * grad).sum() for out, grad in zip(outs, self.grads, strict=True)).backward()
        return self.pick(rank, outs, xs, scores, weights)

    def whole(self, weights):
        """Return weights of every place, zeros where it holds no expert."""
        return [F.pad(weight, (0, 0, 0, 0, 0, self.num_places - len(weight))) for weight in weights]

    def pick(self, rank, outs, xs, scores, weights):
        return outs[rank], xs[rank].grad, scores[rank].grad, weights[rank].grad

    def sums(self, rank, rows_RD):
        """Return, for rows given back as they came: the sums, and the sizes of their terms, in fp64."""
        ys = reference.dispatch(self.xs, *self.route)[0]
        exact = reference.combine(ys, self.scores, *self.route)
        return exact[rank], reference.combine([y.abs() for y in ys], self.scores, *self.route)[rank]


class Replicated(Sharded):
    """The same, where every rank has all tokens: the oracle is a single rank with all the experts."""

    def __init__(self, case, dtype, placement):
        super().__init__(case, dtype, placement)
        for name in ("ids", "xs", "scores", "grads"):
            setattr(self, name, [torch.cat(getattr(self, name))])
        alike = dataclasses.replace(placement, prefer_local=False)
        self.route = ([alike.places(self.ids[0], 0)], *self.route[1:])

    def mine(self, rank):
        return super().mine(0)

    def expected(self, rank):
        rows, counts = reference.dispatch(self.xs, *self.route)
        counts_WL = counts[0].view(len(self.held), -1)
        return rows[0].split(counts_WL.sum(1).tolist())[rank], counts_WL[rank, : len(self.held[rank])]

    def whole(self, weights):
        return [torch.cat(super().whole(weights))]

    def pick(self, rank, outs, xs, scores, weights):
        return outs[0], xs[0].grad, scores[0].grad, weights[rank].grad

    def sums(self, rank, rows_RD):
        return super().sums(0, rows_RD)


def check(make, case, dtype, placement, rank, group):
    placed = placement or Placement.contiguous(case.num_experts, case.world_size)
    problem = (Replicated if make is ReplicatedTokenDispatcher else Sharded)(case, dtype, placed)
    x_TD, scores_TK, ids_TK, grad_TD = problem.mine(rank)
    most = sum(case.tokens) if make is ReplicatedTokenDispatcher else max(case.tokens)
    cfg = case.config(dtype=dtype, max_tokens_per_rank=max(1, most) + case.seed % 3, placement=placement)
    with make(cfg, group, "cpu") as dispatcher:
        assert dispatcher.num_local_experts == len(placed.experts_of_rank[rank])
        x_TD, scores_TK = x_TD.clone().requires_grad_(), scores_TK.clone().requires_grad_()
        rows_RD, counts_L, handle = dispatcher.dispatch(x_TD, scores_TK, ids_TK)
        expected_RD, expected_L = problem.expected(rank)
        assert rows_RD.dtype == dtype
        assert torch.equal(rows_RD, expected_RD)
        assert torch.equal(counts_L, expected_L)
        assert counts_L.dtype == torch.int32

        sums_TD, sizes_TD = problem.sums(rank, rows_RD)
        out_TD = dispatcher.combine(rows_RD, handle)
        # One more for what a first order analysis leaves out; scores are rounded to fp32.
        share = (ROUNDINGS[make](case) + 1) * torch.finfo(dtype).eps / 2 + case.top_k * 2**-22
        assert ((out_TD.double() - sums_TD).abs() <= share * sizes_TD).all()

        weight_LDD = problem.weights[rank].clone().requires_grad_()
        out_TD = dispatcher.combine(apply_experts(rows_RD, counts_L, weight_LDD), handle, x_TD)
        assert out_TD.dtype == dtype
        out_TD.backward(grad_TD)
        if dtype == torch.float64:
            # A rank may hold no expert.
            weight_grad = weight_LDD if weight_LDD.grad is None else weight_LDD.grad
            actual = (out_TD, x_TD.grad, scores_TK.grad, weight_grad)
            for one, expected in zip(actual, problem.differentiated(rank), strict=True):
                torch.testing.assert_close(one, expected, rtol=0, atol=TOLERANCE)


def run_all(rank, group, drawn):
    for case, dtype, placement in drawn:
        for make in ROUNDINGS:
            try:
                check(make, case, dtype, placement, rank, group)
            except Exception as error:
                raise AssertionError(f"{make.__name__}, {dtype}, {case}, {placement}") from error


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_sums_and_gradients_are_the_oracles(world_size):
    drawn_at_once = st.lists(
        # Every second in fp64, where gradients are compared.
        st.tuples(cases_of(world_size), st.sampled_from([*DTYPES, *3 * [torch.float64]])).flatmap(
            with_placement
        ),
        min_size=25,
        max_size=25,
    )

    # No shrinking: a failure names its case, and each attempt would start processes. The first example is of
    # the simplest cases alone.
    @settings(max_examples=3, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(drawn_at_once)
    def run(drawn):
        if world_size == 1:
            run_all(0, None, drawn)
        else:
            run_ranks(run_all, world_size, drawn, timeout=120)

    run()
