"""The synchronous operators: schemas, compiled graphs, checkpointing; a group of one."""

import shutil

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import symm_a2a
from symm_a2a.kernels.channel import Cell
from symm_a2a.layout import FLAGS
from symm_a2a.ops import synchronous, table

E, K, D, C = 4, 2, 6, 8
HAVE_COMPILER = any(map(shutil.which, ("g++", "clang++", "c++")))
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(not HAVE_COMPILER, reason="inductor needs a C++ compiler")
    ),
]


def config(**changes):
    fields = dict(num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=C, dtype=torch.float32)
    return symm_a2a.EPConfig(**(fields | changes))


def exchanges(dispatcher) -> list[int]:
    """Scatters and gathers that lane 0 has joined: what a dropped or repeated exchange changes."""
    state = dispatcher.arena.lanes[0].channel.state
    return [int(state[Cell.SCATTER_JOINED]), int(state[Cell.GATHER_JOINED])]


class Block(torch.nn.Module):
    """A layer that a trainer would compile: router, dispatch, experts, combine, residual."""

    def __init__(self, dispatcher) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.router = torch.nn.Linear(D, E)
        self.expert = torch.nn.Linear(D, D)

    def forward(self, x):
        scores, ids = self.router(x).softmax(-1).topk(K)
        rows, _, handle = self.dispatcher.dispatch(x, scores, ids)
        return x + self.dispatcher.combine(torch.tanh(self.expert(rows)), handle)


def blocks(capacity, count=2):
    torch.manual_seed(0)
    cfg = config(capacity=capacity)
    first = symm_a2a.SymmTokenDispatcher(cfg, device="cpu")
    dispatchers = [first] + [symm_a2a.SymmTokenDispatcher(cfg, arena=first.arena) for _ in range(count - 1)]
    return first, [Block(d) for d in dispatchers]


def gradients(layers, x):
    x = x.clone().requires_grad_()
    for layer in layers:
        layer.zero_grad()
    out = x
    for layer in layers:
        out = layer(out)
    (out**2).sum().backward()
    return [out.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters())]


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("capacity", ["exact", 20])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_opcheck(capacity, ids_dtype, monkeypatch):
    dispatcher = symm_a2a.SymmTokenDispatcher(config(capacity=capacity), device="cpu")

    def lane_as_new(number):
        # A handle names its dispatch by its epoch, so that two calls are never quite the same.
        # opcheck compares calls: let every dispatch be the lane's first.
        found = table.lane_of(number)
        found.channel.state.zero_()
        for flag in FLAGS:
            found.channel.local[flag].zero_()
        return found

    monkeypatch.setattr(synchronous, "lane_of", lane_as_new)
    torch.manual_seed(0)
    x, scores = torch.randn(5, D, requires_grad=True), torch.rand(5, K, requires_grad=True)
    ids = torch.randint(-1, E, (5, K)).to(ids_dtype)
    lane = dispatcher.arena.lanes[0].number
    number = -1 if capacity == "exact" else capacity
    tensors = (x, scores, ids, dispatcher.arena.anchor, dispatcher._ledger.card, None)
    arguments = (*tensors, lane, 1, E, C, number, 1)
    torch.library.opcheck(torch.ops.symm_a2a.dispatch, arguments)
    rows, _, *routing, token = [t.detach() for t in torch.ops.symm_a2a.dispatch(*arguments)]
    routing[3].requires_grad_()
    y, token = rows.clone().requires_grad_(), token.requires_grad_()
    arguments = (y, *routing, token, lane, 1)
    torch.library.opcheck(torch.ops.symm_a2a.combine, arguments)
    out, token = [t.detach() for t in torch.ops.symm_a2a.combine(*arguments)]
    routing = [t.detach() for t in routing]
    torch.library.opcheck(torch.ops.symm_a2a.combine_backward, (out, rows, *routing, token, lane, 1))
    torch.library.opcheck(
        torch.ops.symm_a2a.dispatch_backward, (rows, routing[3], token, *routing, token, lane)
    )
    torch.library.opcheck(torch.ops.symm_a2a.dispatch_backward, (rows, None, None, *routing, token, lane))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capacity", ["exact", 20])
