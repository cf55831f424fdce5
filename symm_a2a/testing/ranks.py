"""Run a function as the ranks of a process group, on this machine, and get its results or its errors.

    def double(rank, group, value):
        total = torch.tensor(value)
        torch.distributed.all_reduce(total, group=group)
        return total.item()

    run_ranks(double, 2, 21)  # [42, 42]

Ranks are forked from a server that has imported torch and this package already (multiprocessing's
forkserver), so that four start in a fraction of a second; only the first call of a process waits for
those imports. Ranks with a GPU start as new interpreters. What a rank gives or gets passes through a
pipe as pickled bytes, never through shared memory, and the rendezvous is a store inside the caller, on
a loopback port that the system picks: whoever dies, nothing stays behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from symm_a2a.errors import EnvironmentUnsupportedError, InputError, PeerLostError
from symm_a2a.testing.failures import RankError, RankFailure

Result = TypeVar("Result")

GRACE = 2.0
"""Seconds that the other ranks get, after the first failure, to fail or finish by themselves."""

TEARDOWN = 15.0
"""Seconds that ranks get to leave their process group, once all have returned."""

_DEATH_NOTICED_LATE = 1.0
"""Seconds: a rank's death closes its sockets first, and its peers' errors can arrive before it does."""

# torch imports the last where it is first needed, which takes longer than all the rest of a small run.
_PRELOAD = ("torch", "torch.distributed", "numpy", "symm_a2a", "symm_a2a.testing", "torch._dynamo")


def run_ranks(
    fn: Callable[..., Result],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    device: str = "cpu",
    patience: float = GRACE,
) -> list[Result]:
    """Call `fn(rank, group, *args)` in `world_size` processes that form a process group.

    The processes see the caller's environment variables and `sys.path`, but not what it changed in its
    modules. torch runs with one thread in each. No process is left when this returns or raises, also
    when it is interrupted; ranks die with a killed caller.

    Args:
        fn: a function that can be imported: defined at the top of a module.
        world_size: how many ranks.
        *args: given to every rank; they must pickle, as must the results. A tensor's whole storage
            travels, and a CUDA tensor makes the caller use CUDA: return `tensor.cpu()`.
        timeout: seconds for all of it.
        device: `"cpu"`, a gloo group; `"cuda"`, an NCCL group and one GPU per rank, made current; or
            `"cuda:0"`, any index, a gloo group and one GPU for all ranks, which take turns on it: right,
            and slow.
        patience: seconds that the other ranks get, after the first failure, to fail or finish by themselves.

    Returns:
        What `fn` returned, in rank order.

    Raises:
        InputError: `fn` or its arguments do not pickle, or a size, timeout or device that cannot be.
        RankError: a rank raised, died, did not finish in time, or returned something that does not
            pickle. The message has all of their tracebacks, or where they were.
    """
    if world_size < 1:
        raise InputError(f"expected at least 1 rank, got {world_size}")
    if device not in ("cpu", "cuda") and not _shared(device):
        raise InputError(f'expected device "cpu", "cuda" or "cuda:INDEX", got {device!r}')
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, (int, float))
        or not 0 < timeout < threading.TIMEOUT_MAX
    ):
        raise InputError(f"expected timeout to be a positive number of seconds, got {timeout!r}")
    deadline = time.monotonic() + timeout
    try:
        call = pickle.dumps((fn, args))
    except Exception as error:
        raise InputError(f"expected a function and arguments that pickle, got {fn!r}: {error}") from error

    context = _context(device)
    # On a port of the system's choice; it closes with the caller, however that ends.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    setup = _Setup(world_size, device, store.port, timeout, dict(os.environ))
    ranks = [_Rank(context, number, setup, call) for number in range(world_size)]
    try:
        for rank in ranks:
            rank.start()
        _collect(ranks, deadline, f"had not finished after {timeout:g} s", patience)
        results = [rank.result() for rank in ranks]
        for rank in ranks:
            rank.release()
        until = time.monotonic() + TEARDOWN
        _collect(ranks, until, f"returned, but did not leave its process group within {TEARDOWN:g} s", GRACE)
        for rank in ranks:
            rank.process.join(until - time.monotonic())
        return results
    finally:
        for rank in ranks:
            rank.end()


@dataclass(frozen=True)
class _Setup:
    """What every rank of a run is told."""

    world_size: int
    device: str
    port: int
    timeout: float
    environ: dict[str, str]


@dataclass(frozen=True)
class _Report:
    """What a rank says twice, of its function and of leaving its group: a pickled result, or a text.

    `when` is the system's monotonic clock, which the processes share. `peer`: it failed because another rank
    did, which may be busy with its own report still.
    """

    when: float
    failure: bool
    payload: bytes
    peer: bool = False


class _Rank:
    """The caller's end of one rank process."""

    def __init__(self, context: Any, number: int, setup: _Setup, call: bytes) -> None:
        self.number = number
        self.world_size = setup.world_size
        self.report: _Report | None = None
        self.pipe, self._far_pipe = context.Pipe()
        self._stacks, self._far_stacks = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_run_rank,
            args=(number, setup, call, self._far_pipe, self._far_stacks),
            name=f"symm_a2a-rank-{number}",
        )

    def start(self) -> None:
        self.process.start()
        # With these open here, a rank's death would not end its pipes.
        self._far_pipe.close()
        self._far_stacks.close()

    def poll(self) -> None:
        """Take the rank's report if it has made one, or make one for it if it has died."""
        try:
            if self.pipe.poll():
                self.report = pickle.loads(self.pipe.recv_bytes())
            elif not self.process.is_alive() and not self.pipe.poll():
                self.report = self._death()
        except (EOFError, OSError):
            self.report = self._death()

    def _death(self) -> _Report:
        self.process.join(GRACE)
        code = self.process.exitcode
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            with contextlib.suppress(ValueError):
                code = f"{code} ({signal.Signals(-code).name})"
            how = f"died by signal, exit code {code}"
        else:
            how = f"ended with exit code {code}"
        when = time.monotonic() - _DEATH_NOTICED_LATE
        return _Report(when, True, f"{how} before it reported\n{self._read_stacks(0.0)}".encode())

    def ask_where(self) -> None:
        """Make the rank write its threads' stacks, whatever it is doing."""
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR1)

    def overdue(self, what: str) -> None:
        """Make a report for a rank that has been asked where it is."""
        self.report = _Report(
            time.monotonic(), True, f"{what}, and was killed; it was at\n{self._read_stacks(GRACE)}".encode()
        )

    def _read_stacks(self, patience: float) -> str:
        """Return what faulthandler has written; wait so long for it to begin, and not long for more."""
        text = b""
        while wait([self._stacks], patience):
            chunk = os.read(self._stacks.fileno(), 1 << 16)
            if not chunk:
                break
            text += chunk
            patience = 0.2
        threads = text.decode(errors="replace").split("\n\n")
        threads = [thread for thread in threads if _end_with_caller.__name__ not in thread]
        return "\n\n".join(threads) or "(no stack to show)\n"

    def result(self) -> Any:
        """Return what the function returned."""
        assert self.report is not None
        try:
            return pickle.loads(self.report.payload)
        except Exception as error:
            text = f"returned a result that does not unpickle here\n{traceback.format_exc()}"
            raise RankError(self.world_size, (RankFailure(self.number, text),)) from error

    def release(self) -> None:
        """Let the rank leave its group: the others are done with it."""
        self.report = None
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"")

    def end(self) -> None:
        """Make sure the process is gone and everything of it closed."""
        # None: it was never started, or the start was interrupted. Then it cannot reach its rendezvous
        # or report, both of which close here, and ends by itself.
        if self.process.pid is not None:
            if self.process.is_alive():
                self.process.kill()
            self.process.join()
            self.process.close()
        for pipe in (self.pipe, self._far_pipe, self._stacks, self._far_stacks):
            pipe.close()


