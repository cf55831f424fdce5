"""The memories that ranks share, behind one protocol; the backend is chosen here alone."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from symm_a2a.errors import EnvironmentUnsupportedError
from symm_a2a.memory.base import SymmetricMemory, released_on_error
from symm_a2a.memory.group import require_agreement, require_one_machine
from symm_a2a.memory.link import Arrivals, Link
from symm_a2a.memory.virtual import VirtualMemory

Backend = Literal["cuda", "host", "virtual"]

__all__ = [
    "Arrivals",
    "Backend",
    "Link",
    "SymmetricMemory",
    "VirtualMemory",
    "choose_backend",
    "create_memory",
    "default_device",
    "released_on_error",
    "require_agreement",
    "require_device",
]


def default_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the current CUDA device; the CPU where there is none, or for a group over gloo."""
    if torch.cuda.is_available() and (group is None or dist.get_backend(group) != "gloo"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def require_device(device: torch.device | str) -> torch.device:
    """Return a device with its index, if it has one.

    Raises:
        EnvironmentUnsupportedError: it is neither a CPU nor a CUDA device, or no such device is there.
    """
    device = torch.device(device)
    if device.type not in ("cuda", "cpu"):
        raise EnvironmentUnsupportedError(f"expected a cuda or cpu device, got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentUnsupportedError(f"expected a CUDA device to be there, got none for {device}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def choose_backend(device: torch.device, world_size: int) -> tuple[Backend, str]:
    """Return the backend for a group on `device`, and the reason in words."""
    if world_size == 1:
        return "virtual", "a group of one needs no shared memory"
    if device.type == "cuda":
        return "cuda", "the ranks have CUDA devices: SymmetricMemory maps the peers"
    return "host", "the ranks are CPU processes: POSIX shared memory, kernels in Triton's interpreter"


def _require_supported(backend: str, device: torch.device, world_size: int) -> None:
    """Raise where a backend cannot work, saying why."""
    if backend not in ("cuda", "host", "virtual"):
        raise EnvironmentUnsupportedError(f'expected backend "cuda", "host" or "virtual", got {backend!r}')
    if (backend == "cuda") != (device.type == "cuda") and backend != "virtual":
        needs = "cuda" if backend == "cuda" else "cpu"
        raise EnvironmentUnsupportedError(f"backend {backend!r} expects a {needs} device, got {device}")
    if backend == "virtual" and world_size > 1:
        raise EnvironmentUnsupportedError(
            f"backend 'virtual' expects a group of one, got {world_size} ranks in processes of their own; "
            "VirtualWorld runs several ranks in one process"
        )
    if device.type == "cuda" and torch.version.hip:
        raise EnvironmentUnsupportedError(
            "the kernels compile for AMD GPUs but do not run there yet: the barrier before a flag "
            "does not drain stores on that hardware"
        )


def create_memory(
    nbytes: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    backend: Backend | None = None,
    num_lanes: int = 0,
    link: Link | None = None,
) -> SymmetricMemory:
    """Allocate and map symmetric memory over a group; collective, except for a group of one.

    Args:
        nbytes: bytes of each rank's arena.
        device: where this rank's kernels run.
        group: the ranks; None for a group of one.
        backend: `"cuda"`, `"host"` or `"virtual"`; None chooses by device and group.
        num_lanes: lanes of the arena.
        link: to emulate between processes; None for none.

    Raises:
        EnvironmentUnsupportedError: the backend cannot work here; nothing else is tried.
    """
    world_size = 1 if group is None else dist.get_world_size(group)
    chosen = backend or choose_backend(device, world_size)[0]
    _require_supported(chosen, device, world_size)
    if link is not None and (chosen != "host" or group is None):
        raise EnvironmentUnsupportedError(
            f"expected no link to emulate with backend {chosen!r} and {world_size} ranks, got {link}; only "
            'several ranks that are CPU processes have one, backend "host"'
        )
    if chosen == "virtual" or group is None:
        return VirtualMemory.world(1, nbytes, device)[0]
    require_one_machine(group)
    if chosen == "cuda":
        from symm_a2a.memory.cuda import CudaMemory

        return CudaMemory(group, nbytes, device)
    from symm_a2a.memory.host import HostMemory

    return HostMemory(group, nbytes, num_lanes, link)
