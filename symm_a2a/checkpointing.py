"""Which operators selective activation checkpointing must save."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

# They register the operators.
import symm_a2a.ops.synchronous
import symm_a2a.ulysses.operators  # noqa: F401


def checkpoint_ops() -> list[OpOverload]:
    """Return the operators whose results selective activation checkpointing must save.

    With their results saved, a recompute repeats no exchange. The list may be given as it is to
    `torch.utils.checkpoint.create_selective_checkpoint_contexts`. It covers `dispatch`,
    `dispatch_again` and `combine`, `seq_to_head` and `head_to_seq`; asynchronous forms are repeated.

    Example:
        >>> sorted(str(op) for op in checkpoint_ops())
        ['symm_a2a.combine.default', 'symm_a2a.dispatch.default', 'symm_a2a.dispatch_again.default',
         'symm_a2a.head_to_seq.default', 'symm_a2a.seq_to_head.default']
    """
    ops = torch.ops.symm_a2a
    of_tokens = [ops.dispatch.default, ops.dispatch_again.default, ops.combine.default]
    return [*of_tokens, ops.seq_to_head.default, ops.head_to_seq.default]
