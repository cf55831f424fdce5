"""What this machine and this installation can do, as data: for a bug report, or a log at start-up.

Nothing is allocated, no group is formed, and nothing here raises: what cannot be found out is None,
with an entry in `problems` where that matters.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy
import torch
import triton

from symm_a2a.kernels.blocks import INTERPRETED
from symm_a2a.memory import choose_backend
from symm_a2a.version import __version__

Value = TypeVar("Value")

_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Gpu:
    """One visible GPU.

    Attributes:
        name: as the driver calls it.
        memory_bytes: all of its memory.
        capability: such as `"9.0"`.
    """

    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class SymmetricMemorySupport:
    """What PyTorch's SymmetricMemory offers in this build; only backend `"cuda"` needs it.

    Attributes:
        importable: whether `torch.distributed._symmetric_memory` imports.
        cuda_backend: the allocator that CUDA tensors would get, None where there is none.
        nvshmem: whether the build has NVSHMEM and finds it; not needed here.
        multicast: whether the first GPU supports multicast; not needed here.
    """

    importable: bool
    cuda_backend: str | None
    nvshmem: bool | None
    multicast: bool | None


@dataclass(frozen=True)
class Environment:
    """All that `python -m symm_a2a` reports.

    Attributes:
        versions: of this package, what it runs on, and what torch was built for; None where absent.
        platform: system and machine.
        cpus: that this process may run on.
        gpus: visible to this process.
        peer_access: `[i][j]`: whether GPU i can address GPU j's memory; None without GPUs.
        symmetric_memory: what PyTorch's SymmetricMemory offers.
        kernels: `"compiled"` or `"interpreted"`.
        kernels_reason: why.
        group_size: of the group that the next two are about: one rank a GPU, or two on CPUs.
        backend: that such a group would get.
        backend_reason: why.
        shm_free_bytes: room where backend `"host"` makes its segments; None without that folder.
        shm_total_bytes: the size of it.
        problems: what will not work here, in words.
    """

    versions: dict[str, str | None]
    platform: str
    cpus: int
    gpus: list[Gpu]
    peer_access: list[list[bool]] | None
    symmetric_memory: SymmetricMemorySupport
    kernels: str
    kernels_reason: str
    group_size: int
    backend: str
    backend_reason: str
    shm_free_bytes: int | None
    shm_total_bytes: int | None
    problems: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return it all as plain dicts, lists, strings and numbers."""
        return asdict(self)


def collect() -> Environment:
    """Find out about this machine, this process and this installation; never raises.

    GPUs are asked for their properties, which initialises CUDA in this process where there are any,
    but allocates nothing: a process that is to fork children with GPUs should call it in one of them.

    Example:
        >>> environment = collect()
        >>> environment.backend in ("cuda", "host", "virtual"), bool(environment.backend_reason)
        (True, True)
    """
    problems: list[str] = []

    def probe(ask: Callable[[], Value], default: Value, what: str = "") -> Value:
        try:
            return ask()
        except Exception as error:
            if what:
                problems.append(f"{what}: {type(error).__name__}: {error}")
            return default

    has_gpu = probe(torch.cuda.is_available, False, "CUDA")
    gpus = probe(_gpus, [], "GPU properties") if has_gpu else []
    peer_access = probe(lambda: _peer_access(len(gpus)), None, "peer access") if gpus else None
    kernels, kernels_reason, problem = _kernels(has_gpu)
    problems += [problem] if problem else []
    device = torch.device("cuda", 0) if has_gpu and not INTERPRETED else torch.device("cpu")
    group_size = max(1, len(gpus)) if device.type == "cuda" else 2
    backend, backend_reason = choose_backend(device, group_size)
    if has_gpu and INTERPRETED:
        backend_reason += '; beside GPUs a dispatcher needs device="cpu" for it'
    if backend == "cuda" and torch.version.hip:
        problems.append("the kernels compile for AMD GPUs but do not run there yet")
    if peer_access and not all(all(row) for row in peer_access):
        problems.append("some pairs of GPUs cannot address each other: use groups of those that can")
    symmetric_memory = probe(
        lambda: _symmetric_memory(probe, has_gpu),
        SymmetricMemorySupport(False, None, None, None),
        "torch.distributed._symmetric_memory" if has_gpu else "",
    )
    shm = probe(lambda: os.statvfs(_SHARED_MEMORY), None)
    if shm is None:
        problems.append(f'there is no {_SHARED_MEMORY}: backend "host" cannot be used')
    return Environment(
        versions=_versions(probe),
        platform=f"{platform.system()} {platform.machine()}",
        cpus=probe(lambda: len(os.sched_getaffinity(0)), os.cpu_count() or 1),
        gpus=gpus,
        peer_access=peer_access,
        symmetric_memory=symmetric_memory,
        kernels=kernels,
        kernels_reason=kernels_reason,
        group_size=group_size,
        backend=backend,
        backend_reason=backend_reason,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else None,
        shm_total_bytes=shm.f_blocks * shm.f_frsize if shm else None,
        problems=problems,
    )


def _versions(probe: Callable[..., Any]) -> dict[str, str | None]:
    """Return the versions of all that takes part."""

    def driver() -> str:
        number = torch._C._cuda_getDriverVersion()  # pyright: ignore[reportAttributeAccessIssue]
        return f"{number // 1000}.{number % 1000 // 10}"

    has_driver = probe(torch.cuda.is_available, False) and not torch.version.hip
    return {
        "symm_a2a": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cuda_driver": probe(driver, None) if has_driver else None,
        "hip": torch.version.hip,
    }


def _gpus() -> list[Gpu]:
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(p.name, p.total_memory, f"{p.major}.{p.minor}") for p in properties]


def _peer_access(count: int) -> list[list[bool]]:
    """Return for each ordered pair whether the first can address the second's memory; itself: True."""
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]


def _symmetric_memory(probe: Callable[..., Any], has_gpu: bool) -> SymmetricMemorySupport:
    import torch.distributed._symmetric_memory as symm_mem

    def multicast() -> bool:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory

        return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, 0))

    return SymmetricMemorySupport(
        importable=True,
        cuda_backend=probe(lambda: symm_mem.get_backend(torch.device("cuda")), None),
        nvshmem=probe(symm_mem.is_nvshmem_available, None),
        multicast=probe(multicast, None) if has_gpu else None,
    )


def _kernels(has_gpu: bool) -> tuple[str, str, str]:
    """Return how kernels run in this process, why, and a problem with it or an empty text."""
    if INTERPRETED:
        why = "TRITON_INTERPRET=1 is set, beside a GPU" if has_gpu else "no CUDA device: Triton's interpreter"
        return "interpreted", why, ""
    if has_gpu:
        return "compiled", "a CUDA device is there", ""
    why = f"TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET', '')} is set, without a CUDA device"
    return "compiled", why, "compiled kernels cannot run without a CUDA device: unset TRITON_INTERPRET"
