"""The limits: what the formulas say the kernels move is what they do move, byte by byte."""

import doctest
import importlib
import inspect
import itertools
import json
import re
import shlex
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
import tyro
from triton.runtime import interpreter

from bench.limits import command
from bench.limits.budget import budget_of, dispatch_overhead, rows_for_slots, whole_overhead
from bench.limits.hardware import GB, HARDWARE
from bench.limits.load import SMALL_TOKENS, Load, expected
from bench.limits.options import TABLES, Options
from bench.limits.traffic import Bytes, Traffic, again, backward, forward
from bench.routing import distinct_ranks
from bench.shapes import SHAPES
from symm_a2a import EPConfig, VirtualWorld
from symm_a2a.exchange import Routing
from symm_a2a.kernels import blocks

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"


class Launch:
    """The distinct bytes that one launch loads before it has stored them, and those that it stores."""

    def __init__(self, kernel, rank):
        self.kernel, self.rank = kernel, rank
        self.loaded = {True: np.array([], np.int64), False: np.array([], np.int64)}
        self.stored = {True: np.array([], np.int64), False: np.array([], np.int64)}

    def load(self, pointers, mask, payload):
        new = _bytes_at(pointers, mask)
        for before in self.stored.values():
            new = np.setdiff1d(new, before, assume_unique=True)
        self.loaded[payload] = np.union1d(self.loaded[payload], new)

    def store(self, pointers, mask, payload):
        self.stored[payload] = np.union1d(self.stored[payload], _bytes_at(pointers, mask))


def _bytes_at(pointers, mask):
    size = pointers.get_element_ty().primitive_bitwidth // 8
    addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data].astype(np.int64).ravel()
    return np.unique(addresses[:, None] + np.arange(size))


@pytest.fixture
def launches(monkeypatch):
    """Record what interpreted kernels load and store."""
    recorded = []
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    call, load = executor.__call__, builder.create_masked_load
    store, atomic = builder.create_masked_store, builder.create_atomic_rmw

    def record_call(self, *args, **kwargs):
        arguments = dict(zip(inspect.getfullargspec(self.fn).args, args, strict=False)) | kwargs
        recorded.append(Launch(self.fn.__name__.strip("_").removesuffix("_kernel"), arguments["rank"]))
        return call(self, *args, **kwargs)

    def is_payload(pointers):
        return pointers.get_element_ty() == tl.bfloat16

    def record_load(self, ptrs, mask, *rest):
        recorded[-1].load(ptrs, mask, is_payload(ptrs))
        return load(self, ptrs, mask, *rest)

    def record_store(self, ptrs, value, mask, *rest):
        recorded[-1].store(ptrs, mask, is_payload(ptrs))
        return store(self, ptrs, value, mask, *rest)

    def record_atomic(self, op, ptr, value, mask, sem, scope):
        # Additions within the device are to a dispatcher's totals, or to cells; others read flags.
        if "XCHG" in str(op) or "GPU" in str(scope):
            recorded[-1].store(ptr, mask, payload=False)
        return atomic(self, op, ptr, value, mask, sem, scope)

    monkeypatch.setattr(executor, "__call__", record_call)
    monkeypatch.setattr(builder, "create_masked_load", record_load)
    monkeypatch.setattr(builder, "create_masked_store", record_store)
    monkeypatch.setattr(builder, "create_atomic_rmw", record_atomic)
    return recorded


def within(addresses, tensor):
    begin = tensor.data_ptr()
    return (addresses >= begin) & (addresses < begin + tensor.nbytes)


def outside(addresses, tensors):
    for tensor in tensors:
        addresses = addresses[~within(addresses, tensor)]
    return addresses


def traffics_of(world, launches):
    """Return each rank's traffic, kernel by kernel, as it was recorded."""
    arenas = [dispatcher.arena.memory.arenas[rank] for rank, dispatcher in enumerate(world.dispatchers)]
    channels = [dispatcher.arena.lanes[0].channel for dispatcher in world.dispatchers]
    # Cells, cards, and the table of the peers' addresses: left out of the formulas.
    left_out = [t for channel in channels for t in (channel.state, channel.status, channel.peers_W)]
    left_out += [dispatcher._ledger.card for dispatcher in world.dispatchers]
    steps = defaultdict(list)
    for launch in launches:
        if launch.kernel != "row_count":
            steps[launch.rank].append(launch)

    def moved(addresses, arena=None, others=()):
        kept = {kind: outside(found, [*left_out, *others]) for kind, found in addresses.items()}
        if arena is not None:
            kept = {kind: found[within(found, arena)] for kind, found in kept.items()}
        return Bytes(len(kept[True]), len(kept[False]))

    result = defaultdict(list)
    for rank, arena in enumerate(arenas):
        foreign = [other for other in arenas if other is not arena]
        for step, launch in enumerate(steps[rank]):
            sent, received = Bytes(0, 0), Bytes(0, 0)
            for peer, other in enumerate(arenas):
                if peer != rank:
                    sent += moved(launch.stored, other)
                    received += moved(steps[peer][step].stored, arena)
            reads, writes = moved(launch.loaded), moved(launch.stored, others=foreign)
            result[rank].append(Traffic(launch.kernel, reads, writes, sent, received))
    return result


