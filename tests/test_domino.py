"""Micro-batches interleaved give what each gives alone, in the documented order, forward and backward."""

import dataclasses
import random
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import symm_a2a
from symm_a2a import Domino, SymmTokenDispatcher, VirtualWorld
from symm_a2a.testing import run_ranks
from tests.cases import apply_experts, cases, examples
from tests.ranks import config, inputs, weights

FP64 = torch.float64


@dataclasses.dataclass
class Run:
    """Micro-batches of one model: a case each, alike but for tokens and routing."""

    batches: list
    num_lanes: int
    num_layers: int
    exact: bool

    def config(self):
        most = max(1, *(tokens for case in self.batches for tokens in case.tokens))
        case = self.batches[0]
        capacity = case.whole(case.world_size * most * case.top_k + case.num_experts * case.pad_multiple)
        return case.config(
            dtype=FP64,
            num_lanes=self.num_lanes,
            max_tokens_per_rank=most,
            capacity="exact" if self.exact else capacity,
        )

    def parameters(self):
        case, gen = self.batches[0], torch.Generator().manual_seed(3)
        shape = (case.num_local_experts, case.hidden_dim, case.hidden_dim)
        return [
            [torch.randn(shape, generator=gen, dtype=FP64).requires_grad_() for _ in range(case.world_size)]
            for _ in range(self.num_layers)
        ]


@st.composite
def runs(draw):
    case = draw(cases(max_ranks=3, max_tokens=5, max_hidden=9))
    tokens = st.lists(st.integers(0, 5), min_size=case.world_size, max_size=case.world_size).map(tuple)
    batches = [
        dataclasses.replace(case, tokens=each, seed=case.seed + number)
        for number, each in enumerate(draw(st.lists(tokens, min_size=1, max_size=4)))
    ]
    return Run(batches, draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.booleans()))


def ask_all(run, interleaved):
    """Run a model over all ranks of a virtual world; outputs, and gradients of everything."""
    parameters = run.parameters()
    leaves = [
        [[t.requires_grad_() for t in each] for each in (case.xs(FP64), case.scores(FP64))]
        for case in run.batches
    ]
    with VirtualWorld(run.config(), run.batches[0].world_size, "cpu") as world:

        def model(number):
            xs, scores = leaves[number]
            for layer in parameters:
                rows, counts, handles = yield world.dispatch_async(xs, scores, run.batches[number].ids())
                ys = [apply_experts(*of_rank) for of_rank in zip(rows, counts, layer, strict=True)]
                xs = [x + out for x, out in zip(xs, (yield world.combine_async(ys, handles)), strict=True)]
            return xs

        numbers = range(len(leaves))
        if interleaved:
            outs = Domino(world, len(leaves)).run(model, numbers)
        else:
            outs = [Domino(world, 1).run(model, [number])[0] for number in numbers]
        gen = torch.Generator().manual_seed(5)
        flat = [out for each in outs for out in each]
        torch.autograd.backward(flat, [torch.randn(o.shape, generator=gen, dtype=FP64) for o in flat])
    every = [t for batch in leaves for kind in batch for t in kind] + [
        w for layer in parameters for w in layer
    ]
    return [out.detach() for out in flat], [t.grad for t in every]


