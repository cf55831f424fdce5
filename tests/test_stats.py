"""Counters are right: against what the guard sees, what the handles say, and what lies in the arenas."""

import dataclasses

import pytest
import torch

import symm_a2a
from symm_a2a.kernels.barrier import barrier
from symm_a2a.testing import OpGuard, run_ranks
from tests.cases import use_small_blocks
from tests.ranks import config as rank_config
from tests.ranks import inputs

W, E, K, D, C = 2, 6, 3, 21, 16


def config(**changes):
    fields = dict(num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=C, dtype=torch.float32)
    return symm_a2a.EPConfig(**(fields | changes))


def exchanged(world, seed=0, tokens=(11, 5)):
    """Run a forward and backward in which every rank has other tokens; return the handles."""
    gen = torch.Generator().manual_seed(seed)
    xs = [torch.randn(T, D, generator=gen, requires_grad=True) for T in tokens]
    scores = [torch.rand(T, K, generator=gen, requires_grad=True) for T in tokens]
    ids = [torch.randint(-1, E, (T, K), generator=gen) for T in tokens]
    rows, _, handles = world.dispatch(xs, scores, ids)
    torch.cat(world.combine(rows, handles)).sum().backward()
    return ids, handles


@pytest.mark.parametrize("small", [False, True])
def test_copies_rows_and_exchanges_are_those_of_the_routing(small):
    # Rows are counted before pads, and before a static capacity drops some.
    cfg = config(pad_multiple=4, capacity=12, overflow="drop") if small else config(pad_multiple=4)
    with symm_a2a.VirtualWorld(cfg, W, "cpu") as world:
        if small:
            use_small_blocks(world)
        expected = torch.zeros(W, W, dtype=torch.int64)
        rows = torch.zeros(W, dtype=torch.int64)
        for seed in range(3):
            ids, _ = exchanged(world, seed)
            for rank in range(W):
                owner = torch.where(ids[rank] >= 0, ids[rank] // (E // W), -1)
                expected[rank] += torch.stack([(owner == q).any(1).sum() for q in range(W)])
                rows += torch.stack([(owner == q).sum() for q in range(W)])
        for rank, dispatcher in enumerate(world.dispatchers):
            stats = dispatcher.stats()
            assert stats.copies["dispatch"] == stats.copies["combine_backward"] == expected[rank].tolist()
            assert stats.copies["combine"] == stats.copies["dispatch_backward"] == expected[:, rank].tolist()
            for name in ("dispatch_again", "dispatch_again_backward"):
                assert (stats.copies.pop(name), stats.exchanges.pop(name)) == ([0] * W, 0)
            assert stats.exchanges == dict.fromkeys(stats.copies, 3) | {"barrier": 0, "counts": 0}
            assert stats.rows == rows[rank]


def test_bytes_are_those_that_change_in_the_arenas():
    """Fill the arenas, exchange once, and count what is no longer filling in each rank's section."""
    cfg = config(num_lanes=1, capacity=2 * W * C * K)
    with symm_a2a.VirtualWorld(cfg, W, "cpu") as world:
        lanes = [dispatcher.arena.lanes[0] for dispatcher in world.dispatchers]
        data = ("counts", "headers", "scatter_rows", "gather_rows", "gather_scores")
        before = [dispatcher.stats() for dispatcher in world.dispatchers]
        stored = torch.zeros(W, W, dtype=torch.int64)
        # Two exchanges use each direction: its words are counted after each.
        gen = torch.Generator().manual_seed(3)
        xs = [torch.randn(T, D, generator=gen) for T in (11, 5)]
        scores = [torch.rand(T, K, generator=gen) for T in (11, 5)]
        ids = [torch.randint(-1, E, (T, K), generator=gen) for T in (11, 5)]

        def count_changed(run):
            for lane in lanes:
                for name in data:
                    lane.channel.local[name].view(torch.uint8).fill_(0xA5)
            result = run()
            for peer, lane in enumerate(lanes):
                for name in data:
                    words = lane.channel.local[name].view(torch.int32)
                    changed = words != torch.tensor(0xA5A5A5A5 - 2**32, dtype=torch.int32)
                    stored[:, peer] += 4 * changed.view(W, -1).sum(1)
            return result

        rows, _, handles = count_changed(lambda: world.dispatch(xs, scores, ids))
        count_changed(lambda: world.combine(rows, handles))
        for rank, dispatcher in enumerate(world.dispatchers):
            stats = dispatcher.stats() - before[rank]
            flags = 8 * (3 + 2)
            for peer in range(W):
                said = stats.payload_bytes_W[peer] + stats.metadata_bytes_W[peer] - flags
                assert said == stored[rank, peer], (rank, peer)


@pytest.mark.parametrize(
    ("tokens", "capacity", "launches"), [(5, 400, 8), (129, 2000, 9), (5, "exact", 10), (129, "exact", 10)]
)
@pytest.mark.parametrize("form", ["synchronous", "split"])
def test_launches_and_waits_of_a_forward_and_backward(tokens, capacity, launches, form):
    """All launches are Triton's; the host waits once with "exact", else never; no operator computes."""
    cfg = config(max_tokens_per_rank=256, capacity=capacity)
    with symm_a2a.SymmTokenDispatcher(cfg, device="cpu") as dispatcher:
        x = torch.randn(tokens, D, requires_grad=True)
        scores = torch.rand(tokens, K, requires_grad=True)
        ids, grad = torch.randint(E, (tokens, K)), torch.randn(tokens, D)
        with OpGuard(allow_syncs=capacity == "exact") as guard:
            if form == "split":
                rows, _, handle = dispatcher.dispatch_async(x, scores, ids).join()
                out = dispatcher.combine_async(rows, handle).join()
            else:
                rows, _, handle = dispatcher.dispatch(x, scores, ids)
                out = dispatcher.combine(rows, handle)
            out.backward(grad)
        assert not guard.compute_ops
        assert guard.launches.total() == launches == dispatcher.stats().launches
        waits = 1 if capacity == "exact" else 0
        assert len(guard.host_syncs) == waits == dispatcher.stats().host_syncs


@pytest.mark.parametrize("needs", ["x", "scores", "nothing"])
def test_gradients_that_nobody_needs_cost_no_fill(needs):
    with symm_a2a.SymmTokenDispatcher(config(capacity=200), device="cpu") as dispatcher:
        x = torch.randn(5, D, requires_grad=needs == "x")
        scores = torch.rand(5, K, requires_grad=needs == "scores")
        ids = torch.randint(E, (5, K))
        with OpGuard() as guard:
            rows, _, handle = dispatcher.dispatch(x, scores, ids)
            out = dispatcher.combine(rows, handle)
        grad = torch.randn(5, D)
        with guard:
            out.backward(grad)
        assert not guard.compute_ops
        assert guard.launches.total() == 8


def test_share_of_what_is_no_payload():
    """At D=2048, K=8, bf16: at most 1.6 % of a dispatch, 0.6 % of forward and backward."""
    cfg = config(num_experts=64, top_k=8, hidden_dim=2048, max_tokens_per_rank=64, dtype=torch.bfloat16)
    with symm_a2a.VirtualWorld(cfg, 4, "cpu") as world:
        gen = torch.Generator().manual_seed(0)
        xs = [torch.randn(64, 2048, generator=gen).bfloat16().requires_grad_() for _ in range(4)]
        scores = [torch.rand(64, 8, generator=gen) for _ in range(4)]
        ids = [torch.rand(64, 64, generator=gen).topk(8).indices for _ in range(4)]
        rows, _, handles = world.dispatch(xs, scores, ids)
        dispatch = [dispatcher.stats() for dispatcher in world.dispatchers]
        torch.cat(world.combine(rows, handles)).float().sum().backward()
        whole = [dispatcher.stats() for dispatcher in world.dispatchers]
    # Counts and flags are the same for 64 tokens and for 4096: scaled to what publishers measure.
    for stats, exchanges, most in ((dispatch, 1, 0.016), (whole, 4, 0.006)):
        fixed = 4 * 4 * 64 + 4 * 8 * (3 + (7 if exchanges == 4 else 0))
        for one in stats:
            payload, metadata = sum(one.payload_bytes_W), sum(one.metadata_bytes_W)
            assert metadata - fixed + fixed / 64 <= most * payload


def meet(rank, group):
    cfg = rank_config()
    with symm_a2a.SymmTokenDispatcher(cfg, group) as dispatcher:
        found = []
        for step in range(3):
            x, scores, ids = inputs(rank, step, torch.float32, "cpu")
            dispatcher.barrier()
            counts = dispatcher.broadcast_counts(ids)
            expected = torch.bincount(ids[ids >= 0], minlength=cfg.num_experts)
            assert torch.equal(counts[rank], expected.int())
            rows, _, handle = dispatcher.dispatch(x, scores, ids)
            dispatcher.barrier()
            dispatcher.combine(rows, handle)
            found.append(counts.tolist())
        stats = dispatcher.stats()
        assert (stats.exchanges["barrier"], stats.exchanges["counts"], stats.exchanges["dispatch"]) == (
            6,
            3,
            3,
        )
        assert stats.blocked_seconds > 0
        return found


def test_barriers_and_counts_between_exchanges_over_processes():
    first, *others = run_ranks(meet, 2)
    assert all(other == first for other in others)


def test_a_difference_is_what_came_between():
    with symm_a2a.VirtualWorld(config(), W, "cpu") as world:
        exchanged(world)
        once = world.dispatchers[0].stats()
        exchanged(world)
        twice = world.dispatchers[0].stats()
        between = twice - once
        assert between.copies == once.copies
        assert between.payload_bytes_W == once.payload_bytes_W
        assert between.symmetric_bytes == once.symmetric_bytes
        assert between.as_dict() == dataclasses.asdict(between) | {"load": between.load.as_dict()}
        assert between.load == once.load


def test_an_empty_exchange_counts():
    with symm_a2a.VirtualWorld(config(), W, "cpu") as world:
        exchanged(world, tokens=(0, 0))
        stats = world.dispatchers[0].stats()
    assert stats.exchanges["dispatch"] == 1
    assert stats.copies["dispatch"] == [0, 0]
    assert stats.payload_bytes_W == [0, 0]


@pytest.mark.parametrize("form", ["synchronous", "split"])
def test_a_profile_shows_operation_lane_and_epoch(form):
    with symm_a2a.SymmTokenDispatcher(config(), device="cpu") as dispatcher:
        x, scores = torch.randn(5, D, requires_grad=True), torch.rand(5, K)
        ids = torch.randint(E, (5, K))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(2):
                if form == "split":
                    rows, _, handle = dispatcher.dispatch_async(x, scores, ids, lane=1).join()
                    dispatcher.combine_async(rows, handle).join().sum().backward()
                else:
                    rows, _, handle = dispatcher.dispatch(x, scores, ids, lane=1)
                    dispatcher.combine(rows, handle).sum().backward()
    names = [event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)]
    expected = [
        f"symm_a2a {kind} {phase}, lane 1, epoch {epoch}"
        for epochs in ((1, 1, 2, 2), (3, 3, 4, 4))
        for kind, epoch in zip(
            ("dispatch", "combine", "combine backward", "dispatch backward"), epochs, strict=True
        )
        for phase in ("launch", "join")
    ]
    assert [name for name in names if name.startswith("symm_a2a ")] == expected


