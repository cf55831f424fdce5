"""A trainer's batches as groups of micro-batches, and what each counts for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from symm_a2a.errors import InputError

Batch = TypeVar("Batch")


def group_batches(batches: Sequence[Batch], num_micro_batches: int) -> list[list[Batch]]:
    """Return the batches of one optimizer step in groups, each to run through the model together.

    What a trainer would accumulate gradients over, one batch after another, runs in fewer and larger
    rounds; the global batch stays the same.

    Args:
        batches: of one optimizer step, on this rank.
        num_micro_batches: M, the batches of a group.

    Raises:
        InputError: the number of batches is not a multiple of M.

    Example:
        >>> group_batches(["a", "b", "c", "d"], 2)
        [['a', 'b'], ['c', 'd']]
    """
    if isinstance(num_micro_batches, bool) or not isinstance(num_micro_batches, int) or num_micro_batches < 1:
        raise InputError(f"expected num_micro_batches to be a positive int, got {num_micro_batches!r}")
    if len(batches) % num_micro_batches:
        raise InputError(
            f"expected the number of batches of a step to be a multiple of num_micro_batches = "
            f"{num_micro_batches}, got {len(batches)}; change the gradient accumulation, or the micro-batches"
        )
    return [list(batches[i : i + num_micro_batches]) for i in range(0, len(batches), num_micro_batches)]


def token_shares(
    num_tokens: Sequence[int], group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> list[float]:
    """Return the share of each micro-batch in the tokens of all of them.

    A mean loss over the whole batch is the sum of the micro-batches' mean losses times these. With a
    group the whole batch is that of all ranks, and gradients add up over the ranks (not: are averaged).

    Args:
        num_tokens: tokens that count in each micro-batch's loss, on this rank.
        group: of ranks whose micro-batches are one batch; None for this rank alone. Collective.
        device: where the group's backend wants its tensors.

    Raises:
        InputError: something else than numbers of tokens, on the rank that gave it; the others get shares
            without it.

    Example:
        >>> token_shares([3, 1, 0])
        [0.75, 0.25, 0.0]
    """
    sound = all(isinstance(tokens, int) and tokens >= 0 for tokens in num_tokens)
    total = sum(num_tokens) if sound else 0
    if group is not None:
        counted = torch.tensor(total, dtype=torch.int64, device=device)
        dist.all_reduce(counted, group=group)
        total = int(counted)
    if not sound:
        # Only now: the other ranks are in the same collective.
        raise InputError(f"expected numbers of tokens, each an int and not negative, got {list(num_tokens)}")
    return [tokens / total if total else 0.0 for tokens in num_tokens]
