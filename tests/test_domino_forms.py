"""What Domino takes and gives: stages, compiled compute, other dispatchers, a trainer's batches, outputs."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import symm_a2a
from symm_a2a import Domino, Stages, SymmTokenDispatcher, group_batches, token_shares
from symm_a2a.baselines import AllToAllTokenDispatcher
from symm_a2a.errors import InputError
from symm_a2a.testing import run_ranks
from tests import ranks
from tests.cases import apply_experts
from tests.test_operators import HAVE_COMPILER

E, K, D, C = 4, 2, 5, 8
FP64 = torch.float64
BACKEND = "inductor" if HAVE_COMPILER else "aot_eager"


def sizes(**changes):
    fields = dict(num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=C, dtype=FP64, num_lanes=2)
    return symm_a2a.EPConfig(**(fields | changes))


@pytest.fixture
def carrier():
    with SymmTokenDispatcher(sizes(), device="cpu") as dispatcher:
        yield dispatcher


class Layer(nn.Module):
    """Router, experts, and a shared expert."""

    def __init__(self, seed=0, dtype=FP64):
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.router = nn.Parameter(torch.randn(D, E, generator=gen, dtype=dtype))
        self.weight = nn.Parameter(torch.randn(E, D, D, generator=gen, dtype=dtype))
        self.beside = nn.Parameter(torch.randn(D, D, generator=gen, dtype=dtype))

    def route(self, x):
        return (x @ self.router).softmax(-1).topk(K)

    def experts(self, rows, counts):
        return apply_experts(rows, counts, self.weight)

    def shared(self, x):
        return torch.tanh(x @ self.beside)

    def steps(self, carrier, x, shared=False):
        rows, counts, handle = yield carrier.dispatch_async(x, *self.route(x))
        out = yield carrier.combine_async(self.experts(rows, counts), handle)
        return x + out + self.shared(x) if shared else x + out

    def stages(self, shared=False):
        return Stages(
            pre=lambda x: (x, *self.route(x), x),
            experts=self.experts,
            post=(lambda out, x, beside: x + out + beside) if shared else (lambda out, x: x + out),
            shared=self.shared if shared else None,
        )


def rows_of(*tokens, dtype=FP64):
    gen = torch.Generator().manual_seed(11)
    return [torch.randn(T, D, generator=gen, dtype=dtype).requires_grad_() for T in tokens]


def gradients(outs, leaves):
    """Of a loss in which every element counts another."""
    gen = torch.Generator().manual_seed(12)
    weights = [torch.randn(out.shape, generator=gen, dtype=out.dtype) for out in outs]
    return torch.autograd.grad(outs, leaves, weights, allow_unused=True)


def close(ours, theirs, tolerance=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shared", [False, True])
def test_stages_equal_the_generator(carrier, shared):
    layers, xs = [Layer(0), Layer(1)], rows_of(5, 3)
    leaves = [*xs, *(p for layer in layers for p in (layer.router, layer.weight, layer.beside))]

    def model(x):
        for layer in layers:
            x = yield from layer.steps(carrier, x, shared)
        return x

    with carrier.record() as first:
        written = Domino(carrier, 2).run(model, xs)
        grads = gradients(written, leaves)
    with carrier.record() as second:
        staged = Domino(carrier, 2).run_layers([layer.stages(shared) for layer in layers], xs)
        close(gradients(staged, leaves), grads)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(staged, written, strict=True))
    assert second.timeline.events() == first.timeline.events()


def test_one_layer_of_stages_needs_no_list(carrier):
    layer, xs = Layer(), rows_of(2, 4)
    alone, listed = (Domino(carrier, 2).run_layers(given, xs) for given in (layer.stages(), [layer.stages()]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(alone, listed, strict=True))


def test_shared_runs_while_the_combine_is_in_flight(carrier):
    layer, called = Layer(), []

    def shared(x):
        called.append(time.monotonic())
        return layer.shared(x)

    stages = Stages(pre=layer.stages().pre, experts=layer.experts, shared=shared, post=lambda out, x, _: out)
    with carrier.record() as recording:
        Domino(carrier, 2).run_layers([stages, stages], rows_of(3, 2))
    combines = [e for e in recording.timeline.exchanges if e.kind.title == "combine"]
    assert [e.lane for e in combines] == [0, 1, 0, 1]
    for combine, when in zip(combines, called, strict=True):
        assert combine.launch.end <= when <= combine.join.begin


@pytest.mark.parametrize(
    ("returned", "said"),
    [(lambda x, *route: x, "Tensor"), (lambda *route: [*route, 0], "list"), (lambda *route: route, "of 3")],
    ids=["tensor", "list", "three"],
)
def test_a_wrong_return_of_pre_says_what_was_expected(carrier, returned, said):
    layer = Layer()
    stages = Stages(
        pre=lambda x: returned(x, *layer.route(x)), experts=layer.experts, post=layer.stages().post
    )
    expected = rf"expected pre to return \(x_TD, scores_TK, ids_TK, kept\), got .*{said}"
    with pytest.raises(InputError, match=expected):
        Domino(carrier, 2).run_layers(stages, rows_of(2, 2))


def test_compute_between_the_yields_is_compiled():
    torch._dynamo.reset()
    layer, xs = Layer(dtype=torch.float32), rows_of(5, 3, dtype=torch.float32)

    def experts(rows):
        return torch.tanh(rows @ layer.weight[0]) * rows.sigmoid()

    def run(experts, shared):
        def model(x):
            for _ in range(2):
                rows, _, handle = yield carrier.dispatch_async(x, *layer.route(x))
                pending = carrier.combine_async(experts(rows), handle)
                beside = shared(x)
                x = x + beside + (yield pending)
            return x

        with SymmTokenDispatcher(sizes(dtype=torch.float32), device="cpu") as carrier:
            outs = Domino(carrier, 2).run(model, xs)
            return outs, gradients(outs, [*xs, layer.router, layer.weight, layer.beside])

    compiled = (
        torch.compile(f, backend=BACKEND, fullgraph=True, dynamic=True) for f in (experts, layer.shared)
    )
    close(run(*compiled), run(experts, layer.shared), 1e-5)


def test_a_compiled_block_runs_in_the_lane_of_its_micro_batch():
    """Its synchronous exchanges must not meet those in flight: forward and backward, in both lanes."""
    torch._dynamo.reset()
    layer, xs = Layer(), rows_of(5, 3)

    def whole(x):
        rows, _, handle = carrier.dispatch(x, *layer.route(x))
        return x + carrier.combine(torch.tanh(rows @ layer.weight[0]), handle)

    def run(whole):
        def model(x):
            return whole((yield from layer.steps(carrier, whole(x))))

        with carrier.record() as recording:
            outs = Domino(carrier, 2).run(model, xs)
            grads = gradients(outs, [*xs, layer.router, layer.weight])
        return (outs, grads), recording.timeline.events()

    with SymmTokenDispatcher(sizes(), device="cpu") as carrier:
        compiled, events = run(torch.compile(whole, backend="aot_eager", fullgraph=True, dynamic=True))
        eager, expected = run(whole)
    close(compiled, eager)
    assert events == expected
    assert {lane for _, _, lane in events} == {0, 1}


def over_the_baseline(rank, group):
    given = [ranks.inputs(rank, step, FP64, "cpu") for step in range(2)]
    results = []
    for kind in (SymmTokenDispatcher, AllToAllTokenDispatcher):
        xs, scores = ([each[i].clone().requires_grad_() for each in given] for i in (0, 1))
        weight = ranks.weights(rank, 2, FP64, "cpu").requires_grad_()
        with kind(ranks.config(dtype=FP64), group) as carrier:

            def model(x, s, ids, carrier=carrier, weight=weight):
                for _ in range(2):
                    rows, counts, handle = yield carrier.dispatch_async(x, s, ids)
                    x = x + (yield carrier.combine_async(apply_experts(rows, counts, weight), handle))
                return x

            batches = [(x, s, ids) for x, s, (_, _, ids) in zip(xs, scores, given, strict=True)]
            outs = Domino(carrier, 2).run(model, batches)
            losses = [out.square().mean() for out in outs]
            sum(losses).backward()
        results.append([*losses, weight.grad, *(t.grad for t in (*xs, *scores))])
    # Scores are of fp32 outside: their gradients are rounded to that.
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs, 1e-12 if ours.dtype == FP64 else 1e-5)
    return True


def test_the_baseline_gives_the_same_losses_and_gradients():
    assert run_ranks(over_the_baseline, 2) == [True, True]


def test_dispatchers_of_one_arena_take_the_lane_of_the_micro_batch(carrier):
    layer, xs = Layer(), rows_of(5, 3)
    leaves = [*xs, layer.router, layer.weight]
    other = SymmTokenDispatcher(sizes(capacity=C * K + 3 * E, pad_multiple=4), arena=carrier.arena)

    def model(x):
        for one in (carrier, other, carrier):
            x = yield from layer.steps(one, x)
        return x

    with carrier.record() as recording:
        together = Domino(other, 2).run(model, xs)
    alone = [Domino(carrier, 1).run(model, [x])[0] for x in xs]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(together, alone, strict=True))
    close(gradients(together, leaves), gradients(alone, leaves))
    launches = [lane for phase, _, lane in recording.timeline.events() if phase == "launch"]
    assert launches == [0, 1] * 6


def test_batches_are_grouped_in_their_order():
    assert group_batches(range(6), 3) == [[0, 1, 2], [3, 4, 5]]
    assert group_batches((), 2) == []
    with pytest.raises(InputError, match=r"a multiple of num_micro_batches = 2, got 3; change the gradient"):
        group_batches([1, 2, 3], 2)
    for number in (0, -1, True, 1.0):
        with pytest.raises(InputError, match="positive int"):
            group_batches([1, 2], number)


def test_shares_of_tokens_add_up_to_one_or_are_none():
    assert token_shares([6, 0, 2]) == [0.75, 0.0, 0.25]
    assert token_shares([0, 0]) == [0.0, 0.0]
    assert token_shares([]) == []
    with pytest.raises(InputError, match="expected numbers of tokens"):
        token_shares([1, -1])
    with pytest.raises(InputError, match="each an int"):
        token_shares([1.5])


TOKENS = [[5, 0, 3, 7], [2, 6, 1, 4]]
"""Of the four batches of one step, on each of two ranks."""


def balance(counts_E, probability_E):
    """The load-balance loss: a product of two means over the whole batch."""
    return 0.1 * E * (counts_E.double() / counts_E.sum() * probability_E).sum()


def train(rank, group):
    """A step's loss and gradients in groups of M batches; and in plain torch, all ranks' tokens at once."""
    gen = torch.Generator().manual_seed(5)
    every = [[torch.randn(T, D, generator=gen, dtype=FP64) for T in tokens] for tokens in TOKENS]
    shares = token_shares(TOKENS[rank], group)
    results = []
    with SymmTokenDispatcher(sizes(), group) as carrier:

        def model(layer, weight, x):
            probability_TE = (x @ layer.router).softmax(-1)
            scores, ids = probability_TE.topk(K)
            rows, counts, handle = yield carrier.dispatch_async(x, scores, ids)
            out = x + (yield carrier.combine_async(apply_experts(rows, counts, weight), handle))
            tokens = max(1, len(x))
            return {
                "loss": out.square().sum() / tokens,
                "counts": ids.flatten().bincount(minlength=E),
                "probability": probability_TE.sum(0) / tokens,
            }

        for M in (1, 2, 4):
            layer = Layer()
            weight = layer.weight.chunk(2)[rank].detach().requires_grad_()
            done = []
            for micro_batches in group_batches(every[rank], M):
                given = [(layer, weight, x) for x in micro_batches]
                done += Domino(carrier, M).run(model, given)
            counts_E = sum(each["counts"] for each in done)
            dist.all_reduce(counts_E, group=group)
            loss = sum(share * each["loss"] for share, each in zip(shares, done, strict=True))
            probability_E = sum(share * each["probability"] for share, each in zip(shares, done, strict=True))
            loss = loss + balance(counts_E, probability_E)
            loss.backward()
            for replicated in (loss.detach(), layer.router.grad):
                dist.all_reduce(replicated, group=group)
            results.append([loss.detach(), layer.router.grad, weight.grad])

    layer = Layer()
    x = torch.cat([x for of_rank in every for x in of_rank])
    probability_TE = (x @ layer.router).softmax(-1)
    scores, ids = probability_TE.topk(K)
    out = x + sum(
        scores[:, k, None] * torch.tanh(torch.einsum("td,tdf->tf", x, layer.weight[ids[:, k]]))
        for k in range(K)
    )
    loss = out.square().sum(-1).mean() + balance(ids.flatten().bincount(minlength=E), probability_TE.mean(0))
    loss.backward()
    return results, [loss.detach(), layer.router.grad, layer.weight.grad.chunk(2)[rank].clone()]


def test_a_step_in_groups_of_any_size_has_one_loss_and_one_gradient():
    for results, expected in run_ranks(train, 2):
        for ours in results:
            close(ours, expected)


def test_outputs_of_any_structure_leave_through_one_node(carrier):
    """The loss uses one of them, and the backward of every exchange runs."""
    layer, xs = Layer(), rows_of(4, 2, 3)

    def model(number, x):
        out = yield from layer.steps(carrier, x)
        ids = layer.route(x).indices
        return [{"out": out, "ids": ids}, (number, [out.sum()]), None][number]

    with carrier.record() as recording:
        first, second, third = Domino(carrier, 3).run(model, list(enumerate(xs)))
        assert third is None
        assert set(first) == {"out", "ids"}
        assert torch.equal(first["ids"], layer.route(xs[0]).indices)
        number, (total,) = second
        assert number == 1
        assert total.grad_fn is first["out"].grad_fn
        first["out"].sum().backward()
    assert xs[1].grad.eq(0).all()
    assert xs[2].grad is None
    backward = sorted(event for event in recording.timeline.events() if event[1].endswith("backward"))
    kinds = ("combine backward", "dispatch backward")
    # The third micro-batch's output is None, its graph is gone: nobody can run its backward.
    assert backward == sorted(
        (phase, kind, lane) for phase in ("launch", "join") for kind in kinds for lane in (0, 1)
    )


def test_outputs_may_be_changed_in_place(carrier):
    layer, xs = Layer(), rows_of(4, 2)
    leaves = [*xs, layer.router, layer.weight]

    def run():
        return Domino(carrier, 2).run(lambda x: layer.steps(carrier, x), xs)

    outs, changed = run(), run()
    changed[0].mul_(2)
    changed[1][0].zero_()
    keep = torch.ones_like(outs[1])
    keep[0] = 0
    expected = [outs[0] * 2, outs[1] * keep]
    close(list(changed), expected)
    close(gradients(changed, leaves), gradients(expected, leaves))


def test_nothing_here_requires_a_gradient(carrier):
    """The peers' inputs may: the backward is there all the same."""
    layer = Layer().requires_grad_(False)
    xs = [x.detach() for x in rows_of(4, 2)]
    with carrier.record() as recording:
        outs = Domino(carrier, 2).run(lambda x: layer.steps(carrier, x), xs)
        torch.cat(outs).sum().backward()
    assert len([event for event in recording.timeline.events() if event[1] == "combine backward"]) == 2 * 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(carrier, context):
    layer, xs = Layer(), rows_of(4, 2)
    expected = Domino(carrier, 2).run(lambda x: layer.steps(carrier, x), xs)
    with context(), carrier.record() as recording:
        outs = Domino(carrier, 2).run(lambda x: layer.steps(carrier, x), xs)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outs, expected, strict=True))
    assert not any(out.requires_grad for out in outs)
    assert recording.timeline.unfinished == 0
    # Nothing is left behind: the next step has its gradients.
    assert gradients(expected, xs)[0].abs().sum() > 0