def test_barriers_and_counts_send_what_they_say():
    """Three flags each to every rank; a broadcast the counts of all experts, of all ranks, and a mark too."""
    with symm_a2a.SymmTokenDispatcher(config(), device="cpu") as dispatcher:
        start = dispatcher.stats()
        dispatcher.barrier()
        met = dispatcher.stats()
        dispatcher.broadcast_counts(torch.zeros(2, K, dtype=torch.int64), lane=1)
        assert (met - start).metadata_bytes_W == [3 * 8]
        assert (dispatcher.stats() - met).metadata_bytes_W == [3 * 8 + 4 * (E + 1 + 1)]
        assert dispatcher.stats().launches == 2 + 3


def test_lanes_and_drops_add_up_and_a_failure_is_raised():
    cfg = config(capacity=4, overflow="drop", timeout=0.01)
    with symm_a2a.VirtualWorld(cfg, W, "cpu") as world:
        gen = torch.Generator().manual_seed(1)
        xs = [torch.randn(6, D, generator=gen) for _ in range(W)]
        scores = [torch.rand(6, K, generator=gen) for _ in range(W)]
        ids = [torch.zeros(6, K, dtype=torch.int64)] * W
        for lane in (0, 1, 1):
            world.dispatch(xs, scores, ids, lane=lane)
        stats = world.dispatchers[0].stats()
        assert stats.exchanges["dispatch"] == 3
        assert stats.rows == 3 * W * 6 * K
        assert stats.dropped_rows == world.dispatchers[0].dropped_rows == 3 * (W * 6 * K - 4)
        assert stats.copies["dispatch"] == [18, 0]
        # Nobody else launches: the kernel finds it out, and the counters are not shown as if all were well.
        channel = world.dispatchers[0].arena.lanes[0].channel
        barrier(channel, None, arrive=True, leave=True)
        with pytest.raises(symm_a2a.ExchangeError, match="in barrier, lane 0"):
            world.dispatchers[0].stats()


