"""Placements: any expert on any rank, replicas, and what a dispatch makes of them."""

import dataclasses
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import symm_a2a
from symm_a2a import Placement, VirtualWorld, reference
from symm_a2a.kernels.blocks import SMALL_TOKENS
from symm_a2a.placement import SHARE_UNITS
from symm_a2a.testing import run_ranks
from tests.cases import apply_experts, examples, placements_of, use_small_blocks

D, K = 5, 3


@st.composite
def placements(draw, max_ranks=4, max_experts=7):
    W, E = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_experts))
    return draw(placements_of(W, E))


def inputs(placement, tokens, seed, ids_dtype=torch.int64):
    gen = torch.Generator().manual_seed(seed)
    xs = [torch.randn(T, D, generator=gen, dtype=torch.float64) for T in tokens]
    scores = [torch.rand(T, K, generator=gen, dtype=torch.float64) for T in tokens]
    ids = [torch.randint(-1, placement.num_experts, (T, K), generator=gen).to(ids_dtype) for T in tokens]
    weights = torch.randn(placement.num_experts, D, D, generator=gen, dtype=torch.float64)
    return xs, scores, ids, weights


def config(placement, **changes):
    fields = dict(
        num_experts=placement.num_experts, top_k=K, hidden_dim=D, max_tokens_per_rank=SMALL_TOKENS + 40,
        dtype=torch.float64, placement=placement,
    )  # fmt: skip
    return symm_a2a.EPConfig(**(fields | changes))


def without_ranks(xs, scores, ids, weights):
    """Return each rank's sums, from every expert at hand: what no placement may change."""
    outs = []
    for x, score, i in zip(xs, scores, ids, strict=True):
        y_ETD = torch.tanh(torch.einsum("td,edf->etf", x, weights))
        picked = y_ETD[i.long().clamp(min=0), torch.arange(len(x))[:, None]]
        outs.append((torch.where(i >= 0, score, 0)[..., None] * picked).sum(1))
    return outs


