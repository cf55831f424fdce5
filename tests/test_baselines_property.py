"""All baselines against the oracle, over random sizes, routings, masks, paddings and dtypes.

Hypothesis draws some tens of cases at once, for one set of rank processes to run one after another.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from symm_a2a import reference
from symm_a2a.baselines import AllGatherTokenDispatcher, AllToAllTokenDispatcher, ReplicatedTokenDispatcher
from symm_a2a.testing import run_ranks
from tests.cases import Case, apply_experts

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


class Sharded:
    """What a rank has of a case, and what is to come of it, where tokens are shared out among the ranks."""

    def __init__(self, case, dtype):
        self.ids, self.xs, self.scores = case.ids(), case.xs(dtype), case.scores(torch.float64)
        self.route = (self.ids, case.num_experts, case.pad_multiple)
        gen = torch.Generator().manual_seed(case.seed + 1)
        D = case.hidden_dim
        every = torch.randn(case.num_experts, D, D, generator=gen, dtype=torch.float64).to(dtype)
        self.weights = list(every.chunk(case.world_size))
        self.grads = [torch.randn(x.shape, generator=gen, dtype=torch.float64).to(dtype) for x in self.xs]

    def mine(self, rank):
        """Return x, scores, ids and the gradient of the output."""
        return [part[rank] for part in (self.xs, self.scores, self.ids, self.grads)]

    def expected(self, rank):
        """Return rows and counts."""
        rows, counts = reference.dispatch(self.xs, *self.route)
        return rows[rank], counts[rank]

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
        return weights

    def pick(self, rank, outs, xs, scores, weights):
        return outs[rank], xs[rank].grad, scores[rank].grad, weights[rank].grad

    def sums(self, rank, rows_RD):
        """Return, for rows given back as they came: the sums, and the sizes of their terms, in fp64."""
        ys = reference.dispatch(self.xs, *self.route)[0]
        exact = reference.combine(ys, self.scores, *self.route)
        return exact[rank], reference.combine([y.abs() for y in ys], self.scores, *self.route)[rank]


class Replicated(Sharded):
    """The same, where every rank has all tokens: the oracle is a single rank with all the experts."""

    def __init__(self, case, dtype):
        super().__init__(case, dtype)
        for name in ("ids", "xs", "scores", "grads"):
            setattr(self, name, [torch.cat(getattr(self, name))])
        self.route = (self.ids, *self.route[1:])
        self.world_size = case.world_size

    def mine(self, rank):
        return super().mine(0)

    def expected(self, rank):
        rows_RD, counts_E = super().expected(0)
        counts = counts_E.chunk(self.world_size)
        return rows_RD.split([int(count.sum()) for count in counts])[rank], counts[rank]

    def whole(self, weights):
        return [torch.cat(weights)]

    def pick(self, rank, outs, xs, scores, weights):
        return outs[0], xs[0].grad, scores[0].grad, weights[rank].grad

    def sums(self, rank, rows_RD):
        return super().sums(0, rows_RD)


def check(make, case, dtype, rank, group):
    problem = (Replicated if make is ReplicatedTokenDispatcher else Sharded)(case, dtype)
    x_TD, scores_TK, ids_TK, grad_TD = problem.mine(rank)
    most = sum(case.tokens) if make is ReplicatedTokenDispatcher else max(case.tokens)
    cfg = case.config(dtype=dtype, max_tokens_per_rank=max(1, most) + case.seed % 3)
    with make(cfg, group, "cpu") as dispatcher:
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
            actual = (out_TD, x_TD.grad, scores_TK.grad, weight_LDD.grad)
            for one, expected in zip(actual, problem.differentiated(rank), strict=True):
                torch.testing.assert_close(one, expected, rtol=0, atol=TOLERANCE)


def run_all(rank, group, drawn):
    for case, dtype in drawn:
        for make in ROUNDINGS:
            try:
                check(make, case, dtype, rank, group)
            except Exception as error:
                raise AssertionError(f"{make.__name__}, {dtype}, {case}") from error


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_sums_and_gradients_are_the_oracles(world_size):
    drawn_at_once = st.lists(
        # Every second in fp64, where gradients are compared.
        st.tuples(cases_of(world_size), st.sampled_from([*DTYPES, *3 * [torch.float64]])),
        min_size=25,
        max_size=25,
    )

    # No shrinking: a failure names its case, and each attempt would start processes.
    @settings(max_examples=2, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(drawn_at_once)
    def run(drawn):
        if world_size == 1:
            run_all(0, None, drawn)
        else:
            run_ranks(run_all, world_size, drawn, timeout=120)

    run()
