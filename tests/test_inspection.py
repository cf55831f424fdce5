"""Debug mode: nothing changes where all is well, sections end as poison, and what is wrong is named."""

import os
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import symm_a2a
from symm_a2a import EPConfig, ProtocolError, SymmTokenDispatcher, VirtualWorld, exchange
from symm_a2a.inspection import POISON
from symm_a2a.kernels.channel import EPOCH_SHIFT
from symm_a2a.kernels.ulysses import Kind as SequenceKind
from symm_a2a.kernels.ulysses import Sizes
from symm_a2a.testing import run_ranks
from symm_a2a.ulysses.lane import SequenceLane
from tests.cases import apply_experts, cases, examples
from tests.ranks import config, forward_backward, inputs, weights

W, E, K, D, T = 2, 4, 2, 6, 5
SECTIONS = ("counts", "headers", "scatter_rows", "gather_rows", "gather_scores")


@pytest.fixture(autouse=True)
def debug_mode(monkeypatch):
    monkeypatch.setenv("SYMM_A2A_DEBUG", "1")


def trained(case, cfg, world_size):
    """Rows, outputs and gradients of a layer on every rank, with a second dispatch."""
    dtype = cfg.dtype
    xs, scores, ids = case.xs(dtype), case.scores(torch.float32), case.ids()
    leaves = [t.requires_grad_() for t in (*xs, *scores)]
    weight = torch.randn(cfg.num_experts // world_size, case.hidden_dim, case.hidden_dim, dtype=dtype)
    found = []
    with VirtualWorld(cfg, world_size, "cpu") as world:
        for _ in range(2):
            rows, counts, handles = world.dispatch(xs, scores, ids)
            again = world.dispatch_again([x * 2 for x in xs], handles)
            ys = [apply_experts(r + a, c, weight) for r, a, c in zip(rows, again, counts, strict=True)]
            outs = world.combine(ys, handles)
            torch.cat(outs).sum().backward()
            found += [*rows, *again, *outs]
        poisoned = [
            d.arena.lanes[0].channel.local[name].view(torch.uint8).eq(POISON).all().item()
            for d in world.dispatchers
            for name in SECTIONS
        ]
    return [t.detach() for t in found] + [leaf.grad for leaf in leaves], poisoned


@settings(max_examples=examples(3), deadline=None)
@given(cases(max_ranks=3), st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
def test_results_are_the_same_and_sections_are_poison_afterwards(case, dtype):
    cfg = case.config(dtype=dtype, num_lanes=1)
    with pytest.MonkeyPatch.context() as patch:
        torch.manual_seed(0)
        debugged, poisoned = trained(case, cfg, case.world_size)
        patch.setenv("SYMM_A2A_DEBUG", "0")
        torch.manual_seed(0)
        plain, _ = trained(case, cfg, case.world_size)
    assert all(poisoned)
    for one, other in zip(debugged, plain, strict=True):
        assert torch.equal(one, other)


def over_processes(rank, group):
    found = []
    with SymmTokenDispatcher(config(dtype=torch.float64), group) as dispatcher, np.errstate(all="ignore"):
        assert dispatcher.arena.lanes[0].channel.holds == (os.environ["SYMM_A2A_DEBUG"] == "1")
        weight = weights(rank, group.size(), torch.float64, "cpu")
        for step in range(4):
            x, scores, ids = inputs(rank, step, torch.float64, "cpu")
            found.append(forward_backward(dispatcher, x, scores, ids, weight, lane=step % 2))
        dispatcher.barrier()
        dispatcher.broadcast_counts(ids)
    return found


def test_over_processes_results_are_the_same(monkeypatch):
    debugged = run_ranks(over_processes, 2)
    monkeypatch.setenv("SYMM_A2A_DEBUG", "0")
    for one, other in zip(debugged, run_ranks(over_processes, 2), strict=True):
        for step in range(4):
            assert all(torch.equal(a, b) for a, b in zip(one[step], other[step], strict=True))


@pytest.fixture
def lanes():
    cfg = EPConfig(num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=T, dtype=torch.float32)
    with VirtualWorld(cfg, W, "cpu") as world:
        yield [dispatcher.arena.lanes[0] for dispatcher in world.dispatchers]


def launch(lane):
    # Three tokens with slots on both ranks, and a masked one.
    ids = torch.tensor([[0, 2], [3, 1], [2, -1], [-1, -1]])
    x, scores = torch.ones(4, D), torch.rand(4, K)
    return exchange.launch_dispatch(lane, x, scores, ids, 12, 1)


def dispatch(lanes):
    flights = [launch(lane) for lane in lanes]
    return [exchange.join_dispatch(flight) for flight in flights]


def local(lanes, name):
    """What lies at rank 0."""
    return lanes[0].channel.local[name]


def unwritten_row(lanes):
    local(lanes, "scatter_rows")[1, 1].view(torch.uint8).fill_(POISON)


def row_beyond(lanes):
    local(lanes, "scatter_rows")[1, 3, 2] = 0.0


def header_beyond(lanes):
    local(lanes, "headers")[0, 4, 0, 0] = 1


def unwritten_header(lanes):
    local(lanes, "headers")[1, 0].fill_(-1)


def empty_header(lanes):
    local(lanes, "headers")[1, 0, :, 0] = -1


def slot_twice(lanes):
    headers = local(lanes, "headers")
    # Expert 1 of the second token becomes expert 0, position 0: the first token's.
    headers[1, 1, :, 0] = torch.where(headers[1, 1, :, 0] >= 0, 0, -1)


def position_too_far(lanes):
    headers = local(lanes, "headers")
    headers[1, 1, :, 0] = torch.where(headers[1, 1, :, 0] >= 0, 100, -1)


def position_one_too_far(lanes):
    headers = local(lanes, "headers")
    # The expert's only slot has position 0; L experts lie between two positions.
    headers[1, 1, :, 0] = torch.where(headers[1, 1, :, 0] >= 0, headers[1, 1, :, 0] + E // W, -1)


def another_number_of_copies(lanes):
    local(lanes, "counts")[1, E] += 1


def free_too_late(lanes):
    local(lanes, "scatter_free")[1] = 0 << EPOCH_SHIFT


def free_too_early(lanes):
    local(lanes, "scatter_free")[1] = 9 << EPOCH_SHIFT


def counts_of_another_epoch(lanes):
    local(lanes, "counts_ready")[1] += 1 << EPOCH_SHIFT


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (unwritten_row, "scatter rows announced and not written (peer 1, copy 1)"),
        (row_beyond, "scatter rows beyond the copies that were announced (peer 1, copy 3)"),
        (header_beyond, "headers beyond the copies that were announced (peer 0, copy 4)"),
        (unwritten_header, "headers announced and not written (peer 1, copy 0)"),
        (empty_header, "a copy none of whose slots is for this rank (peer 1, copy 0)"),
        (slot_twice, "slots [2, 0] for the experts here, not each of [1, 1] once (peer 1)"),
        (
            position_too_far,
            "a position that its expert's count does not reach (peer 1, copy 1, slot 1)",
        ),
        (
            position_one_too_far,
            "a position that its expert's count does not reach (peer 1, copy 1, slot 1)",
        ),
        (another_number_of_copies, "copies that are not as many as the counts say, [2, 2] (peer 1)"),
        (free_too_late, "a free flag that is neither of this epoch nor of the one before, [2, 0] (peer 1)"),
        (free_too_early, "a free flag that is neither of this epoch nor of the one before, [2, 9] (peer 1)"),
        (counts_of_another_epoch, "counts of another epoch, [3, 4] (peer 1)"),
    ],
)
def test_what_a_peer_should_not_have_done_is_named_before_it_is_read(lanes, fault, what):
    for _ in range(2):
        dispatch(lanes)
    flights = [launch(lane) for lane in lanes]
    fault(lanes)
    with pytest.raises(ProtocolError, match=re.escape(what)) as caught:
        exchange.join_dispatch(flights[0])
    assert str(caught.value).startswith("rank 0 found in dispatch, lane 0, epoch 3: ")
    # The arena refuses work, and the peers know.
    with pytest.raises(ProtocolError, match=re.escape(what)):
        lanes[0].raise_reports()
    assert lanes[1].channel.abort_W.tolist() == [1, 0]


@pytest.mark.parametrize("name", ["gather_rows", "gather_scores"])
def test_a_gather_is_looked_at_as_well(lanes, name):
    for step in range(2):
        done = dispatch(lanes)
        flying = [
            exchange.launch_dispatch_backward(lane, d.rows_RD, None, d.routing)
            for lane, d in zip(lanes, done, strict=True)
        ]
        if step:
            local(lanes, name)[1, 1].view(torch.uint8).fill_(POISON)
            what = f"{name.replace('_', ' ')} announced and not written (peer 1, copy 1)"
            with pytest.raises(ProtocolError, match=re.escape(what)):
                exchange.join_dispatch_backward(lanes[0], flying[0], done[0].routing)
            return
        for lane, rows, d in zip(lanes, flying, done, strict=True):
            exchange.join_dispatch_backward(lane, rows, d.routing)


def test_who_reads_a_section_after_its_join_reads_poison(lanes):
    dispatch(lanes)
    assert local(lanes, "scatter_rows").isnan().all()


def test_another_operation_is_still_told_as_such(lanes):
    done = dispatch(lanes)
    exchange.launch_dispatch_again(lanes[1], torch.ones(4, D), done[1].routing)
    flight = launch(lanes[0])
    with pytest.raises(symm_a2a.ExchangeMismatchError, match="got dispatch again"):
        exchange.join_dispatch(flight)


def sequence_step(lanes, kind, xs):
    sizes = Sizes.of(kind, xs[0].shape, xs[0].dtype, W, 1)
    for lane, x in zip(lanes, xs, strict=True):
        lane.launch(kind, x, sizes)
    return [lane.join(kind, x, sizes)[0] for lane, x in zip(lanes, xs, strict=True)]


@pytest.fixture
def sequence_lanes():
    return SequenceLane.world(W, max_bytes=1024, device=torch.device("cpu"))


@pytest.mark.parametrize("kind", [SequenceKind.SEQ_TO_HEAD, SequenceKind.HEAD_TO_SEQ])
def test_a_sequence_exchange_is_the_same_and_its_memory_poison_afterwards(sequence_lanes, monkeypatch, kind):
    xs = [torch.randn(2, 4, 2, 3) for _ in range(W)]
    monkeypatch.setenv("SYMM_A2A_DEBUG", "0")
    plain = sequence_step(SequenceLane.world(W, 1024, torch.device("cpu")), kind, xs)
    for _ in range(5):
        for one, other in zip(sequence_step(sequence_lanes, kind, xs), plain, strict=True):
            assert torch.equal(one, other)
    assert all((lane.channel.payload == POISON).all() for lane in sequence_lanes)


def lost_row(payload, width):
    payload[3 * width : 4 * width].fill_(POISON)


def bytes_beyond(payload, width):
    payload[16 * width + 5] = 0


def byte_behind(payload, width):
    payload[16 * width] = 0


@pytest.mark.parametrize(
    ("kind", "fault", "what"),
    [
        # Of 2 x 4 tokens a rank, in the order batch, sender, token; or batch, token, sender.
        ("SEQ_TO_HEAD", lost_row, "rows that were not written (peer 0, row 3)"),
        ("HEAD_TO_SEQ", lost_row, "rows that were not written (peer 1, row 3)"),
        ("SEQ_TO_HEAD", bytes_beyond, "bytes beyond the 192 that were to come"),
        ("HEAD_TO_SEQ", byte_behind, "bytes beyond the 192 that were to come"),
    ],
)
def test_what_a_sequence_exchange_should_not_have_brought_is_named(sequence_lanes, kind, fault, what):
    kind = SequenceKind[kind]
    shape = (2, 4, 2, 3) if kind == SequenceKind.SEQ_TO_HEAD else (2, 8, 1, 3)
    xs = [torch.randn(shape) for _ in range(W)]
    for _ in range(2):
        sequence_step(sequence_lanes, kind, xs)
    sizes = Sizes.of(kind, shape, torch.float32, W, 1)
    for lane, x in zip(sequence_lanes, xs, strict=True):
        lane.launch(kind, x, sizes)
    fault(sequence_lanes[1].channel.payload[1], 12)
    sequence_lanes[0].join(kind, xs[0], sizes)
    with pytest.raises(ProtocolError) as caught:
        sequence_lanes[1].join(kind, xs[1], sizes)
    assert str(caught.value) == f"rank 1 found in {kind.title}, exchange number 3: {what}"
    with pytest.raises(ProtocolError, match="exchange number 3"):
        sequence_lanes[1].launch(kind, xs[1], sizes)
    assert sequence_lanes[0].channel.abort_W.tolist() == [0, 1]


@pytest.mark.parametrize("value", ["yes", "2"])
def test_a_value_that_is_neither_is_refused(monkeypatch, value):
    monkeypatch.setenv("SYMM_A2A_DEBUG", value)
    with pytest.raises(symm_a2a.ConfigError, match='SYMM_A2A_DEBUG to be "0" or "1"'):
        SymmTokenDispatcher(config(), device="cpu")
