"""Ranks that disagree, skip, come late or end: an error on every rank, in bounded time, and no hang."""

import gc
import os
import signal
import time
import weakref

import pytest
import torch
import torch.distributed as dist

import symm_a2a
from symm_a2a import SequenceGroup, head_to_seq, seq_to_head
from symm_a2a.kernels.ulysses import Kind, Sizes
from symm_a2a.testing import RankError, run_ranks
from symm_a2a.ulysses.lane import SequenceLane
from tests.ranks import wait_as_on_a_gpu

X = torch.ones(2, 2, 4, 3)
LONGEST = 15.0
"""Seconds; far less than the timeout of what is to be noticed at once."""


def error_of(call):
    """What a call raises: its kind, its words, and the seconds until then."""
    began = time.monotonic()
    with pytest.raises(symm_a2a.SymmA2AError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began


def disagree(rank, group, timeout=60):
    """Rank 1 brings something else, in one thing after another; each time with a new group."""
    errors = []
    for other in (
        torch.ones(2, 3, 4, 3), torch.ones(1, 2, 4, 3), torch.ones(2, 2, 8, 3), torch.ones(2, 2, 4, 5),
        X.double(), torch.ones(2, 0, 4, 3),
    ):  # fmt: skip
        with SequenceGroup(group, max_bytes=4096, timeout=timeout) as ours:
            x = other if rank == 1 else X
            first = error_of(lambda x=x, ours=ours: seq_to_head(x, ours))
            again = error_of(lambda ours=ours: seq_to_head(X, ours))
            assert first[:2] == again[:2]
            errors.append(first)
    return errors


OTHERS = ["(2, 3, 4, 3)", "(1, 2, 4, 3)", "(2, 2, 8, 3)", "(2, 2, 4, 5)", "torch.float64", "(2, 0, 4, 3)"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_disagree_all_raise_at_once(ranks):
    # Three ranks, for which the heads do not divide: each is refused alone, and the others wait for it.
    reports = run_ranks(disagree if ranks == 2 else disagree_in_heads, ranks)
    for rank, errors in enumerate(reports):
        for (kind, message, seconds), other in zip(errors, OTHERS if ranks == 2 else ["got 4"], strict=True):
            assert seconds < LONGEST
            if ranks == 2:
                assert kind == "ExchangeMismatchError"
                assert other in message
                assert "(2, 2, 4, 3) torch.float32" in message
                assert f"on rank {rank} and" in message
            elif rank == 1:
                assert (kind, other in message) == ("InputError", True)
            else:
                assert kind == "PeerLostError"
                assert "peer 1 gave up before it took part" in message


def disagree_in_heads(rank, group):
    """Only rank 1's heads do not divide; it leaves its group because of that."""

    def run():
        with SequenceGroup(group, max_bytes=4096) as ours:
            seq_to_head(torch.ones(2, 2, 4 if rank == 1 else 6, 3), ours)

    return [error_of(run)]


def test_ranks_that_disagree_where_kernels_wait():
    for rank, errors in enumerate(run_ranks(disagree_waiting, 2)):
        for kind, message, seconds in errors:
            assert kind == "ExchangeMismatchError"
            assert f"on rank {rank} and" in message
            assert seconds < LONGEST


def disagree_waiting(rank, group):
    wait_as_on_a_gpu()
    return disagree(rank, group)


def disagree_over_a_process_group(rank, group):
    """At the first exchange; in who needs more memory; and again after it was closed."""
    errors = [error_of(lambda: seq_to_head(X[:, : 1 + rank], group))]
    seq_to_head(X, group)
    large = torch.ones(1, 2, 4, 1 << 16)
    errors.append(error_of(lambda: seq_to_head(large if rank == 1 else X, group)))
    SequenceGroup.of(group).close()
    out = seq_to_head(X, group)
    SequenceGroup.of(group).close()
    return errors, out.sum().item()


def test_ranks_that_disagree_about_a_process_groups_memory():
    for errors, total in run_ranks(disagree_over_a_process_group, 2):
        (first, text, _), (second, growth, seconds) = errors
        assert first == "ConfigError"
        assert "(2, 1, 4, 3) torch.float32 on rank 0 and" in text
        assert "(2, 2, 4, 3) torch.float32 on rank 1" in text
        assert second == "ExchangeMismatchError"
        assert "growth for an exchange of (1, 2, 4, 65536) torch.float32" in growth
        assert "seq_to_head of (2, 2, 4, 3) torch.float32" in growth
        assert seconds < LONGEST
        assert total == X.numel()


def skips(rank, group, how):
    """Rank 1 leaves an exchange out; the next one tells, or the timeout does."""
    ours = SequenceGroup(group, max_bytes=4096, timeout=1.0)
    x = X.clone().requires_grad_()

    def run():
        if rank == 1 and how == "no_grad":
            with torch.no_grad():
                seq_to_head(x, ours)
        elif rank == 1 and how == "backward":
            seq_to_head(x, ours)
        elif rank == 0 or how != "exchange":
            seq_to_head(x, ours).sum().backward()
        head_to_seq(torch.ones(2, 4, 2, 3), ours)
        if how == "end" and rank == 1:
            return
        seq_to_head(x, ours)

    if how == "end" and rank == 1:
        run()
        result = None
    else:
        result = error_of(run)
    dist.barrier(group)
    ours.close()
    return result


@pytest.mark.parametrize("how", ["no_grad", "backward", "exchange", "end"])
def test_a_rank_that_skips_is_named(how):
    mine, other = run_ranks(skips, 2, how)
    kind, message, seconds = mine
    assert seconds < LONGEST
    if how == "end":
        assert kind == "PeerTimeoutError"
        assert message.startswith(
            "rank 0 waited for its peers in exchange number 4, seq_to_head of (2, 2, 4, 3) torch.float32, "
            "but peer 1 did not take part within 1 s"
        )
        assert other is None
    elif how == "exchange":
        # Rank 1 goes on with head_to_seq while rank 0 is in seq_to_head.
        assert {kind, other[0]} == {"ExchangeMismatchError"}
        assert "head_to_seq of (2, 4, 2, 3) torch.float32 on rank 1" in message
    else:
        # Both are in a head_to_seq, a backward's and a forward's, and part after that.
        assert {kind, other[0]} == {"ExchangeMismatchError"}
        assert "seq_to_head of (2, 2, 4, 3) torch.float32 on rank 1" in message
    assert "every rank must run every exchange" in message


def killed(rank, group, folder):
    ours = SequenceGroup(group, max_bytes=4096)
    seq_to_head(X, ours)
    dist.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kind, message, seconds = error_of(lambda: [seq_to_head(X, ours) for _ in range(2)])
    ours.close()
    with open(f"{folder}/{rank}", "w") as file:
        file.write(f"{kind}\n{message}\n{seconds}")


def test_a_killed_rank_is_named(tmp_path):
    with pytest.raises(RankError):
        run_ranks(killed, 2, str(tmp_path))
    kind, message, seconds = (tmp_path / "0").read_text().split("\n")
    assert kind == "PeerLostError"
    assert "exchange number 2, seq_to_head of (2, 2, 4, 3) torch.float32, but peer 1 ended" in message
    assert float(seconds) < LONGEST


def dropped(rank, group):
    """Rank 1 forgets its group, which nobody closed."""
    ours = SequenceGroup(group, max_bytes=4096)
    seq_to_head(X, ours)
    if rank == 1:
        del ours
        dist.barrier(group)
        return None
    dist.barrier(group)
    return error_of(lambda: seq_to_head(X, ours))


def test_a_group_that_is_forgotten_tells_its_peers():
    (kind, message, seconds), _ = run_ranks(dropped, 2)
    assert (kind, "peer 1 gave up" in message) == ("PeerLostError", True)
    assert seconds < LONGEST


def test_a_forgotten_groups_backward_says_so():
    group = SequenceGroup(device="cpu")
    out = seq_to_head(X.clone().requires_grad_(), group)
    del group
    with pytest.raises(symm_a2a.ClosedError, match="expected an open SequenceGroup"):
        out.sum().backward()


class Activation:
    """What a caller holds in a frame that an error passes through."""


def fails_in_a_frame(call):
    held = Activation()
    seen = weakref.ref(held)
    try:
        call()
    except symm_a2a.ExchangeError:
        return seen
    raise AssertionError("expected an exchange without a peer to fail")


def left_alone(rank, group):
    ours = SequenceGroup(group, max_bytes=4096, timeout=0.5)
    if rank == 1:
        ours.close()
        return []
    kept = [fails_in_a_frame(lambda: seq_to_head(X, ours)) for _ in range(2)]
    gc.collect()
    return [seen() for seen in kept]


def test_a_failed_group_keeps_nothing_of_the_frames_its_errors_passed_through():
    assert run_ranks(left_alone, 2) == [[None, None], []]
    lane, _ = SequenceLane.world(2, max_bytes=4096, device=torch.device("cpu"))
    sizes = Sizes.of(Kind.SEQ_TO_HEAD, X.shape, X.dtype, 2, 1)
    lane.launch(Kind.SEQ_TO_HEAD, X, sizes)
    kept = [fails_in_a_frame(lambda: lane.join(Kind.SEQ_TO_HEAD, X, sizes)) for _ in range(2)]
    gc.collect()
    assert [seen() for seen in kept] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(max_bytes=0), "expected max_bytes to be a positive int or None, got 0"),
        (dict(max_bytes=2.5), "expected max_bytes to be a positive int or None, got 2.5"),
        (dict(max_bytes=True), "expected max_bytes to be a positive int or None, got True"),
        (dict(timeout=0), "expected timeout to be a positive number of seconds, got 0"),
        (dict(timeout=float("inf")), "expected timeout to be a positive number of seconds, got inf"),
    ],
)
def test_groups_that_cannot_be(arguments, text):
    with pytest.raises(symm_a2a.ConfigError) as caught:
        SequenceGroup(**arguments)
    assert str(caught.value) == text


def differ(rank, group):
    return error_of(lambda: SequenceGroup(group, max_bytes=4096 + rank))


def test_groups_that_differ_in_size():
    for kind, message, _ in run_ranks(differ, 2):
        assert kind == "ConfigError"
        assert "max_bytes=4096 " in message
        assert "max_bytes=4097 " in message
