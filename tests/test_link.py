"""An emulated link: transit times that add up as documented, and results that they do not change."""

import math
import os
import signal
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import symm_a2a
from symm_a2a import Link, SymmTokenDispatcher
from symm_a2a.host_wait import HostWait
from symm_a2a.memory import Arrivals
from symm_a2a.testing import RankError, run_ranks
from tests.ranks import C, config, forward_backward, inputs, weights

FP64 = torch.float64
MICROSECOND = 1e-6
"""What a time may be rounded down by."""


@pytest.mark.parametrize(
    "value", [{"latency": -1e-3}, {"latency": math.inf}, {"latency": math.nan}, {"bandwidth": 0.0},
              {"bandwidth": -1.0}, {"bandwidth": math.nan}, {"latency": 1e9}, {"latency": "1"},
              {"latency": None}, {"bandwidth": 5e-324}, {"bandwidth": True}]
)  # fmt: skip
def test_a_link_says_what_it_cannot_be(value):
    ((name, number),) = value.items()
    with pytest.raises(symm_a2a.ConfigError, match=rf"expected {name} .* second.*, got {number!r}"):
        Link(**value)


def test_a_message_takes_its_latency_and_its_bytes():
    assert Link(latency=0.5, bandwidth=1000).seconds(2000) == 2.5
    assert Link(bandwidth=1000).seconds(0) == 0
    assert Link(latency=0.5).seconds(10**12) == 0.5
    assert Link().seconds(10**12) == 0


class World:
    """Three ranks with four channels and one clock, which stands still unless it is set."""

    def __init__(self, link):
        self.now = 1000.0
        words = [torch.zeros(4, 3, dtype=torch.int64) for _ in range(3)]
        self.ranks = [Arrivals(rank, words, link) for rank in range(3)]

    def send(self, rank, nbytes=0, channel=0, epoch=1):
        self.ranks[rank].depart(channel, epoch, nbytes)

    def arrival(self, rank, channel=0, epoch=1):
        return self.ranks[rank].time(channel, epoch)


@pytest.fixture
def world(monkeypatch):
    def make(link):
        world = World(link)
        monkeypatch.setattr("symm_a2a.memory.link.time", SimpleNamespace(monotonic=lambda: world.now))
        return world

    return make


def at(seconds):
    return pytest.approx(seconds, rel=0, abs=2 * MICROSECOND)


def test_the_last_message_counts_and_ones_own_takes_no_link(world):
    world = world(Link(latency=0.5, bandwidth=1000))
    world.send(0, 3000)
    world.send(1, 2000)
    world.send(2)
    assert [world.arrival(rank) for rank in range(3)] == [at(1002.5), at(1003.5), at(1003.5)]


def test_ones_own_rows_do_not_wait_for_a_busy_link(world):
    world = world(Link(latency=0.5, bandwidth=1000))
    world.send(0, 9000, channel=1)
    for rank in range(3):
        world.send(rank)
    assert world.arrival(0) == at(1000.5), "that of the others' messages"
    assert world.arrival(1) == at(1009.5)


@pytest.mark.parametrize("second", [0, 3], ids=["one channel", "two channels"])
def test_messages_of_a_rank_leave_one_after_another(world, second):
    world = world(Link(latency=0.5, bandwidth=1000))
    for rank in (1, 2):
        world.send(rank, channel=second, epoch=2)
    world.send(0, 2000)
    world.now += 0.25
    world.send(0, 1000, channel=second, epoch=2)
    assert world.arrival(1, second, epoch=2) == at(1000 + 2 + 1 + 0.5), "bytes one by one, one latency"


def test_an_idle_link_starts_at_once_and_each_rank_has_its_own(world):
    world = world(Link(latency=0.5, bandwidth=1000))
    world.send(0, 9000)
    world.now = 1020.0
    for rank in range(3):
        world.send(rank, 1000 * rank, channel=2)
    assert [world.arrival(rank, 2) for rank in range(3)] == [at(1022.5), at(1022.5), at(1021.5)]


def test_without_a_link_messages_arrive_when_they_are_sent(world):
    world = world(None)
    assert not world.ranks[0].emulated
    for rank in range(3):
        world.now = 1000.0 + rank
        world.send(rank, 10**12)
    world.now = 1010.0
    assert [world.arrival(rank) for rank in range(3)] == [at(1002)] * 3


def test_what_a_peer_has_not_told_may_come_now(world):
    world = world(Link(latency=5.0))
    world.send(0)
    world.send(2)
    assert world.ranks[0].known_W(0, 1).tolist() == [True, False, True]
    assert world.arrival(0) == at(1005), "a known one comes later than now"
    world.now = 1007.0
    assert world.arrival(0) == 1007
    world.send(1)
    assert world.arrival(0) == at(1012)


