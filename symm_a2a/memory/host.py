"""Ranks as processes of one machine, their arenas in shared memory.

Kernels run in Triton's interpreter and never wait: the host polls the flags, with sleep and
backoff, before it lets a kernel read what they announce. A segment never has a name: nobody can
open it by one, and nothing is left of it when its processes have ended, however they did. Peers
reach it through its owner's descriptor.
"""

from __future__ import annotations

import mmap
import os
import select
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from symm_a2a.errors import EnvironmentUnsupportedError
from symm_a2a.memory.group import exchange, require_everyone
from symm_a2a.memory.link import Arrivals, Link

_FOLDER = "/dev/shm"


class Segment(NamedTuple):
    """Where a rank's segment is found, and what tells it from any other file."""

    pid: int
    descriptor: int
    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> Segment:
        """Return where this process's descriptor leads."""
        status = os.fstat(descriptor)
        return cls(os.getpid(), descriptor, status.st_dev, status.st_ino)


def create_segment(nbytes: int) -> int:
    """Create a file in memory that has no name and that only this user can open; return its descriptor.

    The pages are taken now: a sparse file on a full file system would end the process with
    SIGBUS in the middle of a kernel.
    """
    fd = os.open(_FOLDER, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise EnvironmentUnsupportedError(
            f"expected {nbytes} bytes of room in {_FOLDER}, got {error.strerror}; enlarge it "
            "(containers: --shm-size), or use fewer tokens per rank or lanes"
        ) from error
    return fd


def open_segment(segment: Segment, nbytes: int) -> mmap.mmap:
    """Map a peer's segment, and nothing else.

    Raises:
        EnvironmentUnsupportedError: what is found there is another file, another user's, or of another size.
    """
    path = f"/proc/{segment.pid}/fd/{segment.descriptor}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise EnvironmentUnsupportedError(
            f"expected to open a peer's memory as {path}, got {error.strerror}; the ranks have to be "
            "processes of one user that see one another (containers: one PID namespace)"
        ) from error
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != segment[2:] or status.st_uid != os.geteuid():
            raise EnvironmentUnsupportedError(
                f"expected a peer's memory as {path}, got another file; are its ranks in one PID namespace?"
            )
        if status.st_size != nbytes:
            raise EnvironmentUnsupportedError(
                f"expected a peer's segment of {nbytes} bytes, got {status.st_size}"
            )
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


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
        W = dist.get_world_size(group)
        size = nbytes + channels * W * torch.int64.itemsize
        segments: list[torch.Tensor] = []
        fd, error = None, None
        try:
            try:
                fd = create_segment(size)
            except (OSError, EnvironmentUnsupportedError) as raised:
                error = raised
            require_everyone(group, error)
            assert fd is not None
            found = exchange(group, " ".join(map(str, Segment.of(fd))))
            try:
                for peer, text in enumerate(found):
                    segments.append(self._map_peer(peer, Segment(*map(int, text.split())), size))
            except (OSError, EnvironmentUnsupportedError) as raised:
                error = raised
            # Nobody's descriptor closes before everybody has mapped.
            require_everyone(group, error)
        except BaseException:
            self.close(failed=True)
            raise
        finally:
            if fd is not None:
                os.close(fd)
        self.arenas = [segment[:nbytes] for segment in segments]
        words = [segment[nbytes:].view(torch.int64).view(channels, W) for segment in segments]
        self.arrivals = Arrivals(self.rank, words, link)

    def _map_peer(self, peer: int, segment: Segment, nbytes: int) -> torch.Tensor:
        mapped = _as_tensor(open_segment(segment, nbytes))
        watch = _watch(segment.pid)
        if watch is not None:
            self._watched[peer] = watch
        return mapped

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
