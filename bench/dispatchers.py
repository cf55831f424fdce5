"""What is compared: the ways to move rows, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import symm_a2a
from symm_a2a.baselines import AllGatherTokenDispatcher, AllToAllTokenDispatcher, ReplicatedTokenDispatcher

DispatcherFactory = Callable[..., Any]
"""A dispatcher's class, or whatever takes `(cfg, group, device=...)` and gives a context manager."""


class LocalTokenDispatcher(AllToAllTokenDispatcher):
    """The group of one: each rank has all experts, and only orders its rows by them.

    Args:
        cfg: sizes and dtype.
        group: of the ranks, each of which gets a group of its own; collective.
        device: where the rows live.
    """

    def __init__(
        self,
        cfg: symm_a2a.EPConfig,
        group: dist.ProcessGroup,
        device: torch.device | str | None = None,
    ) -> None:
        alone, _ = dist.new_subgroups(1, group=group)
        assert isinstance(alone, dist.ProcessGroup)
        super().__init__(cfg, alone, device)

    def close(self) -> None:
        if not self._closed:
            dist.destroy_process_group(self.group)
        super().close()


DISPATCHERS: dict[str, DispatcherFactory] = {
    "symm": symm_a2a.SymmTokenDispatcher,
    "all_to_all": AllToAllTokenDispatcher,
    "all_gather": AllGatherTokenDispatcher,
    "replicated": ReplicatedTokenDispatcher,
    "local": LocalTokenDispatcher,
}


@dataclass(frozen=True)
class Sharing:
    """What the ranks share out among themselves; of what they do not, each has all.

    Attributes:
        tokens: of a batch.
        experts: of a layer.
    """

    tokens: bool = True
    experts: bool = True


SHARED = Sharing()
"""Tokens and experts, as is usual."""


def sharing_of(name: str) -> Sharing:
    """Return what ranks share out that use a dispatcher of `DISPATCHERS`."""
    return Sharing(tokens=name != "replicated", experts=name != "local")