def test_a_word_of_the_last_epoch_or_of_another_channel_is_not_taken(world):
    world = world(Link(latency=5.0))
    for rank in range(3):
        world.send(rank, epoch=1)
        world.send(rank, channel=1, epoch=2)
    assert not world.ranks[1].known_W(0, 2).any()
    assert world.arrival(1, epoch=2) == 1000, "nothing is known but that it is not here before now"


@pytest.mark.parametrize("epoch", [1, 65534, 65535, 65536, 65537, (1 << 33) + 7])
def test_epochs_wrap_and_leave_the_time_alone(world, epoch):
    world = world(Link(latency=5.0))
    for rank in range(3):
        world.send(rank, epoch=epoch)
    known = world.ranks[1].known_W
    assert known(0, epoch).all()
    assert not known(0, epoch - 1).any()
    assert not known(0, epoch + 1).any()
    assert world.arrival(1, epoch=epoch) == at(1005)


LATENCY, BANDWIDTH = 0.15, 1e5


@contextmanager
def processor_time_in(owner, name):
    """Note what the calls of a method inside cost the processor."""
    method, spent = getattr(owner, name), []

    def noted(*given):
        before = time.process_time()
        result = method(*given)
        spent.append(time.process_time() - before)
        return result

    with mock.patch.object(owner, name, noted):
        yield spent


def timed(rank, group, dispatcher, tokens, lanes):
    """Launch dispatches, then join them; when, and what left this rank for the other.

    Returns:
        For each lane when its launch began and its join ended, its exchange, and the processor's time in
        the join's wait.
    """
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=tokens)
    ids.fill_(7 * (1 - rank))  # all to the other rank
    dist.barrier(group)
    began, joined, busy = {}, {}, {}
    with dispatcher.record() as recording:
        pending = {}
        for lane in lanes:
            began[lane] = time.monotonic()
            pending[lane] = dispatcher.dispatch_async(x, scores, ids, lane=lane)
        for lane in lanes:
            with processor_time_in(HostWait, "copies") as spent:
                pending[lane].join()
            busy[lane], joined[lane] = sum(spent), time.monotonic()
    flights = {exchange.lane: exchange for exchange in recording.timeline.exchanges}
    return {lane: (began[lane], joined[lane], flights[lane], busy[lane]) for lane in lanes}


def over_links(rank, group):
    found = {}
    cfg = config(capacity=C * 3 * 2)
    with SymmTokenDispatcher(cfg, group) as dispatcher:
        timed(rank, group, dispatcher, C, (0,))  # the first kernels of a process take their time
    with SymmTokenDispatcher(cfg, group, link=Link(latency=LATENCY)) as dispatcher:
        found["latency"] = timed(rank, group, dispatcher, 1, (0,))
    with SymmTokenDispatcher(cfg, group, link=Link(bandwidth=BANDWIDTH)) as dispatcher:
        found["small"] = timed(rank, group, dispatcher, 1, (0,))
        found["large"] = timed(rank, group, dispatcher, C, (0,))
    with SymmTokenDispatcher(cfg, group, link=Link(bandwidth=BANDWIDTH)) as dispatcher:
        found["two lanes"] = timed(rank, group, dispatcher, C, (0, 1))
    results = []
    for link in (None, Link(latency=0.01, bandwidth=1e6)):
        with SymmTokenDispatcher(config(dtype=FP64), group, link=link) as dispatcher:
            given = inputs(rank, 3, FP64, "cpu", tokens=5 + rank)
            weight = weights(rank, 2, FP64, "cpu")
            results.append([forward_backward(dispatcher, *given, weight, lane=lane) for lane in (None, 1)])
    found["equal"] = [
        torch.equal(mine, theirs)
        for with_link, without in zip(*results, strict=True)
        for mine, theirs in zip(with_link, without, strict=True)
    ]
    return found


@pytest.fixture(scope="module")
def measured():
    return run_ranks(over_links, 2)


def flights(measured, what, lane=0):
    """Each rank's launch, join, exchange and processor time, with the peer's exchange."""
    mine, theirs = ([rank[what][lane] for rank in ranks] for ranks in (measured, measured[::-1]))
    return [(*own, other[2]) for own, other in zip(mine, theirs, strict=True)]


def assert_transit(measured, what, lane, seconds_of_nbytes):
    """A message arrives so long after its launch, neither earlier nor later, and no join ends before."""
    for _, joined, exchange, _, peer in flights(measured, what, lane):
        transit = seconds_of_nbytes(peer.nbytes)
        arrival = max(peer.launch.end + transit, exchange.launch.end)
        assert peer.launch.begin + transit - MICROSECOND <= exchange.arrival <= arrival
        assert joined >= peer.launch.begin + transit - MICROSECOND


