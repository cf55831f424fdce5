"""Proposed placements: whole, even, and the same wherever they are computed."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symm_a2a import ConfigError, Load, Placement, rebalance


def loads_of(placement, slots_E):
    """Each rank's rows, if slots split exactly by the shares."""
    rows_W = []
    for w, mine in enumerate(placement.experts_of_rank):
        total = 0.0
        for number, expert in enumerate(mine):
            shares = [
                placement.shares[q][placement.experts_of_rank[q].index(expert)]
                for q in placement.ranks_of_expert[expert]
            ]
            total += slots_E[expert] * placement.shares[w][number] / sum(shares)
        rows_W.append(total)
    return rows_W


@st.composite
def problems(draw):
    W = draw(st.integers(1, 6))
    slots_E = draw(st.lists(st.sampled_from([0, 1, 2, 5, 100, 0.3, 7]), min_size=1, max_size=14))
    L = draw(st.integers(-(-len(slots_E) // W), len(slots_E)))
    return slots_E, W, L


@settings(max_examples=300)
@given(problems())
def test_every_place_is_used_and_the_same_loads_give_the_same_placement(problem):
    slots_E, W, L = problem
    placement = rebalance(slots_E, W, L)
    assert placement == rebalance(torch.tensor(slots_E, dtype=torch.float64), W, L)
    assert placement.num_experts == len(slots_E)
    assert all(len(mine) <= L for mine in placement.experts_of_rank)
    assert sum(map(len, placement.experts_of_rank)) == W * L


@settings(max_examples=100)
@given(problems())
def test_with_every_expert_everywhere_no_rank_gets_more_than_the_mean(problem):
    slots_E, W, _ = problem
    placement = rebalance(slots_E, W, len(slots_E))
    assert max(loads_of(placement, slots_E)) <= sum(slots_E) / W * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("slots_E", [[8, 1, 1, 6], [5, 4, 3, 3, 2, 1], [9, 9, 1, 1, 1, 1, 1, 1]])
def test_two_ranks_are_packed_nearly_as_well_as_can_be(slots_E):
    half = len(slots_E) // 2
    best = min(max(sum(mine), sum(slots_E) - sum(mine)) for mine in itertools.combinations(slots_E, half))
    assert max(loads_of(rebalance(slots_E, 2), slots_E)) <= best * 7 / 6


@settings(max_examples=100)
@given(problems())
def test_replicas_are_made_only_where_they_are_asked_for(problem):
    slots_E, W, _ = problem
    placement = rebalance(slots_E, W)
    assert [len(ranks) for ranks in placement.ranks_of_expert] == [1] * len(slots_E)
    assert placement.num_local_experts <= -(-len(slots_E) // W)


def test_an_expert_that_is_as_busy_as_all_others_has_a_rank_to_itself():
    assert rebalance([9, 3, 3], 2).experts_of_rank == ((0,), (1, 2))


def test_loads_that_vanish_beside_others_have_shares_all_the_same():
    for loads, places in (([1.0, 1e-20], 2), ([1e17, 3, 3, 2], 3), ([1e11, 4e-9], 2)):
        placement = rebalance(loads, 2, places)
        shares = {}
        for mine, parts in zip(placement.experts_of_rank, placement.shares, strict=True):
            for expert, part in zip(mine, parts, strict=True):
                shares[expert] = shares.get(expert, 0.0) + part
        assert all(share > 0 for share in shares.values())


def test_replicas_go_to_the_busiest_and_even_out_what_one_rank_cannot():
    slots_E = [90, 10, 10, 10]
    assert max(loads_of(rebalance(slots_E, 2), slots_E)) >= 90
    placement = rebalance(slots_E, 2, 3)
    assert placement.ranks_of_expert[0] == (0, 1)
    assert max(loads_of(placement, slots_E)) == pytest.approx(60)


def test_a_proposal_is_better_than_the_worst_and_the_contiguous_one():
    slots_E = [round(1000 / n) for n in range(1, 17)]

    def worst_rank(placement):
        return max(sum(slots_E[e] for e in mine) for mine in placement.experts_of_rank)

    contiguous = Placement.contiguous(16, 4)
    assert worst_rank(rebalance(slots_E, 4)) < 0.6 * worst_rank(contiguous)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], 2, 1), "places for 3 experts, at most 3 on a rank, got 1 on each of 2 ranks"),
        (([1, 2, 3], 2, 4), "got 4 on each of 2 ranks"),
        (([1, -2], 2), "not negative, of a finite sum, got .1.0, -2.0."),
        (([1, float("nan")], 2), "loads that are not negative"),
        (([1e308, 1e308], 2), r"of a finite sum, got \[1e\+308, 1e"),
        (([], 2), "expected the load of at least one expert"),
        (([1, 2], 0), "world_size to be a positive int, got 0"),
        (([1, 2], 1.5), "world_size to be a positive int, got 1.5"),
        (([1, 2], 2, 1.5), "num_local_experts to be a positive int, got 1.5"),
    ],
)
def test_problems_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        rebalance(*arguments)


def test_imbalance_is_that_of_the_counts():
    load = Load([6, 2, 0, 0], [8, 0], [[4, 0], [4, 0]])
    assert load.max_over_mean == 3
    assert load.cv == pytest.approx(6**0.5 / 2)
    assert (load.rank_max_over_mean, load.rank_cv) == (2, 1)
    assert load + load - load == load
    nothing = load - load
    assert (nothing.cv, nothing.max_over_mean, nothing.rank_cv, nothing.rank_max_over_mean) == (0, 1, 0, 1)
    assert load.as_dict()["copies_WW"] == [[4, 0], [4, 0]]