@pytest.mark.parametrize("programs", [3, 5])
def test_ids_out_of_range_are_counted_once_however_many_programs_there_are(programs):
    for tokens, capacity in ((30, 900), (150, 900), (30, "exact")):
        cfg = config(max_tokens_per_rank=200, capacity=capacity)
        with symm_a2a.VirtualWorld(cfg, 1, "cpu") as world:
            use_small_blocks(world)
            lane = world.dispatchers[0].arena.lanes[0]
            lane.channel = dataclasses.replace(lane.channel, programs=programs)
            ids = torch.zeros(tokens, K, dtype=torch.int64)
            ids[3, 1], ids[tokens - 1, 0], ids[7, 2] = E, -2, 10**12
            with pytest.raises(symm_a2a.ExpertIdError, match="got 3 "):
                world.dispatch([torch.randn(tokens, D)], [torch.rand(tokens, K)], [ids])


@pytest.mark.parametrize(("tokens", "launches"), [(0, 8), (1, 8), (127, 8), (128, 8), (129, 9)])
def test_up_to_128_tokens_are_a_small_message(tokens, launches):
    with symm_a2a.SymmTokenDispatcher(config(max_tokens_per_rank=200, capacity=600), device="cpu") as d:
        x, scores = torch.randn(tokens, D, requires_grad=True), torch.rand(tokens, K)
        rows, _, handle = d.dispatch(x, scores, torch.zeros(tokens, K, dtype=torch.int64))
        d.combine(rows, handle).sum().backward()
        assert d.stats().launches == launches
