"""The rules of a lane, step by step: credits, words that name their exchange, who frees what."""

import dataclasses

import pytest
import torch

import symm_a2a
from symm_a2a import EPConfig, VirtualWorld, exchange
from symm_a2a.kernels.channel import DETAIL_MASK, EPOCH_SHIFT, KIND_MASK, KIND_SHIFT, Cell, Kind
from symm_a2a.kernels.count import count, new_sums
from symm_a2a.testing import OpGuard

W, E, K, D, T = 2, 4, 2, 6, 5


@pytest.fixture
def lanes():
    cfg = EPConfig(num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=T, dtype=torch.float32)
    with VirtualWorld(cfg, W, "cpu") as world:
        yield [dispatcher.arena.lanes[0] for dispatcher in world.dispatchers]


def launch(lane, seed=0, capacity=exchange.EXACT):
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(E, (T, K), generator=gen)
    x, scores = torch.randn(T, D, generator=gen), torch.rand(T, K, generator=gen)
    return exchange.launch_dispatch(lane, x, scores, ids, capacity, 1)


def dispatch(lanes, seed=0):
    flights = [launch(lane, seed) for lane in lanes]
    return [exchange.join_dispatch(flight) for flight in flights]


def combine(lanes, done):
    ys = [exchange.launch_combine(lane, d.rows_RD, d.routing) for lane, d in zip(lanes, done, strict=True)]
    for lane, y, d in zip(lanes, ys, done, strict=True):
        exchange.join_combine(lane, y, d.routing)


def fields(word):
    return word >> EPOCH_SHIFT, Kind(word >> KIND_SHIFT & KIND_MASK), word & DETAIL_MASK


def test_a_ready_word_names_epoch_dispatch_kind_and_copies(lanes):
    for n in range(1, 4):
        done = dispatch(lanes)
        for receiver in range(W):
            for sender in range(W):
                word = int(lanes[receiver].channel.local["scatter_ready"][sender])
                copies = int(done[sender].routing.tally[receiver])
                assert fields(word) == (n, Kind.DISPATCH, copies)
    combine(lanes, done)
    assert fields(int(lanes[0].channel.local["gather_ready"][1])) == (1, Kind.COMBINE, 3)


def test_words_hold_what_a_lane_counts_in_years(lanes):
    passed = (1 << 36) + (1 << 31) + (1 << 23) + 5
    for lane in lanes:
        lane.channel.state[[Cell.SCATTER_LAUNCHED, Cell.SCATTER_JOINED]] = passed
        lane.channel.local["scatter_free"].fill_(passed << EPOCH_SHIFT)
    done = dispatch(lanes)
    combine(lanes, done)
    assert fields(int(lanes[0].channel.local["scatter_ready"][1]))[:2] == (passed + 1, Kind.DISPATCH)
    assert fields(int(lanes[0].channel.local["gather_ready"][1])) == (1, Kind.COMBINE, 6)


@pytest.mark.parametrize("operation", ["combine", "dispatch_backward", "combine_backward", "dispatch_again"])
def test_one_operation_of_two_dispatches_is_told_apart_however_far_they_are(lanes, operation):
    first = dispatch(lanes)
    for _ in range(15):
        dispatch(lanes)
    last = dispatch(lanes)  # sixteen later
    launches = getattr(exchange, f"launch_{operation}")
    rows = torch.ones(T, D) if operation in ("combine_backward", "dispatch_again") else last[0].rows_RD
    scores = (None,) if operation == "dispatch_backward" else ()
    for rank, done in enumerate((first, last)):
        launches(lanes[rank], rows, *scores, done[rank].routing)
    for rank, done in enumerate((first, last)):
        y, routing = done[rank].rows_RD, done[rank].routing
        joins = {
            "combine": lambda lane, y, routing: exchange.join_combine(lane, y, routing),
            "dispatch_backward": lambda lane, y, routing: exchange.join_dispatch_backward(lane, y, routing),
            "combine_backward": lambda lane, y, routing: exchange.join_combine_backward(lane, y, routing, 1),
            "dispatch_again": lambda lane, y, routing: exchange.join_dispatch_again(
                lane, rows, routing, len(y), 1
            ),
        }
        with pytest.raises(symm_a2a.ExchangeMismatchError) as caught:
            joins[operation](lanes[rank], y, routing)
        title = operation.replace("_", " ")
        mine, theirs = (1, 17) if rank == 0 else (17, 1)
        message = str(caught.value)
        assert f"got {title} of dispatch {theirs} from peer {1 - rank}" in message
        assert f"while rank {rank} runs {title} of dispatch {mine}. " in message


