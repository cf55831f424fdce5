"""Ranks as processes of one machine, their arenas in POSIX shared memory.

Kernels run in Triton's interpreter and never wait: the host polls the flags, with sleep and
backoff, before it lets a kernel read what they announce. A segment has a name only until
every peer has mapped it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist

from symm_a2a.errors import EnvironmentUnsupportedError
from symm_a2a.memory.group import exchange, require_everyone
from symm_a2a.memory.link import Arrivals, Link

_FOLDER = "/dev/shm"


def _draw_path() -> str:
    return f"{_FOLDER}/symm_a2a-{os.getpid()}-{secrets.token_hex(16)}"


def _create_segment(path: str, nbytes: int) -> int:
    """Create a segment that only this user can open; return its descriptor.

    The pages are taken now: a sparse file on a full file system would end the process with
    SIGBUS in the middle of a kernel.
    """
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        os.unlink(path)
        raise EnvironmentUnsupportedError(
            f"expected {nbytes} bytes of room in {_FOLDER}, got {error.strerror}; enlarge it "
            "(containers: --shm-size), or use fewer tokens per rank or lanes"
        ) from error
    return fd


def _unlink(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _map_segment(fd: int, nbytes: int) -> mmap.mmap:
    if os.fstat(fd).st_size != nbytes:
        raise EnvironmentUnsupportedError(
            f"expected a peer's segment of {nbytes} bytes, got {os.fstat(fd).st_size}"
        )
    return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def _as_tensor(segment: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(segment, dtype=torch.uint8)


def _watch(pid: int) -> int | None:
    """Return a descriptor that is readable once the process has ended; None on old kernels."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


class HostMemory:
    """Shared memory between the processes of a group; see `SymmetricMemory`.

    Args:
        group: the ranks, processes of one machine; all of them call this.
        nbytes: bytes of each rank's arena.
        num_lanes: lanes, each with two channels of `Arrivals`.
        link: to emulate; None for none.

    Raises:
        EnvironmentUnsupportedError: a segment could not be made or mapped, on any rank.
    """

    backend = "host"
    host_waits = True
    spins = False

    def __init__(
        self, group: dist.ProcessGroup, nbytes: int, num_lanes: int = 0, link: Link | None = None
    ) -> None:
        self.rank = dist.get_rank(group)
        self.device = torch.device("cpu")
        self.arenas: list[torch.Tensor] = []
        self.arrivals: Arrivals | None = None
        self._watched: dict[int, int] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._watched)
        channels = 2 * num_lanes
        arrivals_bytes = channels * dist.get_world_size(group) * torch.int64.itemsize
        segments: list[torch.Tensor] = []
        # Every rank knows every name before there is a segment: whoever is left can clean up.
        peers = [m.rsplit("|", 1) for m in exchange(group, f"{_draw_path()}|{os.getpid()}")]
        error = None
        try:
            try:
                os.close(_create_segment(peers[self.rank][0], nbytes + arrivals_bytes))
            except (OSError, EnvironmentUnsupportedError) as raised:
                error = raised
            require_everyone(group, error)
            try:
                for peer, (path, pid) in enumerate(peers):
                    segments.append(self._map_peer(peer, path, int(pid), nbytes + arrivals_bytes))
            except (OSError, EnvironmentUnsupportedError) as raised:
                error = raised
            # Nobody unlinks before everybody has mapped.
            require_everyone(group, error)
        except BaseException:
            self.close(failed=True)
            _unlink(path for path, _ in peers)
            raise
        _unlink([peers[self.rank][0]])
        self.arenas = [segment[:nbytes] for segment in segments]
        words = [segment[nbytes:].view(torch.int64).view(channels, len(peers)) for segment in segments]
        self.arrivals = Arrivals(self.rank, words, link)

    def _map_peer(self, peer: int, path: str, pid: int, nbytes: int) -> torch.Tensor:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            segment = _as_tensor(_map_segment(fd, nbytes))
        finally:
            os.close(fd)
        watch = _watch(pid)
        if watch is not None:
            self._watched[peer] = watch
        return segment

    def lost_peers(self) -> list[int]:
        """Return the ranks whose process has ended: their descriptors are readable then."""
        poller = select.poll()
        for fd in self._watched.values():
            poller.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poller.poll(0)}
        return [rank for rank, fd in self._watched.items() if fd in ended]

    def close(self, *, failed: bool) -> None:
        """Unmap; peers keep their own mappings, so nobody needs to be waited for.

        The mapping itself ends with the last tensor that views it.
        """
        del failed
        self.arenas.clear()
        self.arrivals = None
        self._finalizer()
