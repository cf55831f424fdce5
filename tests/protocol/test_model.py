"""The protocol in every order: schedules and kernels of the code, and what each rule is there for.

Nothing here runs an exchange. What ranks do is what the library launches for them, and what its kernels do to
a lane; the model looks at all orders in which that can happen.
"""

import functools
import re

import pytest

from tests.protocol import mutants
from tests.protocol.explore import explore, walk
from tests.protocol.model import System
from tests.protocol.schedules import (
    WAITS,
    dispatching,
    emitted,
    everything,
    micro_batches,
    one_after_another,
    recomputing,
    together,
    training,
    without,
)

WORLDS = ("host", "gpu")
SYNCHRONOUS = {
    "training": (training, {}),
    "training exact": (training, dict(capacity="exact")),
    "recomputing": (recomputing, {}),
    "dispatching": (dispatching, {}),
    "dispatching exact": (dispatching, dict(capacity="exact")),
    "everything": (everything, {}),
}
DOMINO = {
    "one lane": (micro_batches(2, 1), dict(lanes=1)),
    "two lanes": (micro_batches(2, 1), dict(lanes=2)),
    "two lanes exact": (micro_batches(2, 1), dict(lanes=2, capacity="exact")),
    "two lanes, two layers": (micro_batches(2, 2), dict(lanes=2)),
    "two lanes, three micro-batches": (micro_batches(3, 1), dict(lanes=2)),
    "two lanes, recomputed": (micro_batches(2, 1, again=True), dict(lanes=2)),
    "three lanes": (micro_batches(3, 2), dict(lanes=3)),
}


@functools.cache
def schedule(name, world):
    run, options = (SYNCHRONOUS | DOMINO)[name]
    return emitted(run, world, **options)


def kinds(nodes):
    return {key for node in nodes for key in (node.key[0], *node.key[1:])}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("world_size", "name"),
    # Two steps of three ranks take a minute; the reduced exploration has them.
    [*((2, name) for name in SYNCHRONOUS), *((3, name) for name in SYNCHRONOUS if "training" not in name)],
)
def test_every_order_of_synchronous_exchanges_is_right(name, world, world_size):
    found = explore(System([schedule(name, world)] * world_size, world))
    assert found.violation is None
    assert found.states > 100
    assert found.ends == {frozenset()}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["one lane", "two lanes"])
def test_every_order_of_two_ranks_that_interleave_micro_batches_is_right(name, world):
    found = explore(System([schedule(name, world)] * 2, world))
    assert found.violation is None
    assert found.states > 500


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, *DOMINO])
def test_every_order_that_differs_in_what_somebody_sees_is_right(name, world, world_size):
    found = explore(System([schedule(name, world)] * world_size, world), reduced=True)
    assert found.violation is None
    assert found.ends == {frozenset()}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["everything", "three lanes"])
def test_random_orders_of_many_ranks_are_right(name, world):
    assert walk(System([schedule(name, world)] * 6, world), walks=10, seed=7).violation is None


def test_schedules_are_what_they_are_for():
    """The code's own: credits where a direction repeats, streams where launches run beside, repeats."""
    assert not any(node.key[0] == "_credit_kernel" for node in schedule("training", "gpu"))
    assert any(node.key[0] == "_credit_kernel" for node in schedule("dispatching", "gpu"))
    assert {node.stream for node in schedule("three lanes", "gpu")} == {
        "caller",
        "lane 0",
        "lane 1",
        "lane 2",
    }
    assert {node.stream for node in schedule("two lanes", "host")} == {"caller"}
    assert "rows 0" in {node.stream for node in schedule("training exact", "gpu")}
    dispatches = [node for node in schedule("recomputing", "gpu") if node.key[0] == "_expand_kernel"]
    assert len(dispatches) == 4
    assert {f"KIND={kind}" for kind in range(8)} <= kinds(schedule("everything", "gpu"))
    assert any(node.key[0] == WAITS for node in schedule("dispatching", "host"))


# What each rule is there for: the schedule that shows it, and what is seen.
BROKEN = [
    ("gpu", "dispatching exact", mutants.without_credit, "of epoch 1 .*found epoch 2"),
    ("gpu", "dispatching exact", mutants.counts_before_credit, "read counts of epoch 1 .*found epoch 2"),
    ("gpu", "training", mutants.flag_before_rows, "found epoch 0"),
    ("host", "training", mutants.flag_before_rows, "found epoch 0"),
    ("gpu", "training", mutants.flag_of_the_first_program, "1 of 2 pieces"),
    ("gpu", "training exact", mutants.flag_before_counts, "read counts of epoch 1 .*found epoch 0"),
    ("gpu", "dispatching", mutants.freed_before_read, "of epoch 1 .*found epoch 2"),
    ("host", "dispatching", mutants.freed_before_read, "of epoch 1 .*found epoch 2"),
    ("gpu", "training", mutants.joined_unseen, "found epoch 0"),
]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("world", "name", "change", "seen"), BROKEN)
def test_a_broken_rule_is_found(world, name, change, seen, reduced):
    system = System([schedule(name, world)] * 2, world, mutants.changed(change, world, 2))
    found = explore(system, reduced=reduced)
    assert re.search(seen, found.violation or "nothing"), found


