"""XTuner's stages, in the order in which its decoder layer calls them; nothing of XTuner is installed."""

import pytest
import torch

import symm_a2a
from symm_a2a.integrations.xtuner import XTunerDispatcher
from symm_a2a.testing import run_ranks
from tests.cases import apply_experts

E, K, D = 4, 2, 6
TOKENS = ((5, 3), (0, 4))
"""Of each rank in each micro-batch."""


def sizes(**changes):
    fields = dict(num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=8, dtype=torch.float64)
    return symm_a2a.EPConfig(**(fields | changes))


class Layer:
    """A decoder layer: a router, routed experts, a shared expert, a residual."""

    def __init__(self, rank, ranks):
        gen = torch.Generator().manual_seed(5)
        self.router = torch.randn(D, E, generator=gen, dtype=torch.float64).requires_grad_()
        weight = torch.randn(E, D, D, generator=gen, dtype=torch.float64)
        self.weight = weight.chunk(ranks)[rank].clone().requires_grad_()
        self.beside = torch.randn(D, D, generator=gen, dtype=torch.float64).requires_grad_()

    def parameters(self):
        return [self.router, self.weight, self.beside]

    def route(self, x):
        return (x @ self.router).softmax(-1).topk(K)

    def shared(self, x):
        return torch.tanh(x @ self.beside)

    def one_batch(self, stages, x):
        """The published order without micro-batches: every stage waits."""
        weights, ids = self.route(x)
        pre = stages.dispatch_preprocess(hidden_states=x, topk_ids=ids, topk_weights=weights)
        dispatched = stages.dispatch(pre_dispatched=pre, topk_weights=weights, decoding=False)
        post = stages.dispatch_postprocess(pre_dispatched=pre, dispatched=dispatched)
        so_far = dict(pre_dispatched=pre, dispatched=dispatched, post_dispatched=post)
        y = apply_experts(post["hidden_states"], post["tokens_per_expert"], self.weight)
        pre_combined = stages.combine_preprocess(hidden_states=y, **so_far, decoding=False)
        combined = stages.combine(**so_far, pre_combined=pre_combined, decoding=False)
        done = stages.combine_postprocess(**so_far, pre_combined=pre_combined, combined=combined)
        return x + done["hidden_states"] + self.shared(x)

    def micro_batches(self, stages, xs, weights_first):
        """The published order of several: all first stages; then each to its experts; then all combines."""
        routed = [self.route(x) for x in xs]
        firsts = [
            stages.dispatch_preprocess(
                hidden_states=x, topk_ids=ids, async_op=True,
                **({"topk_weights": weights} if weights_first else {}),
            )
            for x, (weights, ids) in zip(xs, routed, strict=True)
        ]  # fmt: skip
        steps = []
        for pre, (weights, _) in zip(firsts, routed, strict=True):
            dispatched = stages.dispatch(pre_dispatched=pre, topk_weights=weights, async_op=True)
            post = stages.dispatch_postprocess(pre_dispatched=pre, dispatched=dispatched, async_op=True)
            so_far = dict(pre_dispatched=pre, dispatched=dispatched, post_dispatched=post)
            y = apply_experts(post["hidden_states"], post["tokens_per_expert"], self.weight)
            pre_combined = stages.combine_preprocess(hidden_states=y, **so_far, async_op=True)
            steps.append(so_far | {"pre_combined": pre_combined})
        combined = [stages.combine(**step, async_op=True) for step in steps]
        beside = [self.shared(x) for x in xs]
        done = [
            stages.combine_postprocess(**step, combined=one, async_op=True)
            for step, one in zip(steps, combined, strict=True)
        ]
        return [x + one["hidden_states"] + b for x, one, b in zip(xs, done, beside, strict=True)]


def inputs(rank):
    gen = torch.Generator().manual_seed(rank)
    return [torch.randn(T, D, generator=gen, dtype=torch.float64).requires_grad_() for T in TOKENS[rank]]