def test_a_join_sleeps_until_the_latency_is_over(measured):
    assert_transit(measured, "latency", 0, lambda nbytes: LATENCY)
    for began, joined, exchange, busy, peer in flights(measured, "latency"):
        assert joined - began >= LATENCY - max(0.0, began - peer.launch.begin) - MICROSECOND
        # How long that is depends on how soon the machine came from the launch to the join.
        assert exchange.launch.end <= exchange.join.begin == exchange.wait.begin
        assert exchange.arrival <= exchange.wait.end <= joined + MICROSECOND
        assert busy < LATENCY / 5, "asleep"


def test_more_bytes_take_longer(measured):
    for size in ("small", "large"):
        assert_transit(measured, size, 0, lambda nbytes: nbytes / BANDWIDTH)
    (small, large) = (flights(measured, size)[0][2].nbytes for size in ("small", "large"))
    assert large > 10 * small


def test_two_lanes_share_a_ranks_link(measured):
    assert_transit(measured, "two lanes", 0, lambda nbytes: nbytes / BANDWIDTH)
    for _, joined, exchange, _, peer in flights(measured, "two lanes", 1):
        (first,) = (rank["two lanes"][0][2] for rank in measured if rank["two lanes"][1][2] is peer)
        # However late the second is launched, it leaves behind the first.
        earliest = first.launch.begin + (first.nbytes + peer.nbytes) / BANDWIDTH - MICROSECOND
        free = max(first.launch.end + first.nbytes / BANDWIDTH, peer.launch.end)
        # Nor is it here before this rank has launched, which may be after that.
        assert earliest <= exchange.arrival <= max(free + peer.nbytes / BANDWIDTH, exchange.launch.end)
        assert joined >= earliest


def test_results_are_those_without_a_link(measured):
    for rank in measured:
        assert rank["equal"] == [True] * 12


def disagree(rank, group):
    with pytest.raises(symm_a2a.ConfigError) as caught:
        SymmTokenDispatcher(config(), group, link=None if rank else Link(latency=0.25))
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError) as other:
        SymmTokenDispatcher(config(), group, backend="virtual", link=Link())
    return str(caught.value), str(other.value)


def test_ranks_that_disagree_about_the_link_learn_both_values():
    for message, other in run_ranks(disagree, 2):
        assert "link=None on rank 1" in message
        assert "link=Link(latency=0.25, bandwidth=inf) on rank 0" in message
        assert "virtual" in other


@pytest.mark.parametrize("backend", [None, "virtual", "host"])
def test_a_group_of_one_has_no_link(backend):
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match=r"expected no link.*Link\(latency=0\.25"):
        SymmTokenDispatcher(config(), device="cpu", backend=backend, link=Link(latency=0.25))


def test_an_arena_brings_its_own_link():
    with (
        SymmTokenDispatcher(config(), device="cpu") as dispatcher,
        pytest.raises(symm_a2a.ConfigError, match=r"expected arena= alone, got .*link"),
    ):
        SymmTokenDispatcher(config(), arena=dispatcher.arena, link=Link())


def dies(rank, group, when, folder):
    dispatcher = SymmTokenDispatcher(config(timeout=60), group, link=Link(latency=0.5))
    arrivals = dispatcher.arena.memory.arrivals
    depart = arrivals.depart

    def end(*message):
        if when == "in transit":
            depart(*message)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        arrivals.depart = end
    began = time.monotonic()

    def exchange():
        rows, _, handle = dispatcher.dispatch(*inputs(rank, 0, torch.float32, "cpu", tokens=5))
        dispatcher.combine(rows, handle)

    with pytest.raises(symm_a2a.PeerLostError) as caught:
        exchange()
    with open(f"{folder}/report", "w") as file:
        file.write(f"{caught.value}\n{time.monotonic() - began}")


@pytest.mark.parametrize(
    ("when", "lost"), [("before it tells", "dispatch"), ("in transit", "combine")], ids=lambda value: value
)
def test_a_peer_that_dies_is_an_error_and_what_it_had_sent_still_comes(tmp_path, when, lost):
    with pytest.raises(RankError, match=r"(?s)rank 1 .*SIGKILL"):
        run_ranks(dies, 2, when, str(tmp_path), timeout=50)
    message, seconds = (tmp_path / "report").read_text().split("\n")
    assert f"in {lost}, lane 0, epoch 1, but peer 1 ended before it took part" in message
    assert float(seconds) < 10, "well before the timeout"