@pytest.mark.parametrize(
    ("kind", "capacity"), [*((kind, exchange.EXACT) for kind in Kind), (Kind.DISPATCH, 2 * W * T * K)]
)
def test_no_launch_without_the_credit_of_every_peer(lanes, kind, capacity):
    """Rank 0 has joined and launches again; rank 1 has not, and its section is not overwritten."""
    done = dispatch(lanes)
    again = {
        # With a static capacity so few tokens are counted in the scatter itself.
        Kind.DISPATCH: lambda lane, d: launch(lane, seed=1, capacity=capacity),
        Kind.COMBINE: lambda lane, d: exchange.launch_combine(lane, d.rows_RD + 1, d.routing),
        Kind.COMBINE_BACKWARD: lambda lane, d: exchange.launch_combine_backward(
            lane, torch.ones(T, D), d.routing
        ),
        Kind.DISPATCH_BACKWARD: lambda lane, d: exchange.launch_dispatch_backward(
            lane, d.rows_RD + 1, None, d.routing
        ),
        Kind.DISPATCH_AGAIN: lambda lane, d: exchange.launch_dispatch_again(
            lane, torch.ones(T, D), d.routing
        ),
        Kind.DISPATCH_AGAIN_BACKWARD: lambda lane, d: exchange.launch_dispatch_again_backward(
            lane, d.rows_RD + 1, d.routing
        ),
        Kind.BARRIER: lambda lane, d: exchange.launch_barrier(lane),
        Kind.COUNTS: lambda lane, d: exchange.launch_counts(lane, torch.zeros(1, K, dtype=torch.int64)),
    }[kind]
    join = {
        Kind.DISPATCH: lambda lane, d, flying: exchange.join_dispatch(flying),
        Kind.COMBINE: lambda lane, d, flying: exchange.join_combine(lane, flying, d.routing),
        Kind.COMBINE_BACKWARD: lambda lane, d, flying: exchange.join_combine_backward(
            lane, d.rows_RD, d.routing, 1
        ),
        Kind.DISPATCH_BACKWARD: lambda lane, d, flying: exchange.join_dispatch_backward(
            lane, flying, d.routing
        ),
        Kind.DISPATCH_AGAIN: lambda lane, d, flying: exchange.join_dispatch_again(
            lane, flying, d.routing, len(d.rows_RD), 1
        ),
        Kind.DISPATCH_AGAIN_BACKWARD: lambda lane, d, flying: exchange.join_dispatch_again_backward(
            lane, flying, d.routing
        ),
        Kind.BARRIER: lambda lane, d, flying: exchange.join_barrier(lane),
        Kind.COUNTS: lambda lane, d, flying: exchange.join_counts(lane, flying),
    }[kind]
    flying = [again(lane, d) for lane, d in zip(lanes, done, strict=True)]
    join(lanes[0], done[0], flying[0])
    regions = (
        "counts",
        "headers",
        "scatter_rows",
        "gather_rows",
        "gather_scores",
        "scatter_ready",
        "gather_ready",
    )
    before = [lanes[1].channel.local[name].clone() for name in regions]
    again(lanes[0], done[0])
    with pytest.raises(symm_a2a.ExchangeError, match="word that the last exchange was taken") as caught:
        lanes[0].raise_reports()
    assert f"in {kind.title}, lane 0" in str(caught.value)
    assert "peer 1 " in str(caught.value)
    for name, content in zip(regions, before, strict=True):
        assert torch.equal(lanes[1].channel.local[name].view(torch.uint8), content.view(torch.uint8)), name


def test_a_join_frees_the_sections_of_every_peer(lanes):
    dispatch(lanes)
    for lane in lanes:
        assert [int(word) >> EPOCH_SHIFT for word in lane.channel.local["scatter_free"]] == [1, 1]
        assert not lane.channel.local["gather_free"].any()


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("combine backward", "dispatch"),
        ("dispatch", "combine backward"),
        ("combine backward", "combine backward"),
        ("barrier", "dispatch"),
        ("dispatch", "barrier"),
        ("barrier", "combine backward"),
        ("barrier", "counts"),
        ("counts", "barrier"),
        ("counts", "dispatch"),
    ],
)
def test_another_exchange_than_the_peers_is_an_error_on_both_sides(lanes, mine, theirs):
    first = dispatch(lanes)
    combine(lanes, first)
    second = dispatch(lanes)
    combine(lanes, second)
    # Two ranks in the same operation, but for the losses of different dispatches.
    handles = {0: first, 1: second}

    def start(rank, what):
        if what == "dispatch":
            return launch(lanes[rank])
        if what == "barrier":
            return exchange.launch_barrier(lanes[rank])
        if what == "counts":
            return exchange.launch_counts(lanes[rank], torch.zeros(1, K, dtype=torch.int64))
        return exchange.launch_combine_backward(lanes[rank], torch.ones(T, D), handles[rank][rank].routing)

    def finish(rank, what, flying):
        if what == "dispatch":
            return exchange.join_dispatch(flying)
        if what == "barrier":
            return exchange.join_barrier(lanes[rank])
        if what == "counts":
            return exchange.join_counts(lanes[rank], flying)
        done = handles[rank][rank]
        return exchange.join_combine_backward(lanes[rank], done.rows_RD, done.routing, 1)

    flying = [start(0, mine), start(1, theirs)]
    for rank, (own, other) in enumerate(((mine, theirs), (theirs, mine))):
        with pytest.raises(symm_a2a.ExchangeMismatchError) as caught:
            finish(rank, own, flying[rank])
        message = str(caught.value)
        assert f"to run {own} in lane 0, epoch 3, got {other}" in message
        assert f"from peer {1 - rank} while rank {rank}" in message


