"""Peers that end, come late, or do something else."""

import functools
import gc
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import symm_a2a
from symm_a2a import SymmTokenDispatcher, exchange
from symm_a2a.testing import RankError, run_ranks
from tests.domino_blocks import IDS, SCORES, X, carrier
from tests.ranks import config, inputs, wait_as_on_a_gpu

__all__ = ["carrier"]


def killed_peer(rank, group):
    dispatcher = SymmTokenDispatcher(config(), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    rows, _, handle = dispatcher.dispatch(x, scores, ids, lane=1)
    dist.barrier(group)
    if rank == 2:
        pid = os.fork()
        if pid == 0:  # A child that maps the same memory must not keep the rank alive.
            time.sleep(30)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    errors = []
    for _ in range(2):
        try:
            dispatcher.combine(rows, handle)
        except symm_a2a.PeerLostError as error:
            errors.append(str(error))
    dispatcher.close()
    return errors, time.monotonic() - began


def test_a_killed_rank_ends_the_others_with_an_error_that_names_it(tmp_path):
    with pytest.raises(RankError, match="2"):
        run_ranks(killed_peer_recorded, 4, str(tmp_path))
    reports = sorted(tmp_path.iterdir())
    assert [r.name for r in reports] == ["0", "1", "3"]
    for report in reports:
        first, second, seconds = report.read_text().split("\n")
        assert "waited for" in first
        assert "combine, lane 1, epoch 1" in first
        assert "peer 2" in first or "gave up" in first
        assert second == first, "the dispatcher refuses further work with the same error"
        assert float(seconds) < 10, "well before the timeout: the peer's end is seen"


def killed_peer_recorded(rank, group, folder):
    errors, seconds = killed_peer(rank, group)
    with open(f"{folder}/{rank}", "w") as file:
        file.write("\n".join([*errors, str(seconds)]))


def late_peer(rank, group):
    dispatcher = SymmTokenDispatcher(config(timeout=0.5), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    message = None
    if rank == 0:
        try:
            dispatcher.dispatch(x, scores, ids)
        except symm_a2a.PeerTimeoutError as error:
            message = str(error)
    dist.barrier(group)
    if rank == 1:
        try:
            dispatcher.dispatch(x, scores, ids)
            dispatcher.dispatch(x, scores, ids)
        except symm_a2a.PeerLostError as error:
            message = str(error)
    dist.barrier(group)
    dispatcher.close()
    return message


def test_a_late_peer_is_named_and_learns_that_it_was_given_up():
    late, gone = run_ranks(late_peer, 2)
    assert late.startswith(
        "rank 0 waited for its counts in dispatch, lane 0, epoch 1, but peer 1 did not take part within 0.5 s"
    )
    assert "Every rank must run every exchange" in late
    # What rank 0 had sent is still good; what it will not send is not waited for.
    assert gone.endswith("but peer 0 gave up before it took part; its own error says why")


def fails_in_its_own_code(rank, group):
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    began = time.monotonic()
    try:
        with SymmTokenDispatcher(config(), group) as dispatcher:
            rows, _, handle = dispatcher.dispatch(x, scores, ids)
            if rank == 1:
                raise ZeroDivisionError("a bug of the caller's")
            dispatcher.combine(rows, handle)
    except (ZeroDivisionError, symm_a2a.PeerLostError) as error:
        return type(error).__name__, str(error), time.monotonic() - began


def test_an_exception_on_one_rank_ends_the_others_at_once():
    (lost, message, seconds), (own, _, _) = run_ranks(fails_in_its_own_code, 2)
    assert (lost, own) == ("PeerLostError", "ZeroDivisionError")
    assert "in combine, lane 0, epoch 1, but peer 1 gave up before it took part" in message
    assert message.endswith("its own error says why")
    assert seconds < 10, "well before the timeout"


def closes_while_in_flight(rank, group):
    dispatcher = SymmTokenDispatcher(config(timeout=60), group)
    pending = dispatcher.dispatch_async(*inputs(rank, 0, torch.float32, "cpu", tokens=4))
    dist.barrier(group)
    if rank == 1:
        return dispatcher.close()
    rows, _, handle = pending.join()
    begin = time.monotonic()
    with pytest.raises(symm_a2a.PeerLostError, match="peer 1 gave up before it took part"):
        dispatcher.combine(rows, handle)
    return time.monotonic() - begin


def test_closing_with_an_exchange_in_flight_ends_the_others_at_once():
    """What this rank never joins it also never combines, and the others need not time out to learn it."""
    assert run_ranks(closes_while_in_flight, 2, timeout=30)[0] < 10


def skips_its_backward(rank, group, how):
    dispatcher = SymmTokenDispatcher(config(), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    alone = rank == 1
    try:
        for _ in range(2):
            with torch.set_grad_enabled(not (alone and how == "no_grad")):
                rows, _, handle = dispatcher.dispatch(x, scores, ids)
                out = dispatcher.combine(rows, handle)
            if not alone:
                out.sum().backward()
            elif how == "ignored output":
                (rows.sum() * 0 + handle.token.sum()).backward()
    except symm_a2a.ExchangeError as error:
        return type(error).__name__, str(error)
    finally:
        dispatcher.close()


@pytest.mark.parametrize("how", ["skipped", "no_grad"])
def test_a_rank_without_a_backward_is_told_and_so_are_its_peers(how):
    results = run_ranks(skips_its_backward, 4, how)
    for rank, (kind, message) in enumerate(results):
        assert kind == "ExchangeMismatchError", (rank, message)
        assert "combine backward" in message
        assert "dispatch" in message
        mine = "dispatch" if rank == 1 else "combine backward"
        assert message.endswith("breaks that order")
        assert f"while rank {rank} runs {mine}" in message


def kernel_gives_up(rank, group):
    wait_as_on_a_gpu()
    dispatcher = SymmTokenDispatcher(config(timeout=0.002, capacity=40), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    message = None
    if rank == 0:
        try:
            dispatcher.dispatch(x, scores, ids)
        except symm_a2a.PeerTimeoutError as error:
            message = str(error)
    dist.barrier(group)
    dispatcher.close()
    return message


def test_a_kernel_stops_waiting_and_names_the_peer():
    message, _ = run_ranks(kernel_gives_up, 2)
    assert message.startswith("rank 0 waited for its copies in dispatch, lane 0, epoch 1, but peer 1 did not")


def kernels_give_up_in_time(rank, group, what):
    """As long as the timeout says, by looks that have been timed: by those assumed it were minutes."""
    wait_as_on_a_gpu()
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    seconds = None
    if what == "dispatch":
        dispatcher = SymmTokenDispatcher(config(timeout=3, capacity=40), group)
        dispatcher.warmup()
        wait = functools.partial(dispatcher.dispatch, x, scores, ids)
    else:
        dispatcher = symm_a2a.SequenceGroup(group, max_bytes=1 << 12, timeout=3)
        wait = functools.partial(symm_a2a.seq_to_head, torch.zeros(1, 2, 2, 2), dispatcher)
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(symm_a2a.PeerTimeoutError, match=r"peer 1 did not .* within about 3 s"):
            wait()
        seconds = time.monotonic() - begin
        if what == "dispatch":
            with pytest.raises(symm_a2a.PeerTimeoutError, match="peer 1 did not"):
                dispatcher.check()
    dist.barrier(group)
    dispatcher.close()
    return seconds


@pytest.mark.parametrize("what", ["dispatch", "sequence"])
def test_a_wait_in_a_kernel_is_as_long_as_the_timeout(what):
    seconds, _ = run_ranks(kernels_give_up_in_time, 2, what)
    assert 0.6 < seconds < 20


def test_check_raises_what_kernels_have_reported_and_nobody_has_asked_for(carrier):
    carrier.check()
    for lane in carrier.arena.lanes[:1]:
        # A launch that forgets the credit, as a graph that is replayed in another order would.
        for _ in range(2):
            lane._last_launch = None
            exchange.launch_dispatch(lane, X, SCORES, IDS, 4, 1)
            lane._in_flight = None
    with pytest.raises(symm_a2a.ExchangeError, match="word that the last exchange was taken"):
        carrier.check()
    with pytest.raises(symm_a2a.ExchangeError, match="word that the last exchange was taken"):
        carrier.dispatch(X, SCORES, IDS)


def interrupted_while_it_waits(rank, group):
    dispatcher = SymmTokenDispatcher(config(timeout=60), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    rows, _, handle = dispatcher.dispatch(x, scores, ids)
    begin = time.monotonic()
    if rank == 1:
        time.sleep(1)
        # What rank 0 had sent is still good; what it will not send is not waited for.
        dispatcher.combine(rows, handle)
        with pytest.raises(symm_a2a.PeerLostError, match="peer 0 gave up"):
            dispatcher.dispatch(x, scores, ids)
        return time.monotonic() - begin
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        dispatcher.combine(rows, handle)
    seconds = time.monotonic() - begin
    with pytest.raises(symm_a2a.LaneBusyError, match="the lane is lost: close the dispatcher"):
        dispatcher.combine(rows, handle)
    dispatcher.close()
    return seconds


def test_an_interrupt_ends_a_wait():
    """At once, where it came; and for the peer, when that rank closes its dispatcher."""
    interrupted, told = run_ranks(interrupted_while_it_waits, 2, timeout=50)
    assert 0.2 < interrupted < 10
    assert told < 10


def closed_in_flight(rank, group, when):
    dispatcher = SymmTokenDispatcher(config(), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    pending = dispatcher.dispatch_async(x.requires_grad_(), scores, ids)
    if when != "dispatch":
        rows, _, handle = pending.join()
        pending = dispatcher.combine_async(rows, handle)
    if when == "backward":
        out = pending.join()
    dist.barrier(group)
    dispatcher.close()
    gc.collect()
    try:
        out.sum().backward() if when == "backward" else pending.join()
    except symm_a2a.ClosedError:
        return True


@pytest.mark.parametrize("when", ["dispatch", "combine", "backward"])
def test_what_is_in_flight_at_close_is_an_error_not_a_crash(when):
    assert run_ranks(closed_in_flight, 2, when) == [True, True]


def forked_child_leaves(rank, group, how):
    dispatcher = SymmTokenDispatcher(config(), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    dispatcher.dispatch(x, scores, ids)
    if rank == 0:
        pid = os.fork()
        if pid == 0:
            if how == "collected":
                del dispatcher
                gc.collect()
            else:
                dispatcher._close(failed=True)
            os._exit(0)
        os.waitpid(pid, 0)
    dist.barrier(group)
    assert dispatcher.arena.lanes[0].channel.abort_W.tolist() == [0, 0]
    rows, _, handle = dispatcher.dispatch(x, scores, ids)
    dispatcher.combine(rows, handle)
    dispatcher.close()
    return True


@pytest.mark.parametrize("how", ["collected", "failed"])
def test_a_forked_child_does_not_speak_for_its_parent(how):
    assert run_ranks(forked_child_leaves, 2, how) == [True, True]


def kernels_disagree(rank, group, first, second):
    """One rank runs `first` and the other `second`; kernels wait, as on a GPU."""
    wait_as_on_a_gpu()
    dispatcher = SymmTokenDispatcher(config(timeout=0.01, capacity=40), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    rows, _, handle = dispatcher.dispatch(x, scores, ids)
    run = {
        "combine": lambda: dispatcher.combine(rows, handle),
        "barrier": lambda: dispatcher.barrier(),
        "counts": lambda: dispatcher.broadcast_counts(ids),
        "dispatch": lambda: dispatcher.dispatch(x, scores, ids),
    }[second if rank else first]
    dist.barrier(group)
    try:
        run()
        dispatcher.stats()
    except symm_a2a.ExchangeError as error:
        dist.barrier(group)
        dispatcher.close()
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("first", "second"), [("barrier", "combine"), ("counts", "barrier"), ("dispatch", "counts")]
)
def test_kernels_that_wait_for_different_operations_say_so(first, second):
    """In the other direction too, where a kernel sees no more than that nobody comes."""
    messages = run_ranks(kernels_disagree, 2, first, second)
    named = [m for m in messages if m.startswith("ExchangeMismatchError: expected every rank to run ")]
    assert named
    assert all(first in message and second in message for message in named)
    # The other rank may have been told to give up before it looked for itself.
    for message in set(messages) - set(named):
        assert "gave up before it took part; its own error says why" in message
