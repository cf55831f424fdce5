"""Micro-batches that are misused or fail: the error names what is wrong, nobody is left waiting."""

import re
import time

import pytest
import torch

from symm_a2a import Domino, SymmTokenDispatcher
from symm_a2a.errors import (
    ClosedError,
    ExchangeError,
    InputError,
    JoinedTwiceError,
    LaneBusyError,
    ScheduleError,
)
from symm_a2a.testing import run_ranks
from tests.domino_blocks import IDS, SCORES, X, carrier, launch, right
from tests.ranks import config, inputs

__all__ = ["carrier"]


def test_another_number_of_micro_batches_is_refused_before_anything_runs(carrier):
    for given in ([], [1], [1, 2, 3]):
        with pytest.raises(InputError, match=f"expected 2 micro-batches, got {len(given)}"):
            Domino(carrier, 2).run(lambda _: right(carrier), given)
    assert len(Domino(carrier, 2).run(lambda _: right(carrier), [1, 2])) == 2


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "2", None])
def test_a_number_of_micro_batches_that_is_none(carrier, number):
    with pytest.raises(InputError, match=f"positive int, got {number!r}"):
        Domino(carrier, number)


def yields_nothing(carrier):
    yield


def yields_a_tensor(carrier):
    yield torch.ones(1)


def yields_text(carrier):
    yield "has a join of its own"


def yields_what_a_join_gave(carrier):
    yield launch(carrier).join()


def yields_two_at_once(carrier):
    yield launch(carrier, lane=0), launch(carrier, lane=1)


def names_another_lane(carrier):
    yield launch(carrier, lane=1 - carrier.arena.lane_in_turn)


def launches_twice(carrier):
    launch(carrier)
    yield launch(carrier)


def ends_in_flight(carrier):
    rows, _, handle = yield launch(carrier)
    carrier.combine_async(rows, handle)


def yields_what_it_has_joined(carrier):
    pending = launch(carrier)
    pending.join()
    yield pending


def yields_the_same_twice(carrier):
    pending = launch(carrier)
    yield pending
    yield pending


def runs_domino_inside(carrier):
    rows, _, handle = yield launch(carrier)
    Domino(carrier, 1).run(lambda _: right(carrier), [0])
    yield carrier.combine_async(rows, handle)


def is_no_generator(carrier):
    return X


MISUSES = [
    (yields_nothing, ScheduleError, "to yield what dispatch_async or combine_async returns, got NoneType"),
    (yields_a_tensor, ScheduleError, "got Tensor"),
    (yields_text, ScheduleError, "got str"),
    (yields_what_a_join_gave, ScheduleError, "got tuple"),
    (yields_two_at_once, ScheduleError, "got tuple"),
    (names_another_lane, ScheduleError, "name no lane in a block"),
    (launches_twice, LaneBusyError, "expected lane . to be idle"),
    (ends_in_flight, ScheduleError, "got its end with one in flight in lane"),
    (yields_what_it_has_joined, JoinedTwiceError, "joined before"),
    (yields_the_same_twice, JoinedTwiceError, "joined before"),
    (runs_domino_inside, LaneBusyError, "expected lane . to be idle"),
    (is_no_generator, InputError, "expected the block to be a generator .* returned Tensor"),
]


@pytest.mark.parametrize(("misuse", "kind", "message"), MISUSES, ids=[m[0].__name__ for m in MISUSES])
def test_a_misuse_in_the_first_micro_batch(carrier, misuse, kind, message):
    with pytest.raises(kind, match=message) as caught:
        Domino(carrier, 2).run(lambda wrong: (misuse if wrong else right)(carrier), [True, False])
    assert type(caught.value) is kind
    refuses(carrier, kind)


LAST = [misuse for misuse in MISUSES if misuse[0] in (yields_nothing, launches_twice, is_no_generator)]


@pytest.mark.parametrize(("misuse", "kind", "message"), LAST, ids=[m[0].__name__ for m in LAST])
def test_a_misuse_in_the_last_micro_batch_closes_the_first(carrier, misuse, kind, message):
    closed = []

    def block(wrong):
        return misuse(carrier) if wrong else watched(right(carrier), closed)

    with pytest.raises(kind, match=message) as caught:
        Domino(carrier, 2).run(block, [False, True])
    # The error keeps its frames, and these the generators: nothing else has closed them.
    assert closed == [True], caught.value
    refuses(carrier, kind)


def watched(steps, closed):
    try:
        return (yield from steps)
    finally:
        closed.append(True)


def refuses(carrier, kind):
    """The failed dispatcher says why it does nothing any more, and closes."""
    with pytest.raises(ExchangeError, match=f"a micro-batch has failed before: {kind.__name__}: "):
        carrier.dispatch(X, SCORES, IDS)
    with pytest.raises(ExchangeError, match="a micro-batch has failed before"):
        Domino(carrier, 1).run(lambda _: right(carrier), [0])
    carrier.close()
    with pytest.raises(ClosedError):
        carrier.dispatch(X, SCORES, IDS)


def test_a_run_beside_an_exchange_in_flight_is_refused_and_the_exchange_is_not_lost(carrier):
    pending = launch(carrier, lane=1)
    with pytest.raises(LaneBusyError, match="expected lane 1 to be idle"):
        Domino(carrier, 2).run(lambda _: right(carrier), [0, 1])
    rows, _, handle = pending.join()
    assert torch.equal(carrier.combine(rows, handle), X * 0.5)


def test_a_closed_dispatcher_runs_nothing(carrier):
    carrier.close()
    with pytest.raises(ClosedError):
        Domino(carrier, 2).run(lambda _: right(carrier), [0, 1])


class OwnError(Exception):
    """What a block of the caller's raises."""