def test_an_aborted_peer_is_told_through_its_abort_words(lanes):
    lanes[1].abort()
    assert lanes[0].channel.abort_W.tolist() == [0, 1]


def test_the_row_count_waits_for_the_counts_and_not_for_the_rows(lanes):
    """No rank has sent a row yet, and the number of rows to come is known."""
    ids = torch.tensor([[0, 1], [3, -1], [2, 3]])
    tally = torch.zeros(W, dtype=torch.int32)
    for lane in lanes:
        count(lane.channel, ids, tally, new_sums(lane.channel, ids))
    for lane, expected in zip(lanes, (2 * W, 3 * W), strict=True):
        assert lane.row_count(pad_multiple=1) == expected
        assert not lane.channel.local["scatter_ready"].any()
        assert lane.channel.counts.syncs == 1


@pytest.fixture
def gpu_lane(monkeypatch):
    """A lane of a group of one whose kernels wait, as on a GPU, and a switch for its capturing."""
    cfg = EPConfig(
        num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=T, dtype=torch.float32, capacity=40
    )
    with symm_a2a.SymmTokenDispatcher(cfg, device="cpu") as dispatcher:
        (lane, _), capturing = dispatcher.arena.lanes, []
        lane.memory.spins = lane._on_gpu = True
        lane.channel = dataclasses.replace(lane.channel, spins=True, polls=9)
        lane.device = torch.device("cuda", 0)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
        yield dispatcher, lane, capturing
        lane._on_gpu = False


def test_credits_are_waited_for_where_they_are_not_implied(gpu_lane):
    """Where directions alternate no kernel is spent on them; where they repeat, or a capture begins, one."""
    dispatcher, lane, capturing = gpu_lane
    x, scores = torch.randn(T, D, requires_grad=True), torch.rand(T, K)
    ids = torch.randint(E, (T, K))

    def credits_of(run):
        with OpGuard() as guard:
            result = run()
        lane.raise_reports()
        return guard.launches["_credit_kernel"], result

    def both():
        rows, _, handle = dispatcher.dispatch(x, scores, ids)
        dispatcher.combine(rows, handle).sum().backward()
        return rows.detach(), handle

    assert credits_of(both)[0] == 0
    spent, (rows, handle) = credits_of(both)
    assert spent == 0
    assert credits_of(lambda: dispatcher.combine(rows, handle))[0] == 1
    assert credits_of(lambda: dispatcher.combine(rows, handle))[0] == 1
    assert credits_of(lambda: dispatcher.barrier())[0] == 0
    # A dispatch of few tokens does not wait in a count kernel.
    assert credits_of(lambda: dispatcher.dispatch(x, scores, ids))[0] == 1
    assert credits_of(lambda: dispatcher.broadcast_counts(ids))[0] == 0
    with torch.no_grad():
        dispatcher.combine(rows, handle)
    capturing.append(True)
    assert credits_of(both)[0] == 1
    assert credits_of(both)[0] == 0
    capturing.clear()
    assert credits_of(both)[0] == 1
    assert credits_of(both)[0] == 0


def test_warming_up_loads_what_a_capture_may_be_the_first_to_need(gpu_lane):
    dispatcher, _, _ = gpu_lane
    with OpGuard() as guard:
        dispatcher.warmup()
    assert guard.launches["_credit_kernel"] >= len(Kind)
    assert guard.launches["_barrier_kernel"] >= 1


def test_another_current_gpu_is_refused(gpu_lane, monkeypatch):
    dispatcher, _, _ = gpu_lane
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(
        symm_a2a.EnvironmentUnsupportedError, match="cuda:0 to be the current device, got cuda:1"
    ):
        dispatcher.barrier()


def test_all_counts_of_many_experts_are_broadcast():
    cfg = EPConfig(num_experts=1400, top_k=K, hidden_dim=D, max_tokens_per_rank=T, dtype=torch.float32)
    ids = [torch.tensor([[0, 1399], [700, -1]]), torch.tensor([[1399, 1399]])]
    with VirtualWorld(cfg, W, "cpu") as world:
        lanes = [dispatcher.arena.lanes[0] for dispatcher in world.dispatchers]
        found = [exchange.launch_counts(lane, i) for lane, i in zip(lanes, ids, strict=True)]
        for lane, counts in zip(lanes, found, strict=True):
            exchange.join_counts(lane, counts)
    expected = torch.stack([torch.bincount(i[i >= 0], minlength=1400) for i in ids]).int()
    assert all(torch.equal(counts, expected) for counts in found)