def _collect(ranks: list[_Rank], deadline: float, overdue: str, patience: float) -> None:
    """Wait until every rank has reported.

    Args:
        ranks: started, without a report.
        deadline: of the monotonic clock.
        overdue: what to say of ranks that miss it.
        patience: seconds for the others, once a rank has failed.

    Raises:
        RankError: a rank failed or missed the deadline; the others had time to follow.
    """
    while missing := [rank for rank in ranks if rank.report is None]:
        failed = any(rank.report and rank.report.failure for rank in ranks)
        if failed and deadline > time.monotonic() + patience:
            deadline = time.monotonic() + patience
            overdue = f"had not finished {patience:g} s after the first failure"
        watched = [end for rank in missing for end in (rank.pipe, rank.process.sentinel)]
        if not wait(watched, max(0.0, deadline - time.monotonic())):
            for rank in missing:
                rank.ask_where()
            for rank in missing:
                rank.overdue(overdue)
        else:
            for rank in missing:
                rank.poll()
    failures = sorted(
        (r.report.peer, r.report.when, r.number, r.report) for r in ranks if r.report and r.report.failure
    )
    if failures:
        raise RankError(
            len(ranks),
            tuple(RankFailure(number, report.payload.decode()) for _, _, number, report in failures),
        )


def _shared(device: str) -> bool:
    """Whether the device is a GPU by its index, for all ranks."""
    return device.startswith("cuda:") and device[5:].isdecimal()


