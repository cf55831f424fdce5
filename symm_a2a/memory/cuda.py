"""Ranks as processes with a GPU each, their arenas in PyTorch's SymmetricMemory."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from symm_a2a.errors import EnvironmentUnsupportedError
from symm_a2a.memory.group import require_everyone

_log = logging.getLogger(__name__)


class CudaMemory:
    """GPU memory that every peer of the group has mapped; see `SymmetricMemory`.

    Args:
        group: the ranks, one GPU each, all reachable as peers; all of them call this.
        nbytes: bytes of each rank's arena.
        device: this rank's GPU.

    Raises:
        EnvironmentUnsupportedError: the build, the GPUs or the driver cannot map peers.
    """

    backend = "cuda"
    host_waits = False
    spins = True
    arrivals = None

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self.rank = dist.get_rank(group)
        self.device = device
        self.arenas: list[torch.Tensor] = []
        self._group = group
        arena, handle, error = None, None, None
        try:
            with torch.cuda.device(device):
                arena = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as raised:
            error = raised
        require_everyone(group, error)
        assert arena is not None
        try:
            handle = symm_mem.rendezvous(arena, group=group)
            self.arenas = [
                handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(dist.get_world_size(group))
            ]
        except RuntimeError as raised:
            error = raised
        require_everyone(group, error)
        if handle is None:
            raise EnvironmentUnsupportedError("SymmetricMemory gave no rendezvous handle for the group")
        self._handle, self._arena = handle, arena
        # Flags start as zeros everywhere before anyone may raise one.
        arena.zero_()
        torch.cuda.synchronize(device)
        _meet(group, device)

    def lost_peers(self) -> list[int]:
        """Return no rank: a GPU peer that ended shows as a wait that ran out."""
        return []

    def close(self, *, failed: bool) -> None:
        """Wait until no peer can write here any more, then unmap.

        Args:
            failed: do not wait for peers; their mappings keep the memory alive.
        """
        if not self.arenas:
            return
        torch.cuda.synchronize(self.device)
        if failed:
            _log.warning("closing symmetric memory after a failure, without waiting for the peers")
        else:
            _meet(self._group, self.device)
        self.arenas.clear()
        self._handle, self._arena = None, None


def _meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait for every rank of the group."""
    # Only NCCL takes a device, and guesses one where it is given none.
    dist.barrier(group, device_ids=[device.index] if dist.get_backend(group) == "nccl" else None)