def trained(rank, group, how):
    """Two layers, forward and backward; outputs, gradients, and what was launched and joined when."""
    with symm_a2a.SymmTokenDispatcher(sizes(), group) as dispatcher, dispatcher.record() as recording:
        stages, layers, xs = XTunerDispatcher(dispatcher), [Layer(rank, 2), Layer(rank, 2)], inputs(rank)
        outs = xs
        for layer in layers:
            if how == "one by one":
                outs = [layer.one_batch(stages, x) for x in outs]
            else:
                outs = layer.micro_batches(stages, outs, weights_first=how == "weights first")
        sum(out.square().sum() for out in outs).backward()
    leaves = [*xs, *(p for layer in layers for p in layer.parameters())]
    moments = [
        (moment.begin, f"{what} {e.kind.title} {e.lane}")
        for e in recording.timeline.exchanges
        for what, moment in (("launch", e.launch), ("join", e.join))
    ]
    order = [name for _, name in sorted(moments)]
    return [out.detach() for out in outs], [leaf.grad for leaf in leaves], order


@pytest.fixture(scope="module")
def plain():
    return run_ranks(trained, 2, "one by one")


@pytest.mark.parametrize("how", ["weights first", "weights later"])
def test_two_micro_batches_give_what_each_gives_alone(plain, how):
    for ours, alone in zip(run_ranks(trained, 2, how), plain, strict=True):
        assert all(map(torch.equal, ours[0], alone[0]))
        for grad, expected in zip(ours[1], alone[1], strict=True):
            torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_exchanges_are_in_flight_beside_the_other_micro_batch_and_so_in_the_backward():
    (_, _, first), (_, _, second) = run_ranks(trained, 2, "weights first")
    assert first == second
    layer = [
        "launch dispatch 0", "launch dispatch 1", "join dispatch 0", "join dispatch 1",
        "launch combine 0", "launch combine 1", "join combine 0", "join combine 1",
    ]  # fmt: skip
    mirror = [
        name.replace("launch", "-").replace("join", "launch").replace("-", "join")
        .replace("dispatch", "dispatch backward").replace("combine", "combine backward")
        for name in reversed(layer)
    ]  # fmt: skip
    assert first == layer * 2 + mirror * 2


def test_more_micro_batches_than_lanes_are_refused_with_advice():
    with symm_a2a.SymmTokenDispatcher(sizes(num_lanes=1), device="cpu") as dispatcher:
        layer, xs = Layer(0, 1), inputs(0)
        with pytest.raises(symm_a2a.LaneBusyError, match=r"at most 1 micro-batches in flight.*num_lanes="):
            layer.micro_batches(XTunerDispatcher(dispatcher), xs, weights_first=True)


def test_stages_that_disagree_about_async_op_are_refused():
    with symm_a2a.SymmTokenDispatcher(sizes(), device="cpu") as dispatcher:
        stages, layer, x = XTunerDispatcher(dispatcher), Layer(0, 1), inputs(0)[0]
        weights, ids = layer.route(x)
        pre = stages.dispatch_preprocess(hidden_states=x, topk_ids=ids)
        done = stages.dispatch(pre_dispatched=pre, topk_weights=weights)
        with pytest.raises(symm_a2a.InputError, match="expected async_op=False in dispatch_postprocess"):
            stages.dispatch_postprocess(pre_dispatched=pre, dispatched=done, async_op=True)
        pre = stages.dispatch_preprocess(hidden_states=x, topk_ids=ids, topk_weights=weights, async_op=True)
        with pytest.raises(symm_a2a.InputError, match="expected async_op=True in dispatch, as in"):
            stages.dispatch(pre_dispatched=pre, topk_weights=weights)


def test_stages_are_keyword_only_and_need_this_librarys_dispatcher():
    with pytest.raises(symm_a2a.ConfigError, match="expected a SymmTokenDispatcher, got NoneType"):
        XTunerDispatcher(None)
    with symm_a2a.SymmTokenDispatcher(sizes(), device="cpu") as dispatcher:
        stages = XTunerDispatcher(dispatcher)
        for name in ("dispatch_preprocess", "dispatch", "dispatch_postprocess", "combine"):
            with pytest.raises(TypeError, match="positional argument"):
                getattr(stages, name)({}, {})
