"""`run_ranks`: results in order, every failure told, nothing left running."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from symm_a2a.check.footprint import shared_names
from symm_a2a.errors import InputError, PeerLostError, SymmA2AError
from symm_a2a.testing import RankError, run_ranks

FOREVER = 1000.0


def alive(pid):
    """Whether a process runs; one that nobody has reaped yet does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition, seconds=60.0):
    """Wait for a condition, and return whether it came true."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def note_pid(folder, rank):
    """Leave this process's id where the test finds it; a rename, so that none is read half written."""
    (folder / f"{rank}.part").write_text(str(os.getpid()))
    (folder / f"{rank}.part").rename(folder / f"{rank}.pid")


def noted_pids(folder):
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


def sum_of_ranks(rank, group, value):
    total = torch.tensor(value * (rank + 1))
    dist.all_reduce(total, group=group)
    return rank, total.item(), dist.get_world_size(group), torch.get_num_threads(), os.getpid()


def test_results_come_in_rank_order_from_a_group_of_processes():
    results = run_ranks(sum_of_ranks, 3, 7)
    assert [result[:4] for result in results] == [(rank, 42, 3, 1) for rank in range(3)]
    pids = {result[4] for result in results}
    assert len(pids | {os.getpid()}) == 4
    assert not any(alive(pid) for pid in pids)


def test_four_ranks_start_fast():
    run_ranks(sum_of_ranks, 1, 1)
    times = []
    for _ in range(3):
        start = time.monotonic()
        run_ranks(sum_of_ranks, 4, 1)
        times.append(time.monotonic() - start)
    # About 0.15 s; 3 s and more where each rank imports torch.
    assert min(times) < 1.0, times


def tensors(rank, group, x, view):
    x += rank
    return x, view, os.environ.get("SYMM_A2A_TEST"), shared_names()


def test_tensors_travel_by_value_and_environment_variables_come_along(monkeypatch):
    monkeypatch.setenv("SYMM_A2A_TEST", "seen")
    before = shared_names()
    x = torch.arange(300_000.0)  # Far more than a pipe holds.
    results = run_ranks(tensors, 2, x, x.view(2, -1)[1])
    for rank, (y, view, variable, shared) in enumerate(results):
        torch.testing.assert_close(y, torch.arange(300_000.0) + rank, rtol=0, atol=0)
        assert torch.equal(view, torch.arange(150_000.0, 300_000.0))
        assert variable == "seen"
        assert shared == before
        assert not y.is_shared()
    assert torch.equal(x, torch.arange(300_000.0))
    assert shared_names() == before


def environment_at_start(rank, group):
    variables = Path("/proc/self/environ").read_text().split("\0")
    return [text for text in variables if text.startswith("TRITON_INTERPRET=")], "symm_a2a" in sys.modules


def test_what_modules_read_at_import_is_what_the_caller_set_last(monkeypatch):
    run_ranks(environment_at_start, 1)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    ((variables, imported),) = run_ranks(environment_at_start, 1)
    assert variables == ["TRITON_INTERPRET=0"]
    assert imported


def fail_on_one(rank, group, folder):
    note_pid(folder, rank)
    if rank == 1:
        assert wait_until(lambda: len(noted_pids(folder)) == 3)
        raise ValueError("rank one's own words")
    if rank == 2:
        time.sleep(FOREVER)
    dist.barrier(group)


def test_a_failure_is_told_with_its_traceback_and_the_others_follow(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on_one, 3, tmp_path)
    assert time.monotonic() - start < 60
    failures = {failure.rank: failure.text for failure in caught.value.failures}
    assert caught.value.failures[0].rank == 1
    assert "ValueError: rank one's own words" in failures[1]
    assert "in fail_on_one" in failures[1]
    assert "in barrier" in failures[0]
    assert "after the first failure" in failures[2]
    assert "in fail_on_one" in failures[2]
    assert all(text.rstrip() in str(caught.value) for text in failures.values())
    assert isinstance(caught.value, (SymmA2AError, RuntimeError))
    assert len(noted_pids(tmp_path)) == 3
    assert not any(alive(pid) for pid in noted_pids(tmp_path))


def lose_a_peer(rank, group):
    if rank == 0:
        raise PeerLostError("peer 1 gave up before it took part; its own error says why")
    time.sleep(0.3)
    raise ValueError("rank one's own words")


def test_who_lost_a_peer_is_told_after_that_peer():
    with pytest.raises(RankError) as caught:
        run_ranks(lose_a_peer, 2)
    assert [failure.rank for failure in caught.value.failures] == [1, 0]


def hang_on_one(rank, group, folder):
    note_pid(folder, rank)
    if rank == 1:
        time.sleep(FOREVER)


