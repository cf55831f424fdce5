"""Named ranges in a profile: which operation, launch or join, in which lane and epoch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from symm_a2a.kernels.channel import Kind


def profiled(phase: str, kind: Kind, lane: int, epoch: int) -> AbstractContextManager[object]:
    """Show what runs inside in a profile, while there is a profiler; cost nothing without.

    Args:
        phase: "launch" or "join".
        kind: of what.
        lane: its place in the arena.
        epoch: the host's count of exchanges in the lane's direction; replays of a captured graph,
            which the host does not see, are not in it.
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(f"symm_a2a {kind.title} {phase}, lane {lane}, epoch {epoch}")