def _context(device: str) -> Any:
    """Return the multiprocessing context to start ranks with."""
    # A process that has so much as asked whether there is a GPU, as imports do, has no children that can
    # use one. And what the server's modules read at their import is settled.
    if device != "cpu" or os.environ.get("TRITON_INTERPRET") != _server_settings():
        return multiprocessing.get_context("spawn")
    # Ranks import the caller's main module again, which is pytest's own under `python -m pytest`.
    forkserver.set_forkserver_preload([*_PRELOAD, *(["pytest"] if "pytest" in sys.modules else [])])
    # The server inherits that interrupts are held back: one from the terminal would end its imports with
    # a traceback. The tracker, which it starts as well, would let them through again.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return multiprocessing.get_context("forkserver")


@functools.cache
def _server_settings() -> str | None:
    """Return the variable that kernels read at their import, as it was when the fork server started."""
    return os.environ.get("TRITON_INTERPRET")


def _run_rank(number: int, setup: _Setup, call: bytes, pipe: Connection, stacks: Connection) -> None:
    """Be a rank: run the function, report, wait to be released, leave the group, report again."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    # An interrupt from the terminal reaches the caller too, which ends its ranks. One that was held back
    # so far, see `_context`, is dropped.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable(stacks.fileno())
    faulthandler.register(signal.SIGUSR1, stacks.fileno())
    os.environ.clear()
    os.environ.update(setup.environ)
    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads(call)
        result = fn(number, _join_group(number, setup), *args)
        try:
            payload = pickle.dumps(result)
        except Exception as error:
            kind = type(result).__name__
            raise InputError(f"expected a result that pickles, got {kind}: {error}") from error
    except BaseException as error:
        _fail(pipe, error)
    _send(pipe, False, payload)
    # A rank that left now would close its connections on peers that still use them. An end of file
    # is a release as well: the caller has gone.
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        _fail(pipe, error)
    _send(pipe, False, b"")


def _send(pipe: Connection, failure: bool, payload: bytes, *, peer: bool = False) -> None:
    # The caller may have gone, or given up.
    with contextlib.suppress(OSError):
        pipe.send_bytes(pickle.dumps(_Report(time.monotonic(), failure, payload, peer)))


def _fail(pipe: Connection, error: BaseException) -> NoReturn:
    """Report an exception, and end at once: peers are to notice."""
    text = "".join(traceback.format_exception(error))
    _send(pipe, True, text.encode(errors="replace"), peer=isinstance(error, PeerLostError))
    os._exit(1)


def _join_group(number: int, setup: _Setup) -> dist.ProcessGroup:
    """Return the group of all ranks, over the store that the caller keeps."""
    # Longer than the caller waits, which says more about who hangs, and where.
    patience = timedelta(seconds=setup.timeout + 30)
    store = dist.TCPStore("127.0.0.1", setup.port, is_master=False, timeout=patience)
    ours: dict[str, Any] = dict(store=store, rank=number, world_size=setup.world_size, timeout=patience)
    if setup.device == "cuda":
        if torch.cuda.device_count() < setup.world_size:
            raise EnvironmentUnsupportedError(
                f"expected a GPU per rank, got {torch.cuda.device_count()} GPUs for {setup.world_size} ranks"
            )
        torch.cuda.set_device(number)
        dist.init_process_group("nccl", device_id=torch.device("cuda", number), **ours)
    else:
        if _shared(setup.device):
            # NCCL refuses two ranks on one GPU, and SymmetricMemory does unless it is told.
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            torch.cuda.set_device(setup.device)
        if sys.platform == "linux":
            # gloo looks the host's name up otherwise, and not every machine knows its own.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", **ours)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _end_with_caller() -> None:
    """End this process when the caller ends, however that happened: it was to wait for this one."""
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
        os._exit(1)
