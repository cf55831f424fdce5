"""The baselines in a group of one: what they are given, what they say, where they are built."""

import pytest
import torch
import torch.distributed as dist

from symm_a2a import reference
from symm_a2a.baselines import AllGatherTokenDispatcher, AllToAllTokenDispatcher, ReplicatedTokenDispatcher
from symm_a2a.errors import ClosedError, ConfigError, ExpertIdError, InputError, JoinedTwiceError
from symm_a2a.placement import Placement
from tests.test_baselines import Case, close, config, experts, layer


@pytest.fixture(params=[AllToAllTokenDispatcher, AllGatherTokenDispatcher, ReplicatedTokenDispatcher])
def make(request):
    """One of the dispatchers."""
    return request.param


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_in_low_precision_keep_the_standard_paths_error(make, dtype, top_k):
    cfg = config(dtype=dtype, num_experts=6, top_k=top_k)
    case = Case(cfg, (16,))
    scores_TK = case.scores[0].float()
    num_rows = int((case.ids[0] >= 0).sum())
    y_RD = torch.randn(num_rows, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    dispatcher = make(cfg)
    _, _, handle = dispatcher.dispatch(case.xs[0].to(dtype), scores_TK, case.ids[0])
    out_TD = dispatcher.combine(y_RD, handle)
    assert out_TD.dtype == dtype
    if top_k == 1:
        # One product in fp32, rounded once: every bit is known.
        (expected,) = reference.combine([y_RD], [scores_TK], *case.routing, accumulate=torch.float32)
        assert torch.equal(out_TD, expected.to(dtype))
    else:
        (exact,) = reference.combine([y_RD], [scores_TK], *case.routing)
        (magnitude,) = reference.combine([y_RD.abs()], [scores_TK], *case.routing)
        # Half an ulp for each product and each of the K sums, fp32's own besides.
        steps = (top_k + 1) * (torch.finfo(dtype).eps + torch.finfo(torch.float32).eps) / 2
        assert ((out_TD - exact).abs() <= steps * magnitude).all()


@pytest.mark.parametrize("pad_multiple", [1, 4])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_group_of_one_needs_no_process_group(make, num_tokens, pad_multiple):
    assert not dist.is_initialized()
    case = Case(config(pad_multiple=pad_multiple), (num_tokens,))
    _, _, outs, xs, scores, weights = case.oracle()
    x_TD, scores_TK = case.xs[0].clone().requires_grad_(), case.scores[0].clone().requires_grad_()
    weight_LDD = case.local_weight(0)
    with make(case.cfg) as dispatcher:
        dispatcher.warmup()
        out_TD = layer(dispatcher, x_TD, scores_TK, case.ids[0], weight_LDD)
        out_TD.backward(case.grads[0])
        for actual, expected in zip(
            (out_TD, x_TD.grad, scores_TK.grad, weight_LDD.grad),
            (outs[0], xs[0].grad, scores[0].grad, weights[0].grad),
            strict=True,
        ):
            close(actual, expected)

        def differentiable(x_TD, scores_TK):
            rows_RD, _, handle = dispatcher.dispatch(x_TD, scores_TK, case.ids[0])
            return dispatcher.combine(rows_RD.sin(), handle)

        assert torch.autograd.gradcheck(differentiable, (x_TD, scores_TK))


def test_results_do_not_alias_inputs_or_each_other(make):
    cfg = config(top_k=1, num_experts=1)
    dispatcher = make(cfg)
    x_TD, scores_TK, ids_TK = torch.ones(2, 5).double(), torch.ones(2, 1).double(), torch.zeros(2, 1).int()
    rows_RD, _, handle = dispatcher.dispatch(x_TD, scores_TK, ids_TK)
    x_TD.zero_()
    scores_TK.zero_()
    ids_TK.fill_(-1)
    out_TD = dispatcher.combine(rows_RD, handle)
    with torch.no_grad():
        rows_RD.zero_()
    assert torch.equal(out_TD, torch.ones(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_requires_them(make, mode):
    case = Case(config(), (6,))
    with mode():
        dispatcher = make(case.cfg)
        dispatcher.warmup()
        x_TD = case.xs[0].clone().requires_grad_()
        rows_RD, counts_L, handle = dispatcher.dispatch(x_TD, case.scores[0], case.ids[0])
        out_TD = dispatcher.combine(experts(rows_RD, counts_L, case.local_weight(0)), handle)
    assert not rows_RD.requires_grad
    assert not out_TD.requires_grad
    close(out_TD, case.oracle()[2][0].detach())
    # And the same dispatcher trains afterwards.
    x_TD = case.xs[0].clone().requires_grad_()
    layer(dispatcher, x_TD, case.scores[0], case.ids[0], case.local_weight(0)).backward(case.grads[0])
    close(x_TD.grad, case.oracle()[3][0].grad)


def test_it_is_built_where_trainers_build_models(make):
    with torch.device("meta"):
        dispatcher = make(config(), device="cpu")
        dispatcher.warmup()
    assert dispatcher.device == torch.device("cpu")


def test_autocast_changes_nothing(make):
    case = Case(config(dtype=torch.float32), (6,))
    dispatcher = make(case.cfg)
    arguments = (case.xs[0].float(), case.scores[0], case.ids[0])
    rows_RD, _, handle = dispatcher.dispatch(*arguments)
    out_TD = dispatcher.combine(rows_RD, handle)
    with torch.autocast("cpu", torch.bfloat16):
        rows_again, _, handle = dispatcher.dispatch(*arguments)
        out_again = dispatcher.combine(rows_again, handle)
    assert torch.equal(rows_again, rows_RD)
    assert torch.equal(out_again, out_TD)
    assert out_again.dtype == torch.float32


def test_differentiating_twice_says_that_it_cannot(make):
    case = Case(config(), (3,))
    dispatcher = make(case.cfg)
    x_TD = case.xs[0].clone().requires_grad_()
    out_TD = layer(dispatcher, x_TD, case.scores[0], case.ids[0], case.local_weight(0))
    (grad,) = torch.autograd.grad(out_TD.sum(), x_TD, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_use_after_close_and_a_second_join(make):
    case = Case(config(), (3,))
    with make(case.cfg) as dispatcher:
        flight = dispatcher.dispatch_async(case.xs[0], case.scores[0], case.ids[0])
        rows_RD, _, handle = flight.join()
        with pytest.raises(JoinedTwiceError):
            flight.join()
        flight = dispatcher.combine_async(rows_RD, handle)
    assert flight.join().shape == (3, 5)
    with pytest.raises(JoinedTwiceError):
        flight.join()
    dispatcher.close()
    for use in (
        lambda: dispatcher.dispatch(case.xs[0], case.scores[0], case.ids[0]),
        lambda: dispatcher.combine(rows_RD, handle),
        dispatcher.warmup,
        dispatcher.__enter__,
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_static_capacity_is_refused(make):
    with pytest.raises(ConfigError, match=r'expected capacity="exact", .* got 64'):
        make(config(capacity=64))


GOOD = {
    "x_TD": torch.zeros(4, 5, dtype=torch.float64),
    "scores_TK": torch.zeros(4, 3),
    "topk_ids_TK": torch.zeros(4, 3, dtype=torch.int64),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_TD": torch.zeros(4, 6).double()}, r"x_TD of shape \(T, 5\), got \(4, 6\)"),
        ({"x_TD": torch.zeros(20).double()}, r"x_TD of shape \(T, 5\), got \(20,\)"),
        ({"x_TD": torch.zeros(17, 5).double()}, "at most max_tokens_per_rank = 16 tokens, got 17"),
        ({"x_TD": torch.zeros(4, 5)}, "x_TD of dtype torch.float64, got torch.float32"),
        ({"x_TD": torch.zeros(4, 5, device="meta").double()}, "x_TD on cpu, got meta"),
        ({"x_TD": torch.zeros(3, 5).double()}, r"scores_TK of shape \(3, 3\), got \(4, 3\)"),
        ({"scores_TK": torch.zeros(4, 2)}, r"scores_TK of shape \(4, 3\), got \(4, 2\)"),
        ({"scores_TK": torch.zeros(4, 3).int()}, "scores_TK of a floating point dtype, got torch.int32"),
        ({"scores_TK": torch.zeros(4, 3, device="meta")}, "scores_TK on cpu, got meta"),
        ({"topk_ids_TK": torch.zeros(4, 4).int()}, r"topk_ids_TK of shape \(4, 3\), got \(4, 4\)"),
        ({"topk_ids_TK": torch.zeros(4, 3)}, "topk_ids_TK of dtype int32 or int64, got torch.float32"),
        ({"topk_ids_TK": torch.zeros(4, 3, device="meta").int()}, "topk_ids_TK on cpu, got meta"),
        ({"num_local_tokens_per_expert_E": torch.zeros(7)}, r"expert_E of shape \(8,\), got \(7,\)"),
    ],
)
def test_dispatch_says_what_it_expected(make, changes, message):
    dispatcher = make(config())
    dispatcher.dispatch(**GOOD)
    with pytest.raises(InputError, match=f"expected .*{message}"):
        dispatcher.dispatch(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("y_RD", "message"),
    [
        (torch.zeros(11, 5).double(), r"y_RD of shape \(12, 5\), got \(11, 5\)"),
        (torch.zeros(12, 4).double(), r"y_RD of shape \(12, 5\), got \(12, 4\)"),
        (torch.zeros(12, 5), "y_RD of dtype torch.float64, got torch.float32"),
        (torch.zeros(12, 5, device="meta").double(), "y_RD on cpu, got meta"),
    ],
)
def test_combine_says_what_it_expected(make, y_RD, message):
    dispatcher = make(config())
    _, _, handle = dispatcher.dispatch(**GOOD)
    with pytest.raises(InputError, match=f"expected {message}"):
        dispatcher.combine(y_RD, handle)
    with pytest.raises(InputError, match="expected the handle that dispatch gave, got int"):
        dispatcher.combine(torch.zeros(12, 5).double(), 3)


def test_ids_out_of_range_are_refused_under_a_placement_too(make):
    dispatcher = make(config(placement=Placement((tuple(reversed(range(config().num_experts))),))))
    for wrong in (-2, config().num_experts):
        ids_TK = GOOD["topk_ids_TK"].clone()
        ids_TK[1, 0] = wrong
        with pytest.raises(ExpertIdError, match=f"got {wrong}"):
            dispatcher.dispatch(**(GOOD | {"topk_ids_TK": ids_TK}))


def test_a_placement_for_other_ranks_is_refused(make):
    cfg = config(num_experts=2, top_k=1, placement=Placement(((1,), (0,))))
    with pytest.raises(ConfigError, match="placement for 1 ranks, got one for 2"):
        make(cfg)
