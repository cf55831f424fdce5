"""The baselines that share tokens out against the oracle, in four processes."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from symm_a2a import reference
from symm_a2a.baselines import AllGatherTokenDispatcher, AllToAllTokenDispatcher
from symm_a2a.config import EPConfig
from symm_a2a.errors import ConfigError, ExpertIdError
from symm_a2a.placement import Placement
from symm_a2a.testing import run_ranks

RANKS = 4
TOLERANCE = 1e-12
"""Of gradients and sums in fp64, whose terms are of order 1 and at most some tens."""


def config(**changes):
    sizes = {"num_experts": 8, "top_k": 3, "hidden_dim": 5, "max_tokens_per_rank": 16, "dtype": torch.float64}
    return EPConfig(**{**sizes, **changes})


def coded(rank, num_tokens, hidden, dtype):
    """Return `(T, D)` rows that say whose they are: rank, token, and three numbers made of them."""
    token_T = torch.arange(num_tokens)
    columns = [torch.full_like(token_T, rank + 1), token_T + 1, token_T * 7 + rank, -token_T, token_T * 0 + 1]
    return torch.stack(columns, 1)[:, :hidden].to(dtype)


def choose_ids(kind, generator, num_tokens, num_experts, top_k):
    if kind == "distinct":
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        return scores.topk(top_k, dim=1).indices
    if kind == "any":  # Masked slots and experts chosen twice among them.
        return torch.randint(-1, num_experts, (num_tokens, top_k), generator=generator)
    fixed = {"masked": -1, "first expert": 0, "last expert": num_experts - 1}
    return torch.full((num_tokens, top_k), fixed[kind])


class Case:
    """The inputs of every rank, the same in every process."""

    def __init__(self, cfg, num_tokens, kind="any", seed=0):
        generator = torch.Generator().manual_seed(seed)
        E, K, D = cfg.num_experts, cfg.top_k, cfg.hidden_dim
        self.cfg, self.num_tokens = cfg, num_tokens
        self.ids = [choose_ids(kind, generator, t, E, K) for t in num_tokens]
        self.scores = [torch.rand(t, K, generator=generator, dtype=torch.float64) for t in num_tokens]
        self.xs = [torch.randn(t, D, generator=generator, dtype=torch.float64) for t in num_tokens]
        self.grads = [torch.randn(t, D, generator=generator, dtype=torch.float64) for t in num_tokens]
        self.weight_EDD = torch.randn(E, D, D, generator=generator, dtype=torch.float64)
        self.routing = (self.ids, E, cfg.pad_multiple)

    def local_weight(self, rank):
        return self.weight_EDD.chunk(len(self.ids))[rank].clone().requires_grad_()

    def oracle(self, needs_grad=lambda rank: True):
        """Return per rank: rows, outputs, and the gradients of x, scores and weights."""
        xs = [x.clone().requires_grad_(needs_grad(rank)) for rank, x in enumerate(self.xs)]
        scores = [score.clone().requires_grad_() for score in self.scores]
        weights = [self.local_weight(rank) for rank in range(len(xs))]
        rows, counts = reference.dispatch(xs, *self.routing)
        ys = [experts(*arguments) for arguments in zip(rows, counts, weights, strict=True)]
        outs = reference.combine(ys, scores, *self.routing)
        loss = sum((out * grad).sum() for out, grad in zip(outs, self.grads, strict=True))
        loss.backward()
        return rows, counts, outs, xs, scores, weights


def experts(rows_RD, counts_L, weight_LDD):
    """Return what each expert makes of its rows; a padding row becomes something other than zero."""
    parts = rows_RD.split(counts_L.tolist())
    return torch.cat(
        [torch.tanh(part @ weight + 0.1) for part, weight in zip(parts, weight_LDD, strict=True)]
    )


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def each(rank, group, function, *args):
    """Call a function of this file with each of the dispatchers in turn, in the same processes."""
    for make in (AllToAllTokenDispatcher, AllGatherTokenDispatcher):
        try:
            function(rank, group, make, *args)
        except Exception as error:
            raise AssertionError(make.__name__) from error


SHAPES = {
    "ragged": (7, 3, 5, 1),
    "full": (16, 16, 16, 16),
    "one token": (0, 1, 0, 0),
    "some without": (0, 4, 0, 2),
    "none": (0, 0, 0, 0),
}


def rows_in_order(rank, group, make, cfg, kind, id_dtype):
    with make(cfg, group, "cpu") as dispatcher:
        for num_tokens in SHAPES.values():
            case = Case(cfg, num_tokens, kind)
            xs = [coded(r, t, cfg.hidden_dim, cfg.dtype) for r, t in enumerate(num_tokens)]
            expected, counts = reference.dispatch(xs, *case.routing)
            rows_RD, counts_L, handle = dispatcher.dispatch(
                xs[rank], case.scores[rank].float(), case.ids[rank].to(id_dtype)
            )
            assert rows_RD.dtype == cfg.dtype
            assert counts_L.dtype == torch.int32
            assert torch.equal(rows_RD, expected[rank])
            assert torch.equal(counts_L, counts[rank])
            # Rows that name their slot, also its k, find back to it: a score of one slot, zeros elsewhere.
            routed = reference.route(*case.routing)[rank]
            y_RD = torch.stack([routed.origin, routed.token, routed.k, routed.k * 0 + 1, routed.k * 0], 1)
            handle_scores = [torch.zeros_like(score) for score in case.scores]
            k = num_tokens[0] % cfg.top_k
            for score in handle_scores:
                score[:, k] = 1
            _, _, handle = dispatcher.dispatch(xs[rank], handle_scores[rank], case.ids[rank].to(id_dtype))
            out_TD = dispatcher.combine(y_RD.to(cfg.dtype), handle)
            token_T = torch.arange(num_tokens[rank])
            slot = torch.stack(
                [token_T * 0 + rank, token_T, token_T * 0 + k, token_T * 0 + 1, token_T * 0], 1
            )
            assert torch.equal(out_TD, (slot * (case.ids[rank][:, k : k + 1] >= 0)).to(cfg.dtype))


@pytest.mark.parametrize(
    ("changes", "kind", "id_dtype"),
    [
        ({"dtype": torch.bfloat16}, "any", torch.int64),
        ({"dtype": torch.float16, "pad_multiple": 8}, "any", torch.int32),
        ({"dtype": torch.float32, "num_experts": 12}, "distinct", torch.int64),
        ({"dtype": torch.float64, "pad_multiple": 3, "num_experts": 20}, "distinct", torch.int32),
        ({"dtype": torch.bfloat16, "num_experts": 4}, "first expert", torch.int64),
        ({"dtype": torch.bfloat16, "pad_multiple": 16}, "last expert", torch.int64),
        ({"dtype": torch.float32}, "masked", torch.int64),
    ],
)
def test_rows_are_bitwise_the_oracles(changes, kind, id_dtype):
    run_ranks(each, RANKS, rows_in_order, config(**changes), kind, id_dtype)


def layer(dispatcher, x_TD, scores_TK, ids_TK, weight_LDD):
    rows_RD, counts_L, handle = dispatcher.dispatch(x_TD, scores_TK, ids_TK)
    return dispatcher.combine(experts(rows_RD, counts_L, weight_LDD), handle, x_TD)


def train(rank, group, make, cfg, kind, checkpointed):
    dispatcher = make(cfg, group)
    dispatcher.warmup()
    for seed, num_tokens in enumerate(SHAPES.values()):
        case = Case(cfg, num_tokens, kind, seed)
        _, _, outs, xs, scores, weights = case.oracle()
        x_TD = case.xs[rank].clone().requires_grad_()
        scores_TK = case.scores[rank].clone().requires_grad_()
        weight_LDD = case.local_weight(rank)
        arguments = (dispatcher, x_TD, scores_TK, case.ids[rank], weight_LDD)
        out_TD = checkpoint(layer, *arguments, use_reentrant=False) if checkpointed else layer(*arguments)
        out_TD.backward(case.grads[rank])
        close(out_TD, outs[rank])
        close(x_TD.grad, xs[rank].grad)
        close(scores_TK.grad, scores[rank].grad)
        close(weight_LDD.grad, weights[rank].grad)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("changes", "kind"),
    [({}, "any"), ({"pad_multiple": 4}, "any"), ({"num_experts": 12}, "distinct"), ({}, "last expert")],
)
def test_steps_give_the_oracles_outputs_and_gradients(changes, kind, checkpointed):
    run_ranks(each, RANKS, train, config(**changes), kind, checkpointed)


def needs_grad_on_one(rank, group, make):
    dispatcher = make(config(), group)
    for num_tokens in SHAPES.values():
        case = Case(dispatcher.cfg, num_tokens)
        _, _, _, xs, _, _ = case.oracle()
        x_TD = case.xs[rank].clone().requires_grad_(rank == 2)
        weight_LDD = case.local_weight(rank).detach()
        out_TD = layer(dispatcher, x_TD, case.scores[rank], case.ids[rank], weight_LDD)
        (out_TD * case.grads[rank]).sum().backward()
        if rank == 2:
            close(x_TD.grad, xs[2].grad)
        else:
            assert x_TD.grad is None


def test_an_input_that_needs_grad_on_one_rank_only():
    run_ranks(each, RANKS, needs_grad_on_one, timeout=30)


def cut_on_one(rank, group, make):
    dispatcher = make(config(top_k=1), group)
    # A token of every rank for each rank: every rank's x has a gradient from the others.
    xs = [coded(r, RANKS, 5, torch.float64) for r in range(RANKS)]
    ids_TK = torch.arange(RANKS)[:, None] * 2
    x_TD = xs[rank].requires_grad_()
    rows_RD, _, handle = dispatcher.dispatch(x_TD, torch.ones(RANKS, 1), ids_TK)
    y_RD = rows_RD.detach() if rank == 1 else rows_RD
    dispatcher.combine(y_RD, handle).sum().backward()
    assert torch.equal(x_TD.grad, (torch.arange(RANKS) != 1).double()[:, None].expand(RANKS, 5))


def test_experts_that_ignore_their_rows_on_one_rank_only():
    run_ranks(each, RANKS, cut_on_one, timeout=30)


def combine_alone(rank, group, make):
    dispatcher = make(config(top_k=1), group)
    ids_TK = torch.arange(RANKS)[:, None] * 2
    with torch.no_grad():
        x_TD = coded(rank, RANKS, 5, torch.float64)
        rows_RD, _, handle = dispatcher.dispatch(x_TD, torch.ones(RANKS, 1), ids_TK)
    y_RD = rows_RD.clone().requires_grad_(rank == 1)
    dispatcher.combine(y_RD, handle).sum().backward()
    assert rank != 1 or torch.equal(y_RD.grad, torch.ones_like(y_RD))


def test_a_combine_with_gradients_of_a_dispatch_without():
    run_ranks(each, RANKS, combine_alone, timeout=30)


def placed_otherwise(rank, group, make):
    placement = Placement.from_ranks([0, 0, 0, 0, 1, 1, 1, 1][:: 1 if rank == 0 else -1], 2)
    with pytest.raises(ConfigError, match="expected the same configuration on every rank"):
        make(config(placement=placement), group)


def test_placements_that_differ_between_ranks_are_refused():
    run_ranks(each, 2, placed_otherwise, timeout=30)


def several_in_flight(rank, group, make):
    dispatcher = make(config(pad_multiple=2), group)
    cases = [
        Case(dispatcher.cfg, SHAPES[name], seed=seed) for seed, name in enumerate(("ragged", "some without"))
    ]
    xs, weights, flights = [], [], []
    for case in cases:
        xs.append(case.xs[rank].clone().requires_grad_())
        weights.append(case.local_weight(rank))
        flights.append(dispatcher.dispatch_async(xs[-1], case.scores[rank], case.ids[rank]))
    joined = [flight.join() for flight in flights]
    ys = [experts(rows, counts, weight) for (rows, counts, _), weight in zip(joined, weights, strict=True)]
    outs = [dispatcher.combine_async(y, handle).join() for y, (_, _, handle) in zip(ys, joined, strict=True)]
    again = dispatcher.combine(ys[0], joined[0][2])
    assert torch.equal(again, outs[0])
    loss = sum((out * case.grads[rank]).sum() for out, case in zip(outs, cases, strict=True))
    loss = loss + (again * cases[0].grads[rank]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for case, x_TD, weight, times in zip(cases, xs, weights, (4, 2), strict=True):
        _, _, _, expected_xs, _, expected_weights = case.oracle()
        close(x_TD.grad, times * expected_xs[rank].grad)
        close(weight.grad, times * expected_weights[rank].grad)


def test_two_flights_a_handle_combined_twice_and_a_graph_used_twice():
    run_ranks(each, RANKS, several_in_flight)


def strided(tensor):
    """Return the same values with gaps between rows and elements."""
    wide = torch.full((2 * tensor.shape[0] + 1, 3 * tensor.shape[1]), -7).to(tensor.dtype)
    wide[1::2, 1::3] = tensor
    return wide[1::2, 1::3]


def non_contiguous(rank, group, make):
    dispatcher = make(config(), group)
    case = Case(dispatcher.cfg, SHAPES["ragged"])
    case.grads = [torch.ones(1, 1, dtype=torch.float64).expand_as(grad) for grad in case.grads]
    case.xs = [x[:1].expand_as(x) for x in case.xs]
    _, _, outs, xs, scores, _ = case.oracle()
    x_TD = case.xs[rank].requires_grad_()
    scores_TK = strided(case.scores[rank]).requires_grad_()
    ids_TK = strided(case.ids[rank])
    assert not (x_TD.is_contiguous() and scores_TK.is_contiguous() and ids_TK.is_contiguous())
    rows_RD, counts_L, handle = dispatcher.dispatch(x_TD, scores_TK, ids_TK)
    y_RD = experts(rows_RD, counts_L, case.local_weight(rank))
    out_TD = dispatcher.combine(y_RD.T.contiguous().T, handle)
    out_TD.sum().backward()  # A gradient of stride 0.
    close(out_TD, outs[rank])
    close(scores_TK.grad, scores[rank].grad)
    close(x_TD.grad, xs[rank].grad)


def test_inputs_and_gradients_of_any_strides():
    run_ranks(each, RANKS, non_contiguous)


def bad_id_on_one(rank, group, make):
    dispatcher = make(config(), group)
    case = Case(dispatcher.cfg, SHAPES["ragged"])
    for bad in (8, -2, 2**31 - 1):
        if rank == 1:
            ids_TK = case.ids[1].clone()
            ids_TK[2, 1] = bad
            with pytest.raises(ExpertIdError, match=rf"expected topk_ids_TK in \[-1, 8\), got {bad}$"):
                dispatcher.dispatch(case.xs[1], case.scores[1], ids_TK)
        # Nothing was sent: the others, already waiting in this dispatch, get what rank 1 sends now.
        rows_RD, _, _ = dispatcher.dispatch(case.xs[rank], case.scores[rank], case.ids[rank])
        assert torch.equal(rows_RD, reference.dispatch(case.xs, *case.routing)[0][rank])


def test_an_id_out_of_range_is_refused_before_anything_is_sent():
    run_ranks(each, RANKS, bad_id_on_one, timeout=30)


def in_subgroups(rank, group, make):
    pairs = [[0, 2], [3, 1]]
    groups = [dist.new_group(pair) for pair in pairs]
    pair = pairs[rank % 2]
    subgroup = groups[rank % 2]
    place = dist.get_group_rank(subgroup, rank)
    case = Case(config(), (5, 2), seed=rank % 2)
    _, _, outs, xs, _, _ = case.oracle()
    with make(config(), subgroup) as dispatcher:
        assert dispatcher.world_size == len(pair)
        x_TD = case.xs[place].clone().requires_grad_()
        out_TD = layer(dispatcher, x_TD, case.scores[place], case.ids[place], case.local_weight(place))
        out_TD.backward(case.grads[place])
        close(out_TD, outs[place])
        close(x_TD.grad, xs[place].grad)


def test_groups_that_are_not_the_world():
    run_ranks(each, RANKS, in_subgroups)


def default_group(rank, group, make):
    dispatcher = make(config())
    assert dispatcher.world_size == 2
    assert dispatcher.device == torch.device("cpu")
    with pytest.raises(ConfigError, match="got 9 experts for 2 ranks"):
        make(config(num_experts=9))


def test_no_group_is_the_world():
    run_ranks(each, 2, default_group)