PLACES = ["before its first launch", "between its exchanges", "after its last join"]


def fail_everywhere(rank, group):
    """A dispatcher for each place where a micro-batch may fail on the last rank; what each rank saw."""
    return {(i, place): fail_once(rank, group, i, place) for i in (0, 1) for place in PLACES}


def fail_once(rank, group, index, place):
    own, closed, failing = (
        OwnError("of the caller's"),
        [],
        rank == torch.distributed.get_world_size(group) - 1,
    )
    # Experts for two ranks and for three.
    dispatcher = SymmTokenDispatcher(config(timeout=60, num_experts=6), group)
    given = [inputs(rank, step, torch.float32, "cpu", tokens=3) for step in range(2)]
    given = [(x, scores, ids.clamp(max=5)) for x, scores, ids in given]

    def block(number):
        def here(now):
            if failing and (number, now) == (index, place):
                raise own

        try:
            here(PLACES[0])
            rows, _, handle = yield dispatcher.dispatch_async(*given[number])
            here(PLACES[1])
            out = yield dispatcher.combine_async(rows, handle)
            here(PLACES[2])
            return out
        finally:
            closed.append(number)

    begin = time.monotonic()
    with pytest.raises((OwnError, ExchangeError)) as caught:
        torch.cat(Domino(dispatcher, 2).run(block, [0, 1])).sum().backward()
    seconds = time.monotonic() - begin
    # While the error is there its frames are, and with them whatever generator was not closed.
    ran_to_their_end = sorted(closed)
    with pytest.raises(ExchangeError) as again:
        dispatcher.dispatch(*given[0])
    dispatcher.close()
    kind = "its own" if caught.value is own else type(caught.value).__name__
    return kind, str(caught.value), ran_to_their_end, str(again.value), seconds


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def failures(request):
    return run_ranks(fail_everywhere, request.param)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("index", [0, 1])
def test_a_failing_micro_batch_ends_every_rank_at_once(failures, index, place):
    *others, failed = (reports[index, place] for reports in failures)
    kind, _, closed, again, _ = failed
    assert kind == "its own"
    assert closed == ([0] if (index, place) == (0, PLACES[0]) else [0, 1])
    assert again == "a micro-batch has failed before: OwnError: of the caller's"
    for kind, message, closed, again, seconds in others:
        assert kind == "PeerLostError"
        assert culprit(message, others) == len(others)
        assert closed == [0, 1]
        assert again == message
        assert seconds < 10, "well before the timeout"


def culprit(message, others):
    """The rank that failed by itself, also where a rank names one that it had made give up before."""
    named = re.search(r"but peer ([\d, ]+) gave up before it took part", message).group(1)
    ranks = [int(rank) for rank in named.split(", ")]
    return ranks[-1] if ranks[-1] == len(others) else culprit(others[ranks[-1]][1], others)


def step(dispatcher, micro_batches, spoil=None):
    """Forward and backward over routed inputs."""

    def block(number, x, scores, ids):
        rows, _, handle = yield dispatcher.dispatch_async(x.requires_grad_(), scores, ids)
        if number == spoil:
            rows.register_hook(fail)
        return (yield dispatcher.combine_async(rows.tanh(), handle))

    given = [(number, *routed) for number, routed in enumerate(micro_batches)]
    torch.cat(Domino(dispatcher, len(given)).run(block, given)).sum().backward()


def fail(grad):
    raise OwnError


def step_and_leave(rank, group, timeout, micro_batches, spoil=None):
    """Take a step that cannot end well; the error, its message, and the seconds it took."""
    given = [inputs(rank, number, torch.float32, "cpu", tokens=3) for number in range(micro_batches)]
    begin = time.monotonic()
    try:
        with SymmTokenDispatcher(config(timeout=timeout), group) as dispatcher:
            step(dispatcher, given, spoil)
    except (OwnError, ExchangeError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin


def disagree(rank, group, numbers):
    return step_and_leave(rank, group, 1, numbers[rank])


@pytest.mark.parametrize("numbers", [(1, 2), (2, 3)])
def test_ranks_that_disagree_on_the_number_of_micro_batches_do_not_hang(numbers):
    for kind, message, seconds in run_ranks(disagree, 2, numbers, timeout=60):
        assert kind in ("PeerTimeoutError", "PeerLostError", "ExchangeMismatchError"), message
        assert seconds < 15


def fails_backward(rank, group, number):
    return step_and_leave(rank, group, 60, 2, number if rank == 1 else None)


@pytest.mark.parametrize("number", [0, 1])
def test_an_exception_in_the_backward_ends_the_others_at_once(number):
    (lost, message, seconds), (own, _, _) = run_ranks(fails_backward, 2, number)
    assert (lost, own) == ("PeerLostError", "OwnError")
    assert "backward" in message
    assert "but peer 1 gave up before it took part" in message
    assert seconds < 10, "well before the timeout"


def test_what_a_clean_up_raises_hides_no_error_and_keeps_no_generator_open(carrier):
    closed = []

    def block(number):
        try:
            rows, _, handle = yield launch(carrier)
            if number == 1:
                raise ZeroDivisionError("the reason")
            yield carrier.combine_async(rows, handle)
        finally:
            closed.append(number)
            if number == 0:
                raise KeyError("in a clean-up")

    with pytest.raises(ZeroDivisionError, match="the reason"):
        Domino(carrier, 2).run(block, [0, 1])
    assert sorted(closed) == [0, 1]


def test_a_parameter_that_a_block_returns_stays_the_parameter(carrier):
    parameter = torch.ones(2, requires_grad=True)

    def block(_):
        yield from right(carrier)
        return parameter

    assert Domino(carrier, 1).run(block, [0])[0] is parameter
