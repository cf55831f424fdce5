"""What a backend gives: one arena a rank, every peer's arena mapped, and news of the dead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from symm_a2a.layout import Region
from symm_a2a.memory.link import Arrivals


class SymmetricMemory(Protocol):
    """One rank's share of a symmetric allocation.

    Attributes:
        backend: `"cuda"`, `"host"` or `"virtual"`.
        rank: this rank.
        device: where the kernels run.
        arenas: one uint8 view a rank, in rank order, mapped in this process; all zeros, or at
            least zero where flags lie, when the constructor returns.
        host_waits: the host polls flags before a kernel reads them; kernels never wait.
        spins: a launch kernel ends only when every peer's copies have arrived.
    """

    backend: str
    rank: int
    device: torch.device
    arenas: list[torch.Tensor]
    host_waits: bool
    spins: bool

    @property
    def arrivals(self) -> Arrivals | None:
        """When messages arrive, where the senders can say so; else None."""
        ...

    def lost_peers(self) -> list[int]:
        """Return the ranks whose process is known to have ended."""
        ...

    def close(self, *, failed: bool) -> None:
        """Unmap every arena.

        Args:
            failed: an exchange has failed: peers are not waited for, they may be gone.
        """
        ...


@contextlib.contextmanager
def released_on_error(memory: SymmetricMemory, abort: Region) -> Iterator[None]:
    """Give memory back where what is inside fails, and tell the peers, who have constructed theirs.

    Args:
        memory: this rank's.
        abort: the abort words in it.
    """
    try:
        yield
    except BaseException:
        # What went wrong may keep this from working as well.
        with contextlib.suppress(Exception):
            for arena in memory.arenas:
                abort.view(arena, 0)[memory.rank] = 1
            memory.close(failed=True)
        raise
