"""Construction: what ranks agree on, who has to come, and what is left of a dispatcher."""

import gc
import os
import re
import signal
import subprocess
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_a2a
from symm_a2a import SequenceGroup, SymmTokenDispatcher, baselines
from symm_a2a.check.footprint import footprint, shared_names
from symm_a2a.memory.process import Process
from symm_a2a.testing import RankError, run_ranks
from tests.ranks import config, inputs


def create_and_close(rank, group):
    descriptors = len(os.listdir("/proc/self/fd"))
    for step in range(50):
        with SymmTokenDispatcher(config(), group) as dispatcher:
            if step % 10 == 0:
                x, scores, ids = inputs(rank, step, torch.float32, "cpu")
                dispatcher.combine(
                    dispatcher.dispatch(x, scores, ids)[0], dispatcher.dispatch(x, scores, ids)[2]
                )
    gc.collect()  # The interpreter leaves cycles that hold kernel arguments.
    return len(os.listdir("/proc/self/fd")) - descriptors, footprint().mappings


def test_fifty_times_create_and_close_leave_nothing():
    assert run_ranks(create_and_close, 2) == [(0, 0)] * 2


def unnamed_while_open(rank, group):
    before = shared_names()
    with SymmTokenDispatcher(config(), group):
        dist.barrier(group)
        found = shared_names(), footprint().mappings
        dist.barrier(group)
    return found[0] == before, found[1]


def test_a_segment_never_has_a_name():
    assert run_ranks(unnamed_while_open, 2) == [(True, 2)] * 2


def disagree(rank, group):
    with pytest.raises(symm_a2a.ConfigError) as caught:
        SymmTokenDispatcher(config(num_lanes=2 + rank), group)
    return str(caught.value)


def test_ranks_that_disagree_learn_both_values():
    for message in run_ranks(disagree, 2):
        assert "num_lanes=2" in message
        assert "num_lanes=3" in message


def no_room(rank, group):
    cfg = config(max_tokens_per_rank=1 << 22, hidden_dim=8192) if rank == 1 else config()
    from symm_a2a.memory import host

    try:
        host.HostMemory(group, cfg.symmetric_bytes(2) if rank == 1 else 4096)
    except symm_a2a.EnvironmentUnsupportedError as error:
        return str(error), footprint().mappings


def test_a_rank_without_room_tells_every_rank_and_leaves_no_segment():
    for message, left in run_ranks(no_room, 2):
        assert "rank 1" in message
        assert "of room in /dev/shm" in message
        assert left == 0


def one_size_does_not_fit(rank, group):
    with pytest.raises(symm_a2a.ConfigError) as caught:
        SymmTokenDispatcher(config(num_experts=8 + rank), group)
    return str(caught.value)


def test_a_size_that_does_not_fit_one_rank_reaches_all():
    for message in run_ranks(one_size_does_not_fit, 2, timeout=60):
        assert "num_experts=8" in message
        assert "num_experts=9" in message


def over_other_groups(rank, group):
    """Ranks 0 and 1 wait for each other in different groups."""
    pair = dist.new_group([0, 1])
    SymmTokenDispatcher(config(), pair if rank == 1 else group)


def test_ranks_that_construct_over_different_groups_learn_both():
    with pytest.raises(RankError) as caught:
        run_ranks(over_other_groups, 3, timeout=60)
    texts = {failure.rank: failure.text for failure in caught.value.failures}
    assert "got rank 0 over ranks [0, 1, 2] and rank 1 over ranks [0, 1]" in texts[0]
    assert "got rank 1 over ranks [0, 1] and rank 0 over ranks [0, 1, 2]" in texts[1]


def alone_in_the_constructor(rank, group, kind):
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(
            symm_a2a.PeerTimeoutError, match="rank 0 has waited 1 s for rank 1 to construct"
        ) as caught:
            make(kind, group)
        return str(caught.value)


def make(kind, group):
    makers = {
        "symm": lambda: SymmTokenDispatcher(config(), group),
        "baseline": lambda: baselines.AllToAllTokenDispatcher(config(), group),
        "sequence": lambda: SequenceGroup(group, max_bytes=1024),
    }
    return makers[kind]()


@pytest.mark.parametrize("kind", ["symm", "baseline", "sequence"])
def test_a_rank_that_constructs_alone_is_told_who_is_missing(kind):
    assert "construction is collective" in run_ranks(alone_in_the_constructor, 2, kind)[0]


def test_a_device_that_cannot_be_is_refused_by_every_kind():
    for make_one in (SymmTokenDispatcher, baselines.AllToAllTokenDispatcher):
        with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match="cuda or cpu device, got meta"):
            make_one(config(), device="meta")
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match="cuda or cpu device, got meta"):
        SequenceGroup(device="meta")


def often_over_many_groups(rank, group):
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 1, 2])]
    for _ in range(3):
        for one in groups:
            if dist.get_rank(one) >= 0:
                SymmTokenDispatcher(config(num_experts=6), one).close()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier(group)
    return [key for key in store.list_keys() if "symm_a2a/here" in key]


def test_constructions_over_overlapping_groups_leave_few_words_in_the_store():
    (keys, *_) = run_ranks(often_over_many_groups, 3)
    assert len(keys) <= 2 * (2 + 2 + 3)