def test_compiled_blocks_that_share_a_lane(backend, capacity):
    torch._dynamo.reset()
    dispatcher, layers = blocks(capacity)
    compiled = [torch.compile(layer, backend=backend, fullgraph=True, dynamic=True) for layer in layers]
    for step, T in enumerate((5, 3, 0, 1, 8, 0)):
        x = torch.randn(T, D, generator=torch.Generator().manual_seed(step))
        before = exchanges(dispatcher)
        ours = gradients(compiled, x)
        assert exchanges(dispatcher) == [n + 4 for n in before], "two layers, forward and backward"
        assert_same(ours, gradients(layers, x))
        with torch.no_grad():
            before = exchanges(dispatcher)
            out = x
            for layer in compiled:
                out = layer(out)
            assert exchanges(dispatcher) == [n + 2 for n in before], "two layers, forward only"
            torch.testing.assert_close(out, ours[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_compiled_layers_stay_below_the_recompile_limit(backend):
    torch._dynamo.reset()
    dispatcher, layers = blocks("exact", count=10)
    with torch._dynamo.config.patch(
        error_on_recompile=False, recompile_limit=8, fail_on_recompile_limit_hit=True
    ):
        compiled = [torch.compile(layer, backend=backend, fullgraph=True, dynamic=True) for layer in layers]
        for T in (5, 4):
            x = torch.randn(T, D)
            assert_same(gradients(compiled, x), gradients(layers, x))
    dispatcher.close()


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_with_checkpointing(backend, where):
    torch._dynamo.reset()
    _, layers = blocks("exact")
    if where == "inside":

        def body(x):
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

        run = torch.compile(body, backend=backend, fullgraph=True, dynamic=True)
    else:
        compiled = [torch.compile(layer, backend=backend, fullgraph=True, dynamic=True) for layer in layers]

        def run(x):
            for layer in compiled:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    for T in (5, 3):
        x = torch.randn(T, D)
        expected = gradients(layers, x)
        leaf = x.clone().requires_grad_()
        for layer in layers:
            layer.zero_grad()
        out = run(leaf)
        (out**2).sum().backward()
        ours = [out.detach(), leaf.grad, *(p.grad for layer in layers for p in layer.parameters())]
        assert_same(ours, expected)


@pytest.mark.parametrize(
    ("options", "repeats"),
    [
        ({"use_reentrant": False}, 1),
        ({"use_reentrant": True}, 1),
        (
            {
                "use_reentrant": False,
                "context_fn": lambda: create_selective_checkpoint_contexts(symm_a2a.checkpoint_ops()),
            },
            0,
        ),
    ],
    ids=["full", "reentrant", "selective"],
)
@pytest.mark.parametrize("capacity", ["exact", 20])
def test_checkpointing_gives_the_same_gradients(options, repeats, capacity):
    dispatcher, layers = blocks(capacity)
    for T in (5, 0, 8):
        x = torch.randn(T, D)
        expected = gradients(layers, x)
        before = exchanges(dispatcher)
        ours = gradients([Checkpointed(layer, options) for layer in layers], x)
        assert_same(ours, expected)
        done = [now - was for now, was in zip(exchanges(dispatcher), before, strict=True)]
        assert done == [4 + 2 * repeats] * 2, "two layers, forward, backward, and what was repeated"


class Checkpointed(torch.nn.Module):
    def __init__(self, layer, options) -> None:
        super().__init__()
        self.layer, self.options = layer, options

    def forward(self, x):
        return checkpoint(self.layer, x, **self.options)


def test_no_gradient_piles_up_on_the_anchor():
    dispatcher, layers = blocks("exact")
    for _ in range(2):
        gradients(layers, torch.randn(5, D))
        assert dispatcher.arena.anchor.grad is None


def test_the_exchange_runs_backward_where_only_the_experts_need_gradients():
    dispatcher, (layer, _) = blocks("exact")
    before = exchanges(dispatcher)
    x, scores, ids = torch.randn(5, D), torch.rand(5, K), torch.randint(E, (5, K))
    rows, _, handle = dispatcher.dispatch(x, scores, ids)
    out = dispatcher.combine(layer.expert(rows), handle)
    (grad,) = torch.autograd.grad(out.sum(), layer.expert.weight)
    assert exchanges(dispatcher) == [before[0] + 2, before[1] + 1], "no dispatch backward is needed"
    expected = (scores.flatten() * 1).sum() * 0
    for t in range(5):
        expected = expected + scores[t].sum() * x[t]
    torch.testing.assert_close(grad, expected.expand(D, D), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    _, layers = blocks("exact")
    x = torch.randn(5, D)
    expected = gradients(layers, x)[0]
    with context():
        out = layers[1](layers[0](x))
    torch.testing.assert_close(out, expected)
    assert not out.requires_grad


def test_autocast_leaves_rows_alone():
    dispatcher, _ = blocks("exact")
    x, scores, ids = torch.randn(5, D), torch.rand(5, K), torch.randint(E, (5, K))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows, _, handle = dispatcher.dispatch(x, scores.bfloat16(), ids)
        out = dispatcher.combine(rows, handle)
    assert rows.dtype == out.dtype == torch.float32
    torch.testing.assert_close(out, x * scores.bfloat16().float().sum(1, keepdim=True))


def test_built_under_a_meta_device_and_inference_mode():
    with torch.device("meta"), torch.inference_mode():
        dispatcher = symm_a2a.SymmTokenDispatcher(config(), device="cpu")
    x = torch.randn(5, D, requires_grad=True)
    rows, _, handle = dispatcher.dispatch(x, torch.ones(5, K), torch.randint(E, (5, K)))
    dispatcher.combine(rows, handle).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((5, D), 2.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [5, 0])
def test_a_compiled_backward_runs_where_no_input_needs_a_gradient(backend, tokens):
    """The peers' inputs may need gradients: only the anchor keeps the exchange in this rank's graph."""
    torch._dynamo.reset()
    dispatcher, (layer, _) = blocks("exact")
    layer.router.requires_grad_(False)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    before = exchanges(dispatcher)
    compiled(torch.randn(tokens, D)).sum().backward()
    assert exchanges(dispatcher) == [n + 2 for n in before]
