"""All ranks in one process on one device: property tests, gradient checks, groups of one.

Nothing waits: every rank launches before any rank joins. A kernel that finds a flag missing
reports it at once.
"""

from __future__ import annotations

import torch


class VirtualMemory:
    """One rank's view of arenas that all belong to this process; see `SymmetricMemory`."""

    backend = "virtual"
    host_waits = False
    spins = False
    arrivals = None

    def __init__(self, rank: int, arenas: list[torch.Tensor]) -> None:
        self.rank = rank
        self.device = arenas[rank].device
        self.arenas = list(arenas)

    @classmethod
    def world(cls, world_size: int, nbytes: int, device: torch.device) -> list[VirtualMemory]:
        """Allocate `world_size` arenas of `nbytes` bytes; return each rank's view of them."""
        arenas = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(world_size)]
        return [cls(rank, arenas) for rank in range(world_size)]

    def lost_peers(self) -> list[int]:
        """Return no rank: they all live in this process."""
        return []

    def close(self, *, failed: bool) -> None:
        """Drop this rank's view."""
        del failed
        if self.device.type == "cuda":
            # Kernels may still read the memory, and write their reports.
            torch.cuda.synchronize(self.device)
        self.arenas.clear()