def check(world, placement, xs, scores, ids, weights):
    """Rows where the placement says, in the oracle's order; sums and gradients as without ranks."""
    xs, scores = ([t.clone().requires_grad_() for t in part] for part in (xs, scores))
    held = [weights[list(mine)].clone().requires_grad_() for mine in placement.experts_of_rank]
    rows, counts, handles = world.dispatch(xs, scores, ids)
    places = [placement.places(i, rank) for rank, i in enumerate(ids)]
    expected, expected_counts = reference.dispatch(
        [x.detach() for x in xs], places, placement.num_places, world.cfg.pad_multiple
    )
    for rank, mine in enumerate(placement.experts_of_rank):
        assert torch.equal(rows[rank], expected[rank])
        assert torch.equal(counts[rank], expected_counts[rank][: len(mine)])
    ys = [
        apply_experts(*args) if len(args[2]) else args[0] * 0 for args in zip(rows, counts, held, strict=True)
    ]
    outs = world.combine(ys, handles)
    sum((out**2).sum() for out in outs).backward()

    xs_, scores_ = ([t.detach().clone().requires_grad_() for t in part] for part in (xs, scores))
    all_weights = weights.clone().requires_grad_()
    plain = without_ranks(xs_, scores_, ids, all_weights)
    sum((out**2).sum() for out in plain).backward()
    sums = torch.zeros_like(weights)
    for mine, weight in zip(placement.experts_of_rank, held, strict=True):
        if mine:
            sums.index_add_(0, torch.tensor(mine), weight.grad)
    pairs = [*zip(outs, plain, strict=True), (sums, all_weights.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip([*xs, *scores], [*xs_, *scores_], strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@settings(max_examples=examples(4))
@given(placements(), st.integers(0, 2**16), st.sampled_from([torch.int32, torch.int64]), st.booleans())
def test_rows_go_where_they_are_placed_and_sums_stay_the_same(placement, seed, ids_dtype, small):
    rng = random.Random(seed)
    tokens = [rng.randint(0, 12) for _ in range(placement.world_size)]
    cfg = config(placement, pad_multiple=rng.choice([1, 4]))
    with VirtualWorld(cfg, placement.world_size, "cpu") as world:
        if small:
            use_small_blocks(world)
        check(world, placement, *inputs(placement, tokens, seed, ids_dtype))


def test_messages_too_long_for_the_scatter_to_count():
    placement = Placement(((2, 0), (1, 2), (3,)), shares=((0.3, 1), (1, 0.7), (1,)))
    with VirtualWorld(config(placement), 3, "cpu") as world:
        check(world, placement, *inputs(placement, (SMALL_TOKENS + 33, 0, SMALL_TOKENS + 1), 5))


@settings(max_examples=30)
@given(placements(), st.integers(0, 2**16))
def test_a_table_says_what_the_placement_does(placement, seed):
    """From its own rows: every interval as long as the share, every place its expert's."""
    for rank in range(placement.world_size):
        table = placement.table(rank)
        for expert, ranks in enumerate(placement.ranks_of_expert):
            ends = table[expert, :, 1].tolist()
            assert ends[len(ranks) - 1 :] == [SHARE_UNITS] * (len(ends) - len(ranks) + 1)
            lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
            numbers = [placement.experts_of_rank[w].index(expert) for w in ranks]
            shares = [1.0] * len(ranks)
            if placement.shares is not None:
                shares = [placement.shares[w][number] for w, number in zip(ranks, numbers, strict=True)]
            if placement.prefer_local and rank in ranks:
                shares = [float(w == rank) for w in ranks]
            L = placement.num_local_experts
            places = [w * L + number for w, number in zip(ranks, numbers, strict=True)]
            assert table[expert, : len(ranks), 0].tolist() == places
            for length, share in zip(lengths, shares, strict=False):
                assert abs(length - SHARE_UNITS * share / sum(shares)) <= 1


@pytest.mark.parametrize("weights", [(1, 1), (1, 1, 1), (5, 2, 1)])
def test_replicas_get_their_shares_of_any_stretch_of_tokens(weights):
    """However many tokens, from whichever rank: within four slots of the share."""
    W = len(weights)
    placement = Placement(((0,),) * W, tuple((share,) for share in weights))
    for rank in range(W):
        places_N = placement.places(torch.zeros(3000, 1, dtype=torch.int64), rank)[:, 0]
        for first, length in ((0, 3000), (0, 100), (1234, 16), (7, 400)):
            got_W = torch.bincount(places_N[first : first + length], minlength=W)
            due_W = length * torch.tensor(weights, dtype=torch.float64) / sum(weights)
            assert (got_W - due_W).abs().max() <= 4, (rank, first, length)


def test_a_local_replica_is_preferred_and_saves_copies():
    placement = Placement(((0, 1), (0, 1)), prefer_local=True)
    with VirtualWorld(config(placement), 2, "cpu") as world:
        xs, scores, ids, _ = inputs(placement, (9, 7), 1)
        world.dispatch(xs, scores, ids)
        copies_WW = world.dispatchers[1].stats().load.copies_WW
        assert [copies_WW[0][1], copies_WW[1][0]] == [0, 0]
        assert [copies_WW[w][w] for w in range(2)] == [int((i >= 0).any(1).sum()) for i in ids]


@pytest.mark.parametrize("bad", [5, -2, 2**32])
@pytest.mark.parametrize("tokens", [3, SMALL_TOKENS + 3])
def test_ids_out_of_range_are_reported_as_such(bad, tokens):
    placement = Placement(((0, 1, 4), (2, 3)))
    with VirtualWorld(config(placement), 2, "cpu") as world:
        xs, scores, ids, _ = inputs(placement, (tokens, 2), 0)
        ids[0][1, 1] = bad
        with pytest.raises(symm_a2a.ExpertIdError, match=r"in \[-1, 5\), got 1 slots"):
            world.dispatch(xs, scores, ids)


@pytest.mark.parametrize(
    ("experts", "changes", "message"),
    [
        (((0, 2),), {}, r"every expert from 0 on to be on some rank, got experts \[0, 2\]"),
        (((), ()), {}, "every expert from 0 on"),
        (((0, -1), (1,)), {}, "every expert from 0 on"),
        (((0, 0), (1,)), {}, r"an expert once on a rank, got \[0, 0\] on rank 0"),
        (((0,), (1,)), {"shares": ((1,), (1, 2))}, r"each place, \[1, 1\] of the ranks, got \[1, 2\]"),
        (((0,), (0,)), {"shares": ((1,), (-1,))}, "shares that are not negative"),
        (((0,), (0,)), {"shares": ((float("nan"),), (1,))}, "shares that are not negative"),
        (((0,), (0,)), {"shares": ((1e308,), (1e308,))}, "of a finite sum"),
        ((0, 1), {}, r"for each rank a sequence of ints, got \(0, 1\)"),
        (((0.5,), (1,)), {}, "a sequence of ints"),
        (((0,), (0,)), {"shares": "ab"}, "a sequence of numbers, got 'ab'"),
        (((0,), (0,)), {"shares": 5}, "a sequence of numbers, got 5"),
        (((0,), (0,)), {"shares": ((None,), (1,))}, "a sequence of numbers"),
        (((0,), (0,)), {"shares": ((0,), (0,))}, "some share of expert 0 to be positive"),
    ],
)  # fmt: skip
def test_placements_that_make_no_sense_are_refused(experts, changes, message):
    with pytest.raises(symm_a2a.ConfigError, match=message):
        Placement(experts, **changes)


def test_placements_are_made_of_ints():
    with pytest.raises(symm_a2a.ConfigError, match=r"an int for each, got \[0.0, 1\]"):
        Placement.from_ranks([0.0, 1], 2)
    with pytest.raises(symm_a2a.ConfigError, match="num_experts to be a positive int, got '8'"):
        Placement.contiguous("8", 2)


def test_configs_that_do_not_fit_the_placement_are_refused():
    placement = Placement(((0,), (1,)))
    with pytest.raises(symm_a2a.ConfigError, match="placement of num_experts = 3, got one of 2 experts"):
        config(placement, num_experts=3)
    with pytest.raises(symm_a2a.ConfigError, match=r"to be a Placement, got \(\(0,\), \(1,\)\)"):
        replace(config(placement), placement=((0,), (1,)))
    with pytest.raises(symm_a2a.ConfigError, match="placement for 4 ranks, got one for 2"):
        config(placement).layout(4)
    with pytest.raises(symm_a2a.ConfigError, match=r"ranks in \[0, 2\), got 2"):
        Placement.from_ranks([0, 2], 2)
    with pytest.raises(symm_a2a.ConfigError, match="5 experts for 2 ranks"):
        Placement.contiguous(5, 2)


def test_a_contiguous_placement_is_none():
    sizes = dict(num_experts=4, top_k=1, hidden_dim=2, max_tokens_per_rank=2)
    placed = symm_a2a.EPConfig(**sizes, placement=Placement.contiguous(4, 2))
    assert placed.mark == symm_a2a.EPConfig(**sizes).mark
    assert placed.mark != symm_a2a.EPConfig(**sizes, placement=Placement(((1, 0), (2, 3)))).mark


def test_a_contiguous_placement_costs_nothing():
    plain = Placement.contiguous(4, 2)
    for placement, launches in ((None, 6), (plain, 6), (Placement(((0, 1), (3, 2))), 7)):
        cfg = dataclasses.replace(config(plain), placement=placement)
        with VirtualWorld(cfg, 2, "cpu") as world:
            xs, scores, ids, _ = inputs(plain, (3, 2), 0)
            rows, _, handles = world.dispatch(xs, scores, ids)
            world.combine(rows, handles)
            # Count, row count, scatter, expand, gather, finish; and the lookup of the places.
            assert world.dispatchers[0].stats().launches == launches


def test_layers_of_one_arena_may_place_their_experts_differently():
    first = Placement(((0, 1), (2, 3)))
    second = Placement(((3, 1), (0, 2)))
    with VirtualWorld(config(first), 2, "cpu") as world:
        data = inputs(first, (5, 4), 3)
        check(world, first, *data)
        other = dataclasses.replace(config(second))
        world.dispatchers = [
            symm_a2a.SymmTokenDispatcher(other, arena=dispatcher.arena) for dispatcher in world.dispatchers
        ]
        check(world, second, *data)
        with pytest.raises(symm_a2a.ConfigError, match="2 places on each rank, as the arena has them, got 3"):
            symm_a2a.SymmTokenDispatcher(
                config(Placement(((0, 1, 2), (3,)))), arena=world.dispatchers[0].arena
            )


def test_a_dispatcher_may_be_made_under_a_meta_device():
    placement = Placement(((0, 2), (1, 2)))
    with VirtualWorld(config(placement), 2, "cpu") as world:
        with torch.device("meta"):
            world.dispatchers = [
                symm_a2a.SymmTokenDispatcher(world.cfg, arena=dispatcher.arena)
                for dispatcher in world.dispatchers
            ]
        check(world, placement, *inputs(placement, (5, 4), 3))
        with torch.device("meta"):
            assert sum(world.dispatchers[0].stats().load.slots_E) > 0


def test_ranks_that_place_experts_differently_learn_it_and_no_row_is_taken():
    placements = Placement(((0, 1), (2, 3))), Placement(((0, 2), (1, 3)))
    with VirtualWorld(config(placements[0]), 2, "cpu") as world:
        world.dispatchers = [
            symm_a2a.SymmTokenDispatcher(config(placement), arena=dispatcher.arena)
            for placement, dispatcher in zip(placements, world.dispatchers, strict=True)
        ]
        xs, scores, ids, _ = inputs(placements[0], (5, 4), 3)
        pending = [
            dispatcher.dispatch_async(*of_rank)
            for dispatcher, *of_rank in zip(world.dispatchers, xs, scores, ids, strict=True)
        ]
        for rank, one in enumerate(pending):
            with pytest.raises(
                symm_a2a.ExchangeMismatchError,
                match=f"another placement from peer {1 - rank} than rank {rank}",
            ):
                one.join()


def broadcast(rank, group, placements):
    cfg, other = config(placements[0], timeout=20), config(placements[rank], timeout=20)
    with symm_a2a.SymmTokenDispatcher(cfg, group) as first:
        second = symm_a2a.SymmTokenDispatcher(other, arena=first.arena)

        def meet():
            second.broadcast_counts(torch.zeros(2, K, dtype=torch.int64))
            second.barrier()

        with pytest.raises(symm_a2a.ExchangeError, match=r"another placement|gave up before it took part"):
            meet()


def test_so_do_they_where_counts_alone_are_broadcast():
    run_ranks(broadcast, 2, (Placement(((0, 1), (2, 3))), Placement(((0, 2), (1, 3)))))


def test_loads_are_those_of_the_routing():
    placement = Placement(((2, 0), (1, 2), (3,)))
    with VirtualWorld(config(placement, num_lanes=2), 3, "cpu") as world:
        slots_E, rows_W = torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        copies_WW = torch.zeros(3, 3, dtype=torch.int64)
        for step, tokens in enumerate(((5, 0, 7), (SMALL_TOKENS + 5, SMALL_TOKENS + 9, SMALL_TOKENS + 1))):
            xs, scores, ids, _ = inputs(placement, tokens, step)
            before = world.dispatchers[0].stats()
            world.dispatch(xs, scores, ids, lane=step)
            for rank, i in enumerate(ids):
                slots_E += torch.bincount(i[i >= 0], minlength=4)
                owner = placement.places(i, rank).div(2, rounding_mode="floor")
                for q in range(3):
                    rows_W[q] += (owner == q).sum()
                    copies_WW[rank, q] += (owner == q).any(1).sum()
        for dispatcher in world.dispatchers:
            load = dispatcher.stats().load
            assert (load.slots_E, load.rows_W, load.copies_WW) == (
                slots_E.tolist(), rows_W.tolist(), copies_WW.tolist()
            )  # fmt: skip
            of_slots, of_rows = slots_E.double(), rows_W.double()
            assert load.cv == pytest.approx(float(of_slots.std(correction=0) / of_slots.mean()))
            assert load.max_over_mean == pytest.approx(float(of_slots.max() / of_slots.mean()))
            assert load.rank_cv == pytest.approx(float(of_rows.std(correction=0) / of_rows.mean()))
            assert load.rank_max_over_mean == pytest.approx(float(of_rows.max() / of_rows.mean()))
        assert (world.dispatchers[0].stats() - before).load + before.load == load


def trained(rank, group, placement, ids_seed):
    cfg = config(placement)
    with symm_a2a.SymmTokenDispatcher(cfg, group) as dispatcher:
        xs, scores, ids, weights = inputs(placement, (7, 0, 5, 9), ids_seed)
        x, score = xs[rank].requires_grad_(), scores[rank].requires_grad_()
        mine = weights[list(placement.experts_of_rank[rank])].requires_grad_()
        rows, counts, handle = dispatcher.dispatch(x, score, ids[rank])
        out = dispatcher.combine(apply_experts(rows, counts, mine), handle)
        (out**2).sum().backward()
        counts_WE = dispatcher.broadcast_counts(ids[rank])
        return out.detach(), x.grad, score.grad, mine.grad, counts_WE, dispatcher.stats().load


def test_a_placement_over_processes():
    placement = Placement(((4, 0), (1,), (2, 0, 3), (5, 1)), shares=((1, 1), (2,), (1, 3, 1), (1, 1)))
    ranks = run_ranks(trained, 4, placement, 11)
    xs, scores, ids, weights = inputs(placement, (7, 0, 5, 9), 11)
    xs, scores = ([t.requires_grad_() for t in part] for part in (xs, scores))
    plain = without_ranks(xs, scores, ids, weights.requires_grad_())
    sum((out**2).sum() for out in plain).backward()
    sums = torch.zeros_like(weights)
    counts_WE = torch.stack([torch.bincount(i[i >= 0], minlength=6) for i in ids])
    for rank, (out, grad_x, grad_score, grad_weight, counts, load) in enumerate(ranks):
        sums.index_add_(0, torch.tensor(placement.experts_of_rank[rank]), grad_weight)
        for ours, theirs in ((out, plain[rank]), (grad_x, xs[rank].grad), (grad_score, scores[rank].grad)):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        assert torch.equal(counts.long(), counts_WE)
        assert load.slots_E == counts_WE.sum(0).tolist()
        assert load == ranks[0][-1]
    torch.testing.assert_close(sums, weights.grad, rtol=0, atol=1e-12)