def test_a_timeout_says_which_ranks_and_where_they_were(tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(hang_on_one, 2, tmp_path, timeout=3.0)
    (failure,) = caught.value.failures
    assert failure.rank == 1
    assert "had not finished after 3 s" in failure.text
    assert "in hang_on_one" in failure.text
    assert "_end_with_caller" not in failure.text
    assert len(noted_pids(tmp_path)) == 2
    assert not any(alive(pid) for pid in noted_pids(tmp_path))


def end_one(rank, group, how):
    dist.barrier(group)  # A rank that joins late would fail in joining.
    if rank == 0:
        if how == "exit":
            os._exit(0)
        if how == "raise exit":
            raise SystemExit(3)
        os.kill(os.getpid(), signal.Signals[how])
    dist.barrier(group)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("SIGKILL", "SIGKILL"),
        ("SIGSEGV", "in end_one"),
        ("exit", "ended with exit code 0 before it reported"),
        ("raise exit", "SystemExit: 3"),
    ],
)
def test_a_rank_that_ends_is_the_first_failure(how, text):
    with pytest.raises(RankError) as caught:
        run_ranks(end_one, 2, how)
    assert [failure.rank for failure in caught.value.failures] == [0, 1]
    assert text in caught.value.failures[0].text
    assert "in barrier" in caught.value.failures[1].text


def stop_one(rank, group):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_stopped_rank_cannot_say_where_it_is_and_is_killed():
    with pytest.raises(RankError, match="no stack to show"):
        run_ranks(stop_one, 1, timeout=2.0)


class UnspeakableError(Exception):
    """An exception with nothing that pickles, and no text."""

    def __init__(self):
        super().__init__(lambda: None)

    def __str__(self):
        raise RuntimeError("no text")


def raise_unspeakable(rank, group):
    raise UnspeakableError


def return_function(rank, group):
    return lambda: None


class OnlyThere:
    """Pickles in a rank, and does not unpickle in the caller."""

    def __reduce__(self):
        return only_in_rank, (os.getpid(),)


def only_in_rank(pid):
    if pid != os.getpid():
        raise ValueError("another process")


def return_only_there(rank, group):
    return OnlyThere()


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (raise_unspeakable, "UnspeakableError"),
        (return_function, "expected a result that pickles, got function"),
        (return_only_there, "ValueError: another process"),
    ],
)
def test_what_does_not_pickle_is_said(fn, text):
    with pytest.raises(RankError, match=text):
        run_ranks(fn, 1)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((lambda rank, group: None, 1), {}), ((stop_one, 0), {}), ((stop_one, 1), {"device": "tpu"})],
)
def test_arguments_that_cannot_be(args, kwargs):
    with pytest.raises(InputError, match="expected"):
        run_ranks(*args, **kwargs)


def test_a_rank_error_survives_pickling():
    with pytest.raises(RankError) as caught:
        run_ranks(return_function, 1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.failures == caught.value.failures


def leave_early(rank, group, folder):
    note_pid(folder, rank)
    if rank == 1:
        assert wait_until(lambda: len(noted_pids(folder)) == 2)
        return wait_until(lambda: not alive(noted_pids(folder)[0]), seconds=0.5)


def test_a_rank_that_is_done_stays_until_all_are(tmp_path):
    assert run_ranks(leave_early, 2, tmp_path) == [None, False]


def note_and_hang(rank, group, folder):
    note_pid(folder, rank)
    time.sleep(FOREVER)


CALLER = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_testing import note_and_hang
from symm_a2a.testing import run_ranks
if __name__ == "__main__":
    run_ranks(note_and_hang, 2, Path({folder!r}))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_caller_leaves_no_rank(tmp_path, how):
    here = Path(__file__).parent
    script = tmp_path / "caller.py"
    script.write_text(CALLER.format(paths=[str(here), str(here.parent)], folder=str(tmp_path)))
    caller = subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True)
    try:
        assert wait_until(lambda: len(noted_pids(tmp_path)) == 2 or caller.poll() is not None)
        pids = noted_pids(tmp_path)
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        caller.send_signal(how)
        errors = caller.communicate(timeout=60)[1]
    finally:
        caller.kill()
        caller.wait()
    assert caller.returncode == -how
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def server_of(caller):
    """Return the pid of a caller's fork server once it imports torch, or None."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_server = "multiprocessing.forkserver" in (folder / "cmdline").read_text()
            if parent == caller and is_server and "libtorch" in (folder / "maps").read_text():
                return int(folder.name)
    return None


def test_an_interrupt_from_the_terminal_is_the_callers_while_the_server_starts(tmp_path):
    here = Path(__file__).parent
    script = tmp_path / "caller.py"
    script.write_text(CALLER.format(paths=[str(here), str(here.parent)], folder=str(tmp_path)))
    caller = subprocess.Popen(
        [sys.executable, script], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert wait_until(lambda: server_of(caller.pid) or caller.poll() is not None)
        server = server_of(caller.pid)
        assert server is not None
        assert noted_pids(tmp_path) == []
        os.killpg(caller.pid, signal.SIGINT)
        errors = caller.communicate(timeout=60)[1]
    finally:
        caller.kill()
        caller.wait()
    assert caller.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1, errors
    assert wait_until(lambda: not alive(server))
    assert noted_pids(tmp_path) == []


def interrupt_oneself(rank, group):
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    return ignored, blocked


def test_a_rank_ignores_interrupts_and_may_choose_not_to():
    assert run_ranks(interrupt_oneself, 1) == [(True, set())]
