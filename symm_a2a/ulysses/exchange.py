"""What a model calls: from all heads of a part of the sequence to a part of the heads, and back."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from symm_a2a.errors import InputError
from symm_a2a.ulysses import operators
from symm_a2a.ulysses.group import SequenceGroup


def seq_to_head(x: Tensor, group: SequenceGroup | dist.ProcessGroup, *, replicate: bool = False) -> Tensor:
    """Give each rank all tokens of a part of the heads: `(b, s, h, d)` to `(b, W * s, h / W, d)`.

    Rank `r` brings tokens `r * s` to `(r + 1) * s` of the whole sequence and gets heads `r * h / W` to
    `(r + 1) * h / W`. The backward is `head_to_seq`. Collective: every rank calls it with the same shape and
    dtype, also where `b` or `s` is 0.

    This layout, attention over whole sequences with heads spread over the ranks, is that of DeepSpeed-Ulysses
    (Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
    Transformer Models", 2023).

    Args:
        x: `(b, s, h, d)`, of a dtype of `EPConfig`, any strides.
        group: of the ranks. For a process group memory is allocated at its first exchange and grows, see
            `SequenceGroup.of`; a `SequenceGroup` says how much there is.
        replicate: where `h` is less than the ranks and divides them, as with few key and value heads, give
            each head to `W / h` ranks instead of raising: the result has one head, that of query heads
            distributed in the same way. The backward adds the gradients of the replicas up in rank order, in
            fp32 (fp64 for fp64), and rounds once.

    Returns:
        A contiguous tensor of ordinary memory, that no later call changes. Without replicas it, and its
        gradient, are bit for bit what reshape, all_to_all_single and permute give.

    Raises:
        InputError: a wrong shape, dtype or device, heads that do not divide among the ranks, or more than the
            group has memory for; no peer has been touched.
        ConfigError: the ranks disagree at the first exchange of a process group.
        ExchangeMismatchError: a peer runs another exchange, or one of another shape; it raises too.
        PeerTimeoutError, PeerLostError: a peer did not take part.
        ClosedError: the group was closed.

    Example:
        >>> import torch
        >>> x = torch.arange(12.0).view(1, 3, 2, 2)
        >>> with SequenceGroup(device="cpu") as group:  # one rank: it has the whole sequence already
        ...     heads = seq_to_head(x, group)
        >>> torch.equal(heads, x), heads.data_ptr() == x.data_ptr()
        (True, False)
    """
    group = _resolve(group)
    group.check(x)
    W, h = group.world_size, x.shape[2]
    replicas = 1
    if h % W:
        if W % h:
            raise InputError(f"expected heads that divide among {W} ranks, got {h}")
        if not replicate:
            raise InputError(
                f"expected at least one head for each of {W} ranks, got {h}; replicate=True gives each head "
                f"to {W // h} ranks"
            )
        replicas = W // h
    return operators.seq_to_head(x, group.anchor, group.number, W, replicas)[0]


def head_to_seq(x: Tensor, group: SequenceGroup | dist.ProcessGroup) -> Tensor:
    """Give each rank all heads of a part of the sequence: `(b, S, H, d)` to `(b, S / W, W * H, d)`.

    The inverse of `seq_to_head`, and its backward; arguments, results and errors are as described there.

    Args:
        x: `(b, S, H, d)`, all tokens of this rank's heads; S divides among the ranks.
        group: of the ranks.
    """
    group = _resolve(group)
    group.check(x)
    W = group.world_size
    if x.shape[1] % W:
        raise InputError(f"expected a sequence that divides among {W} ranks, got {x.shape[1]} tokens")
    return operators.head_to_seq(x, group.anchor, group.number, W, 1)[0]


def _resolve(group: SequenceGroup | dist.ProcessGroup) -> SequenceGroup:
    if isinstance(group, SequenceGroup):
        return group
    if isinstance(group, dist.ProcessGroup):
        return SequenceGroup.of(group)
    raise InputError(f"expected a SequenceGroup or a ProcessGroup, got {type(group).__name__}")