SIZES = pytest.mark.parametrize(
    ("tokens", "hidden", "capacity", "pad_multiple", "ids_dtype"),
    [
        ((SMALL_TOKENS + 12, SMALL_TOKENS + 1, SMALL_TOKENS + 7), 20, "exact", 1, torch.int64),
        ((SMALL_TOKENS + 2, SMALL_TOKENS + 1), 8, 800, 4, torch.int32),
        ((11, 0, 5), 20, "exact", 1, torch.int64),
        ((9, 12), 16, 80, 1, torch.int32),
        ((0, 9, 12), 12, 90, 3, torch.int64),
    ],
)
L, K = 2, 3


def exchanged(world, tokens, hidden, ids_dtype):
    """Return ids, tokens that need a gradient, and what a dispatch gave."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(-1, len(tokens) * L, (T, K), generator=generator).to(ids_dtype) for T in tokens]
    xs = [torch.randn(T, hidden).bfloat16().requires_grad_() for T in tokens]
    scores = [torch.rand(T, K).requires_grad_() for T in tokens]
    rows, _, handles = world.dispatch(xs, scores, ids)
    return ids, xs, rows, handles


def config(tokens, hidden, capacity, pad_multiple):
    return EPConfig(
        num_experts=len(tokens) * L, top_k=K, hidden_dim=hidden, max_tokens_per_rank=max(tokens),
        capacity=capacity, pad_multiple=pad_multiple, dtype=torch.bfloat16,
    )  # fmt: skip


def loads_of(tokens, hidden, capacity, ids, rows, handles, token_block):
    """Return each rank's load."""
    W = len(tokens)
    copies_WW = torch.stack([handle.copies_sent_W for handle in handles])
    slots_E = torch.stack([torch.bincount(i[i >= 0], minlength=W * L) for i in ids]).sum(0)
    for rank, T in enumerate(tokens):
        kept = int(copies_WW[rank, rank])
        num_rows = int(slots_E.view(W, L)[rank].sum())
        yield Load(
            ranks=W, experts=W * L, top_k=K, tokens=T, capacity=max(tokens), hidden=hidden,
            padded=-(-hidden // 8) * 8, itemsize=2, id_bytes=ids[rank].dtype.itemsize,
            token_block=token_block, kept=kept, sent=int(copies_WW[rank].sum()) - kept,
            received=int(copies_WW[:, rank].sum()) - kept, slots=int((ids[rank] >= 0).sum()), rows=num_rows,
            gap_rows=rows[rank].shape[0] - num_rows,
            counted_apart=min(tokens) > SMALL_TOKENS or capacity == "exact",
        )  # fmt: skip


def assert_equal(formulas, recorded, rank):
    for formula, real in zip(formulas, recorded, strict=True):
        for part in ("reads", "writes", "sent", "received"):
            what = (rank, formula.kernel, part)
            assert (what, getattr(formula, part)) == (what, getattr(real, part))


@SIZES
def test_formulas_equal_what_kernels_load_and_store(
    tokens, hidden, capacity, pad_multiple, ids_dtype, launches
):
    W = len(tokens)
    with VirtualWorld(config(tokens, hidden, capacity, pad_multiple), W, "cpu") as world:
        ids, _, rows, handles = exchanged(world, tokens, hidden, ids_dtype)
        ys = [r * 2 for r in rows]
        torch.cat(world.combine(ys, handles)).sum().backward()
        recorded = traffics_of(world, launches)
        token_block = world.dispatchers[0].arena.lanes[0].channel.blocks.tokens
    counted_apart = min(tokens) > SMALL_TOKENS or capacity == "exact"
    # One launch less where few tokens are counted, one more where the host asks how many rows will come.
    num_launches = 8 + counted_apart + (capacity == "exact")
    assert len(launches) == W * num_launches
    for rank, load in enumerate(loads_of(tokens, hidden, capacity, ids, rows, handles, token_block)):
        formulas = [*forward(load), *backward(load)]
        names = [traffic.kernel.replace(" of gradients", "") for traffic in formulas]
        assert [traffic.kernel.removesuffix("_grad") for traffic in recorded[rank]] == names
        assert_equal(formulas, recorded[rank], rank)


@SIZES
def test_and_so_they_do_for_a_second_dispatch(tokens, hidden, capacity, pad_multiple, ids_dtype, launches):
    with VirtualWorld(config(tokens, hidden, capacity, pad_multiple), len(tokens), "cpu") as world:
        ids, _, rows, handles = exchanged(world, tokens, hidden, ids_dtype)
        # No graph behind it: of the first dispatch there is no backward.
        handles = [
            handle._replace(
                tokens=[handle.token.detach()], routing=Routing(*(t.detach() for t in handle.routing))
            )
            for handle in handles
        ]
        launches.clear()
        xs = [torch.randn(T, hidden).bfloat16().requires_grad_() for T in tokens]
        torch.cat(world.dispatch_again(xs, handles)).sum().backward()
        recorded = traffics_of(world, launches)
        token_block = world.dispatchers[0].arena.lanes[0].channel.blocks.tokens
    for rank, load in enumerate(loads_of(tokens, hidden, capacity, ids, rows, handles, token_block)):
        formulas = again(load)
        names = [traffic.kernel.removesuffix(" again") for traffic in formulas]
        assert [traffic.kernel.removesuffix("_again") for traffic in recorded[rank]] == names
        assert_equal(formulas, recorded[rank], rank)


def test_blocks_are_those_of_a_gpu(monkeypatch):
    monkeypatch.setattr(blocks, "INTERPRETED", False)
    assert blocks.SMALL_TOKENS == SMALL_TOKENS
    for shape in SHAPES.values():
        layout = shape.config().layout(shape.ranks)
        assert blocks.blocks_for(layout).tokens == expected(shape).token_block


@pytest.mark.parametrize(
    ("ranks", "experts", "top_k"), [(2, 8, 2), (4, 8, 3), (3, 9, 4), (4, 4, 4), (1, 5, 2)]
)
def test_copies_of_a_token_are_the_mean_over_all_choices(ranks, experts, top_k):
    choices = list(itertools.combinations(range(experts), top_k))
    local = experts // ranks
    mean = sum(len({expert // local for expert in choice}) for choice in choices) / len(choices)
    assert distinct_ranks(ranks, experts, top_k) == pytest.approx(mean, rel=1e-12)


def test_copies_of_the_named_shapes():
    assert distinct_ranks(8, 64, 8) == pytest.approx(5.43, abs=0.005)
    assert distinct_ranks(4, 64, 8) == pytest.approx(3.66, abs=0.005)
    for shape in SHAPES.values():
        load = expected(shape)
        assert load.sent == pytest.approx(load.copies_out * (shape.ranks - 1) / shape.ranks)


@pytest.mark.parametrize(
    ("name", "forward_times", "forward_sum", "backward_times", "backward_sum", "hidden"),
    [
        ("olmoe", (180, 53, 177, 25), 435, (177, 84, 179, 25), 465, 357),
        ("dsv3", (607, 182, 605, 86), 1480, (605, 291, 606, 86), 1588, 1212),
    ],
)
def test_times_at_the_speed_of_a_plain_copy(
    name, forward_times, forward_sum, backward_times, backward_sum, hidden
):
    """An earlier budget, worked out by other means: rows, headers and score gradients, nothing else."""
    budget = budget_of(expected(SHAPES[name]), HARDWARE["h200-copy"])
    forward_kernels = [time for kernel, time in budget.forward.kernels.items() if kernel != "count"]
    assert forward_kernels == pytest.approx(forward_times, rel=0.02)
    assert list(budget.backward.kernels.values()) == pytest.approx(backward_times, rel=0.02)
    assert budget.forward.sum == pytest.approx(forward_sum, rel=0.01)
    assert budget.backward.sum == pytest.approx(backward_sum, rel=0.01)
    for one in (budget.forward, budget.backward):
        assert one.hidden == pytest.approx(hidden, rel=0.01)


def test_little_is_sent_beside_the_payload():
    load = expected(SHAPES["olmoe"])
    assert 0.0156 < dispatch_overhead(load) <= 0.016
    assert 0.0058 < whole_overhead(load) <= 0.006
    sent = sum(traffic.sent.payload for traffic in forward(load)[:3])
    assert rows_for_slots(load) / sent == pytest.approx(8 / distinct_ranks(8, 64, 8))


def test_a_group_of_one_sends_nothing():
    load = Load(
        ranks=1, experts=4, top_k=2, tokens=6, capacity=6, hidden=8, padded=8, itemsize=2, token_block=64,
        kept=6, sent=0, received=0, slots=12, rows=12,
    )  # fmt: skip
    assert all(traffic.sent == Bytes() for traffic in (*forward(load), *backward(load)))
    assert dispatch_overhead(load) == whole_overhead(load) == 0
    assert budget_of(load, HARDWARE["mi300x"]).forward.sum > 0


def test_links_between_pairs_are_shared_by_none():
    assert HARDWARE["mi300x"].link_among(2) == 64 * GB
    assert HARDWARE["mi300x"].link_among(8) == 448 * GB
    assert HARDWARE["h200"].link_among(2) == HARDWARE["h200"].link_among(8) == 450 * GB


def test_published_peaks_have_sources():
    for hardware in HARDWARE.values():
        assert bool(hardware.sources) == (hardware.name != "h200-copy")


def test_the_page_shows_what_the_command_prints(capsys):
    found = re.findall(r"<!-- python -m bench limits (.+?) -->\n\n((?:\|.*\n)+)", PAGE.read_text())
    shown = {argument for arguments, _ in found for argument in shlex.split(arguments)}
    assert {"shapes", "bytes", "forward", "backward", "peaks"} <= shown
    for arguments, table in found:
        assert command.run(tyro.cli(Options, args=shlex.split(arguments))) == 0
        assert table == capsys.readouterr().out, arguments


def evaluate(formula, values):
    """The value of a formula as the page writes it: letters side by side are multiplied."""
    tokens = re.findall(r"c/W|\d+|[A-Za-z]|[-+()]", formula.strip("` "))
    text = ""
    for token in tokens:
        if token not in "-+)" and text and text[-1] not in "-+(":
            text += "*"
        text += token if token in "-+()" or token.isdigit() else str(values[token])
    return eval(text) if text else 0


def test_the_page_has_the_formulas():
    load = Load(
        ranks=4, experts=20, top_k=3, tokens=150, capacity=170, hidden=12, padded=16, itemsize=2,
        token_block=32, kept=31, sent=93, received=93, slots=450, rows=407,
    )  # fmt: skip
    values = dict(W=4, T=150, C=170, D=12, P=16, K=3, E=20, L=5, R=407, B=5, s=2, c=124, r=93) | {"c/W": 31}
    text = PAGE.read_text()
    for heading, part in (("The payload, in bytes:", "payload"), ("All the rest,", "rest")):
        table = text[text.index(heading) :].split("\n\n")[1].splitlines()[2:]
        traffics = [*forward(load), *backward(load)]
        for line, traffic in zip(table, traffics, strict=True):
            kernel, *formulas = (cell.strip() for cell in line.strip("|").split("|"))
            assert kernel == traffic.kernel
            for formula, moved in zip(formulas, (traffic.reads, traffic.writes, traffic.sent), strict=True):
                assert (kernel, formula, evaluate(formula, values)) == (kernel, formula, getattr(moved, part))


def test_all_figures_as_json(tmp_path, capsys):
    file = tmp_path / "out" / "limits.json"
    assert command.run(Options(shape=("dsv3",), hardware=("h200",), table=("peaks",), json=file)) == 0
    assert "4800" in capsys.readouterr().out
    figures = json.loads(file.read_text())["shapes"]["dsv3"]
    times = figures["microseconds"]["h200"]["forward"]
    assert times["sum"] == pytest.approx(sum(times["kernels"].values()))
    assert figures["symmetric_bytes"] == SHAPES["dsv3"].config().symmetric_bytes(8)
    assert [traffic["kernel"] for traffic in figures["forward"]][:2] == ["count", "scatter"]


@pytest.mark.parametrize("option", ["shape", "hardware", "table"])
def test_unknown_names(option, capsys):
    assert command.run(Options(**{option: ("nonesuch",)})) == 2
    assert f"expected --{option} to be of" in capsys.readouterr().err


def test_every_table_of_every_shape(capsys):
    assert command.run(Options()) == 0
    text = capsys.readouterr().out
    assert all(shape.title in text for shape in SHAPES.values())
    assert len(TABLES) == 5


@pytest.mark.parametrize("name", ["routing", "limits.hardware"])
def test_examples(name):
    failed, tried = doctest.testmod(importlib.import_module(f"bench.{name}"))
    assert tried > 0
    assert failed == 0