def not_a_member(rank, group):
    half = dist.new_group([0])
    if rank == 1:
        with pytest.raises(symm_a2a.ConfigError, match="member of the group") as caught:
            SymmTokenDispatcher(config(), half)
        return str(caught.value)


def test_a_rank_outside_the_group_is_told():
    assert run_ranks(not_a_member, 2)[1]


def killed_in_the_constructor(rank, group):
    from symm_a2a.memory import host

    if rank == 0:
        host.require_everyone = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    SymmTokenDispatcher(config(num_experts=6), group)


def killed_before_the_next(rank, group):
    SymmTokenDispatcher(config(num_experts=6), group).close()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    SymmTokenDispatcher(config(num_experts=6), group)


@pytest.mark.parametrize("where", [killed_in_the_constructor, killed_before_the_next])
def test_a_rank_killed_around_a_construction_is_named_to_the_others_and_leaves_nothing(where):
    before = shared_names()
    with pytest.raises(RankError) as caught:
        run_ranks(where, 3, timeout=60, patience=10)
    texts = {failure.rank: failure.text.strip().splitlines() for failure in caught.value.failures}
    assert "SIGKILL" in texts[0][0]
    for rank in (1, 2):
        assert re.match(r"symm_a2a\.errors\.PeerLostError: .*process of rank 0(, [12])? has", texts[rank][-1])
    assert shared_names() <= before


def of_another_machine(process):
    return process._replace(boot="another")


def of_another_container(process):
    return process._replace(namespace=1)


@pytest.mark.parametrize(
    ("where", "ended"), [(None, True), (of_another_machine, False), (of_another_container, False)]
)
def test_only_a_process_that_can_be_seen_has_ended(where, ended):
    sleeper = subprocess.Popen(["sleep", "60"])
    with mock.patch("os.getpid", return_value=sleeper.pid):
        process = Process.this()
    seen = where(process) if where else process
    assert Process.parse(process.text) == process
    assert not process.has_ended
    later = process._replace(started=process.started + 1)
    assert later.has_ended
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert seen.has_ended == ended, "a zombie"
    sleeper.wait()
    assert seen.has_ended == ended


def failed_and_forgotten(rank, group, how):
    """A rank throws while an exchange with gradients is in flight; what the others catch keeps nothing."""
    before = footprint().mappings
    try:
        train(rank, group, how)
    except (ZeroDivisionError, symm_a2a.PeerLostError) as error:
        kind = type(error).__name__
    gc.collect()
    return kind, footprint().mappings - before


def train(rank, group, how):
    dispatcher = SymmTokenDispatcher(config(), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    rows, _, handle = dispatcher.dispatch_async(x.requires_grad_(), scores, ids).join()
    pending = dispatcher.combine_async(rows * 2, handle)
    out = pending.join() if how == "backward" else None
    if rank == 1:
        if how == "closed":
            dispatcher.close()
        raise ZeroDivisionError("a bug of the caller's")
    if out is None:
        out = pending.join()
    (out.sum() + dispatcher.dispatch(x, scores, ids)[0].sum()).backward()


@pytest.mark.parametrize("how", ["closed", "collected", "backward"])
def test_nothing_is_left_of_a_failed_exchange_whose_error_was_caught(how):
    assert run_ranks(failed_and_forgotten, 2, how) == [("PeerLostError", 0), ("ZeroDivisionError", 0)]


def fails_behind_the_memory(rank, group, kind):
    where = "symm_a2a.arena.Lane" if kind == "symm" else "symm_a2a.ulysses.group.SequenceLane"
    if rank == 1:
        try:
            with mock.patch(where, side_effect=ZeroDivisionError):
                make(kind, group)
        except ZeroDivisionError as error:
            return type(error).__name__, footprint().mappings
    made = make(kind, group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=4)
    begin = time.monotonic()
    with pytest.raises(symm_a2a.PeerLostError) as caught:
        made.dispatch(x, scores, ids) if kind == "symm" else symm_a2a.seq_to_head(x[None, :, :4, None], made)
    return caught.type.__name__, time.monotonic() - begin < 5


@pytest.mark.parametrize("kind", ["symm", "sequence"])
def test_a_constructor_that_fails_behind_its_memory_gives_it_back_and_tells_the_peers(kind):
    assert run_ranks(fails_behind_the_memory, 2, kind) == [("PeerLostError", True), ("ZeroDivisionError", 0)]


def closed_before_its_graph(rank, group, kind):
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    x.requires_grad_()
    with make(kind, group) as made:
        if kind == "sequence":
            out = symm_a2a.seq_to_head(x[None, :4, :4, None], made)
        else:
            rows, _, handle = made.dispatch_async(x, scores, ids).join()
            out = made.combine_async(rows, handle).join()
    gc.collect()
    left = footprint().mappings
    with pytest.raises(symm_a2a.ClosedError):
        out.sum().backward()
    return left


@pytest.mark.parametrize("kind", ["symm", "sequence"])
def test_a_graph_that_outlives_its_dispatcher_keeps_no_memory(kind):
    assert run_ranks(closed_before_its_graph, 2, kind) == [0, 0]
