"""Operators with autograd: the only package that knows autograd contexts."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from symm_a2a.ops.synchronous import combine, dispatch
from symm_a2a.ops.table import enter_lane

__all__ = ["checkpoint_ops", "combine", "dispatch", "enter_lane"]


def checkpoint_ops() -> list[OpOverload]:
    """Return the operators whose results selective activation checkpointing must save.

    With their results saved, a recompute repeats no exchange. The list may be given as it is to
    `torch.utils.checkpoint.create_selective_checkpoint_contexts`. It covers `dispatch` and
    `combine`; a recompute repeats `dispatch_async` and `combine_async`.

    Example:
        >>> sorted(str(op) for op in checkpoint_ops())
        ['symm_a2a.combine.default', 'symm_a2a.dispatch.default']
    """
    return [torch.ops.symm_a2a.dispatch.default, torch.ops.symm_a2a.combine.default]
