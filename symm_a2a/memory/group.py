"""Small messages over a process group, for construction only: names, checks, agreement."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from symm_a2a.errors import ConfigError, EnvironmentUnsupportedError
from symm_a2a.memory.meeting import meet, require_alive
from symm_a2a.memory.process import boot_id

_MESSAGE_BYTES = 1024


def exchange(group: dist.ProcessGroup, message: str) -> list[str]:
    """Give every rank's message to every rank, in rank order; nothing is unpickled.

    Args:
        group: the ranks; all of them call this.
        message: at most 1024 bytes of UTF-8; longer ones are cut.

    Raises:
        PeerLostError: the group failed, as a rank's process has ended.
    """
    # NCCL moves what is on GPUs, gloo what is not.
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    data = message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(everyones, mine, group=group)
    except RuntimeError:
        # Connections close before their process has ended.
        for nap in (0.0, 0.1, 0.3, 0.6):
            time.sleep(nap)
            require_alive(dist.get_process_group_ranks(group))
        raise
    return [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in everyones]


def require_agreement(group: dist.ProcessGroup, what: str, value: str) -> None:
    """Raise on every rank where ranks differ in what must be equal; the beginning of a construction.

    Args:
        group: the ranks; all of them call this.
        what: the name of the thing, for the message.
        value: this rank's value.

    Raises:
        ConfigError: names the first rank that differs from rank 0, and both values; or ranks construct over
            different groups.
        PeerLostError: the process of a rank that is missing has ended.
        PeerTimeoutError: ranks did not come.
    """
    meet(group)
    values = exchange(group, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise ConfigError(
                f"expected the same {what} on every rank, got {values[0]} on rank 0 "
                f"and {other} on rank {rank}"
            )


def require_everyone(group: dist.ProcessGroup, error: Exception | None) -> None:
    """Raise on every rank where a step of construction failed on any.

    Args:
        group: the ranks; all of them call this.
        error: what this rank's step raised, or None.

    Raises:
        EnvironmentUnsupportedError: names the ranks and their errors.
    """
    reports = exchange(group, "" if error is None else f"{type(error).__name__}: {error}")
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(reports) if text]
    if failures:
        raise EnvironmentUnsupportedError(
            "symmetric memory could not be set up; " + "; ".join(failures)
        ) from error


def require_one_machine(group: dist.ProcessGroup) -> None:
    """Raise where the group spans machines: peer memory is mapped, not sent.

    Raises:
        EnvironmentUnsupportedError: names two ranks on different machines.
    """
    boots = exchange(group, boot_id())
    for rank, boot in enumerate(boots):
        if boot != boots[0]:
            raise EnvironmentUnsupportedError(
                f"expected a group within one machine, got rank 0 and rank {rank} on different ones; "
                "use the ranks of one NVLink domain as the expert-parallel group"
            )