@settings(max_examples=examples(5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
def test_any_number_of_micro_batches_lanes_and_layers_equals_each_alone(run):
    (outs, grads), (alone, alone_grads) = ask_all(run, True), ask_all(run, False)
    for ours, theirs in zip(outs, alone, strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(grads, alone_grads, rtol=1e-12, atol=1e-12)


def train(rank, group, num_lanes, num_layers, micro_batches, delays):
    """A rank with delays of its own, and experts that leave no nodes where they have no rows."""
    W = dist.get_world_size(group)
    wait = random.Random(100 * delays + rank)
    given = [inputs(rank, step, FP64, "cpu") for step in range(micro_batches)]
    # The last rank has nothing in the last micro-batch, and only expert 0 is asked in the first.
    if rank == W - 1:
        given[-1] = tuple(t[:0] for t in given[-1])
    given[0][2].fill_(0)

    def experts(rows, counts, weight):
        parts = [
            torch.tanh(part @ w) if len(part) else part
            for part, w in zip(rows.split(counts.tolist()), weight, strict=True)
        ]
        return torch.cat(parts)

    results = []
    for together in (True, False):
        xs = [x.clone().requires_grad_() for x, _, _ in given]
        layers = [weights(rank, W, FP64, "cpu").requires_grad_() for _ in range(num_layers)]
        with SymmTokenDispatcher(config(dtype=FP64, num_lanes=num_lanes), group) as dispatcher:

            def model(x, scores, ids, dispatcher=dispatcher, layers=layers):
                for weight in layers:
                    time.sleep(wait.uniform(0, 0.01))
                    rows, counts, handle = yield dispatcher.dispatch_async(x, scores, ids)
                    pending = dispatcher.combine_async(experts(rows, counts, weight), handle)
                    time.sleep(wait.uniform(0, 0.01))
                    x = x + (yield pending)
                return x

            batches = [(x, *rest) for x, (_, *rest) in zip(xs, given, strict=True)]
            if together:
                outs = Domino(dispatcher, micro_batches).run(model, batches)
            else:
                outs = [Domino(dispatcher, 1).run(model, [batch])[0] for batch in batches]
            torch.cat(outs).square().sum().backward()
        grads = [t.grad for t in (*xs, *layers)]
        results.append(([out.detach() for out in outs], grads))
    (outs, grads), (alone, alone_grads) = results
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outs, alone, strict=True))
    for ours, theirs in zip(grads, alone_grads, strict=True):
        scale = max(1.0, theirs.abs().max().item() if theirs.numel() else 0.0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * scale)
    return True


@pytest.mark.parametrize(
    ("ranks", "num_lanes", "num_layers", "micro_batches"),
    [(2, 2, 2, 2), (4, 2, 1, 3), (2, 3, 1, 4), (2, 1, 2, 2)],
)
def test_ranks_with_delays_and_experts_without_rows_equal_each_alone(
    ranks, num_lanes, num_layers, micro_batches
):
    done = run_ranks(train, ranks, num_lanes, num_layers, micro_batches, num_layers + micro_batches)
    assert done == [True] * ranks


NAMES = {"dispatch": "D", "combine": "C", "dispatch backward": "d", "combine backward": "c"}


def trace(timeline) -> str:
    """`LD0` for a launch of a dispatch in lane 0, `Jc1` for a join of a combine's backward in lane 1."""
    return " ".join(f"{phase[0].upper()}{NAMES[kind]}{lane}" for phase, kind, lane in timeline.events())


def mirrored(forward: str) -> str:
    """What autograd makes of it: the reverse, a launch for each join and a join for each launch."""
    turned = str.maketrans("LJDC", "JLdc")
    return " ".join(event.translate(turned) for event in reversed(forward.split()))


ONE_LAYER = "LD0 LD1 JD0 LC0 JD1 LC1 JC0 JC1"
TWO_LAYERS = "LD0 LD1 JD0 LC0 JD1 LC1 JC0 LD0 JC1 LD1 JD0 LC0 JD1 LC1 JC0 JC1"
# The third starts in lane 0 as soon as the first has left it.
THREE_BATCHES = "LD0 LD1 JD0 LC0 JD1 LC1 JC0 LD0 JC1 JD0 LC0 JC0"


def record(layers_of, micro_batches):
    """Record a run of a group of one; the trace, and the gradients of inputs and weight."""
    torch.manual_seed(0)
    cfg = symm_a2a.EPConfig(
        num_experts=2, top_k=1, hidden_dim=3, max_tokens_per_rank=4, dtype=FP64, num_lanes=2
    )
    xs = [torch.randn(n + 1, 3, dtype=FP64, requires_grad=True) for n in range(micro_batches)]
    weight = torch.randn(3, 3, dtype=FP64, requires_grad=True)
    with SymmTokenDispatcher(cfg, device="cpu") as dispatcher:

        def layer(x):
            scores, ids = torch.ones(len(x), 1, dtype=FP64), torch.zeros(len(x), 1, dtype=torch.int64)
            rows, _, handle = yield dispatcher.dispatch_async(x, scores, ids)
            return x + torch.tanh((yield dispatcher.combine_async(torch.tanh(rows @ weight), handle)))

        with dispatcher.record() as recording:
            outs = layers_of(Domino(dispatcher, micro_batches), layer, xs)
            torch.cat(list(outs)).square().sum().backward()
    assert recording.timeline.unfinished == 0
    return trace(recording.timeline), [weight.grad, *(x.grad for x in xs)]


def plain(num_layers):
    def run(domino, layer, xs):
        def model(x):
            for _ in range(num_layers):
                x = yield from layer(x)
            return x

        return domino.run(model, xs)

    return run


def checkpointed(num_layers, **options):
    """A checkpoint around each layer of all micro-batches."""

    def run(domino, layer, xs):
        for _ in range(num_layers):
            xs = checkpoint(lambda *each: tuple(domino.run(layer, list(each))), *xs, **options)
        return xs

    return run


@pytest.mark.parametrize(
    ("num_layers", "micro_batches", "forward"),
    [(1, 2, ONE_LAYER), (2, 2, TWO_LAYERS), (1, 3, THREE_BATCHES)],
)
def test_the_order_is_the_documented_one_and_the_backward_its_mirror(num_layers, micro_batches, forward):
    found, _ = record(plain(num_layers), micro_batches)
    assert found == f"{forward} {mirrored(forward)}"


def test_the_backward_of_two_micro_batches_in_full():
    """Joins of the forward launch, launches join; between them lies the other micro-batch's backward."""
    assert mirrored(ONE_LAYER) == "Lc1 Lc0 Jc1 Ld1 Jc0 Ld0 Jd1 Jd0"


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_a_layer_of_all_micro_batches(early_stop, use_reentrant):
    with set_checkpoint_early_stop(early_stop):
        found, grads = record(checkpointed(2, use_reentrant=use_reentrant), 2)
    again = f"{ONE_LAYER} {mirrored(ONE_LAYER)}"
    assert found == f"{ONE_LAYER} {ONE_LAYER} {again} {again}"
    torch.testing.assert_close(grads, record(plain(2), 2)[1], rtol=1e-12, atol=1e-12)


def uses_some(rank, group, used):
    """A loss of the micro-batches that this rank cares for."""
    results = []
    for together in (True, False):
        xs = [inputs(rank, step, FP64, "cpu", tokens=3)[0].requires_grad_() for step in range(2)]
        weight = weights(rank, 2, FP64, "cpu").requires_grad_()
        with SymmTokenDispatcher(config(dtype=FP64), group) as dispatcher:

            def layer(x, step, dispatcher=dispatcher, weight=weight):
                _, scores, ids = inputs(rank, step, FP64, "cpu", tokens=3)
                rows, counts, handle = yield dispatcher.dispatch_async(x, scores, ids)
                return (yield dispatcher.combine_async(apply_experts(rows, counts, weight), handle))

            batches = [(x, step) for step, x in enumerate(xs)]
            if together:
                outs = Domino(dispatcher, 2).run(layer, batches)
                sum(outs[i].square().sum() for i in used[rank]).backward()
            else:
                outs = [Domino(dispatcher, 1).run(layer, [batch])[0] for batch in batches]
                sum(out.square().sum() * (i in used[rank]) for i, out in enumerate(outs)).backward()
        results.append([weight.grad, *(x.grad for x in xs)])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    return True


@pytest.mark.parametrize("used", [((0,), (1,)), ((1,), (0, 1)), ((0,), (0,))])
def test_losses_that_use_some_micro_batches_on_some_ranks(used):
    assert run_ranks(uses_some, 2, used) == [True, True]