@pytest.mark.parametrize("change", [mutants.without_credit, mutants.freed_before_read])
@pytest.mark.parametrize("world", WORLDS)
def test_where_directions_alternate_the_credit_is_implied(change, world):
    """In a training step no launch could overwrite what is not read yet, whatever free flags say."""
    nodes = without(schedule("training", world), waits_for_credit)
    assert explore(System([nodes] * 2, world, mutants.changed(change, world, 2))).violation is None


def waits_for_credit(node):
    return node.key[0] == "_credit_kernel" or (node.key[0] == WAITS and node.key[1].endswith("_free"))


@pytest.mark.parametrize("world", WORLDS)
def test_a_host_that_forgets_the_credit_is_told_by_the_kernel_and_overwrites_nothing(world):
    nodes = without(schedule("dispatching", world), waits_for_credit)
    told = explore(System([nodes] * 2, world))
    assert re.search("check scatter_free of epoch 1 .*not reached", told.violation or ""), told
    unseen = explore(System([nodes] * 2, world, mutants.changed(mutants.without_credit, world, 2)))
    assert re.search("of epoch 1 .*found epoch 2", unseen.violation or ""), unseen


@pytest.mark.parametrize("name", ["training", "dispatching", "two lanes, two layers"])
@pytest.mark.parametrize("world", WORLDS)
def test_flags_without_epochs_are_taken_for_later_ones(name, world):
    found = explore(mutants.without_epochs(System([schedule(name, world)] * 2, world)), reduced=True)
    assert re.search("of epoch 2 .*found epoch [01]", found.violation or ""), found


@pytest.mark.parametrize("world", WORLDS)
def test_lanes_joined_one_after_another_in_another_order_end_in_a_deadlock(world):
    one, other = (emitted(one_after_another(*lanes), world) for lanes in ((0, 1), (1, 0)))
    found = explore(System([one, other], world))
    assert (found.violation or "").startswith("nobody can go on: ")
    assert explore(System([one, one], world)).violation is None


@pytest.mark.parametrize("world", WORLDS)
def test_lanes_launched_together_may_be_joined_in_any_order(world):
    one, other = (emitted(together(*lanes), world) for lanes in ((0, 1), (1, 0)))
    assert explore(System([one, other], world)).violation is None


@pytest.mark.parametrize(
    ("world", "name"),
    [
        ("host", "training"),
        ("host", "two lanes"),
        ("gpu", "one lane"),
        ("gpu", "dispatching"),
    ],
)
def test_a_rank_that_gives_up_ends_the_others(world, name):
    """It may give up at any wait; the others have no timeout of their own here, only its word."""
    found = explore(System([schedule(name, world)] * 2, world, late=0))
    assert found.violation is None
    assert found.ends >= {frozenset(), frozenset({0, 1})}
    assert frozenset({1}) not in found.ends


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_gives_up_without_a_word_leaves_the_others_waiting(world):
    found = explore(System([schedule("dispatching", world)] * 2, world, late=0, tells=False))
    assert (found.violation or "").startswith("nobody can go on: rank 1")


def test_three_ranks_end_by_the_word_of_one():
    nodes = {world: emitted(one_after_another(0, 0), world) for world in WORLDS}
    found = explore(System([nodes["host"]] * 3, "host", late=1))
    assert found.violation is None
    assert found.ends >= {frozenset(), frozenset({0, 1, 2})}
    found = walk(System([nodes["gpu"]] * 3, "gpu", late=1), walks=200)
    assert found.violation is None
    assert frozenset({0, 1, 2}) in found.ends


def lanes_in_other_orders():
    """Two ranks launch in two lanes, and each joins another one first."""
    return [emitted(together(0, 1), "gpu"), emitted(together(1, 0), "gpu")]


def test_as_many_programs_as_lanes_have_to_fit_on_a_device():
    """Each lane has one program that waits at most; with less room the ranks wait for one another's lanes."""
    launches = mutants.changed(mutants.in_one_program, "gpu", 2)
    assert explore(System(lanes_in_other_orders(), "gpu", launches, room=2)).violation is None
    found = explore(System(lanes_in_other_orders(), "gpu", launches, room=1))
    assert (found.violation or "").startswith("nobody can go on: ")


def test_joins_that_spin_in_every_program_keep_out_what_they_wait_for():
    spinning = mutants.changed(mutants.spinning_joins, "gpu", 2)
    assert explore(System(lanes_in_other_orders(), "gpu", spinning, room=3)).violation is None
    found = explore(System(lanes_in_other_orders(), "gpu", spinning, room=2))
    assert re.search("nobody can go on: .*expand", found.violation or ""), found
