"""Tokens that the ranks of a tensor-parallel group share: each dispatches a part, and all get all sums.

The n ranks of a tensor-parallel group hold identical tokens. If each dispatched all of them, n copies of
every row would travel, and every expert would compute it n times. So each takes a part first,

    x, scores, ids = shard_tokens(x, scores, ids, group=tp)
    rows, tokens_per_expert, handle = dispatcher.dispatch(x, scores, ids)
    out = gather_tokens(dispatcher.combine(experts(rows, tokens_per_expert), handle), num_tokens, group=tp)

over an expert-parallel group that spans tensor-parallel and data-parallel ranks alike, or one of several.

Gradients are those of tensor parallelism: all ranks of the group go on with the same sums, compute the same
loss, and so hold the same gradient of them, of which each takes its part back; and each gets the whole
gradient of the tokens that it was given, to hand on to what was computed alike on all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from symm_a2a.errors import InputError


def share_of(num_tokens: int, group: dist.ProcessGroup) -> slice:
    """Return which of T tokens are this rank's: parts of `ceil(T / n)`, the last ones shorter, or empty."""
    part = -(-num_tokens // dist.get_world_size(group))
    begin = min(num_tokens, dist.get_rank(group) * part)
    return slice(begin, min(num_tokens, begin + part))


def shard_tokens(
    x_TD: Tensor, scores_TK: Tensor, topk_ids_TK: Tensor, *, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's part of tokens that all ranks of a group hold; nothing is sent, but in the backward.

    Args:
        x_TD: `(T, D)`, the same on every rank of the group, as are the others; so is whether they need a
            gradient.
        scores_TK: `(T, K)`.
        topk_ids_TK: `(T, K)`.
        group: the tensor-parallel group.

    Returns:
        The rows of `share_of(T, group)` of each; their gradients are gathered again, whole on every rank.

    Raises:
        InputError: rows that are none, or numbers of tokens that differ.
    """
    if x_TD.dim() != 2:
        raise InputError(f"expected x_TD of shape (T, D), got {tuple(x_TD.shape)}")
    T = x_TD.shape[0]
    for name, tensor in (("scores_TK", scores_TK), ("topk_ids_TK", topk_ids_TK)):
        if tensor.shape[:1] != (T,):
            raise InputError(f"expected {name} of {T} tokens, as x_TD has, got shape {tuple(tensor.shape)}")
    x, scores = _Shard.apply(x_TD, scores_TK, group)
    return x, scores, topk_ids_TK[share_of(T, group)]


def gather_tokens(out_SD: Tensor, num_tokens: int, *, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks of a group, on every rank.

    Args:
        out_SD: `(S, D)`, this rank's part, as `shard_tokens` has cut it.
        num_tokens: T.
        group: the tensor-parallel group.

    Returns:
        `(T, D)`; its gradient is to be the same on every rank of the group, and each takes its part of it.

    Raises:
        InputError: another number of rows than this rank's part has, or no number of tokens.
    """
    if not isinstance(num_tokens, (int, torch.SymInt)) or num_tokens < 0:
        raise InputError(f"expected num_tokens to be an int, not negative, got {num_tokens!r}")
    share = share_of(num_tokens, group)
    mine = share.stop - share.start
    if out_SD.dim() != 2 or out_SD.shape[0] != mine:
        raise InputError(
            f"expected the {mine} rows that are this rank's of {num_tokens} tokens, got shape "
            f"{tuple(out_SD.shape)}"
        )
    return _Gather.apply(out_SD, num_tokens, group)


def _gathered(part: Tensor, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' parts, `(T, ...)`; equal parts are sent, as collectives want them."""
    size = -(-num_tokens // dist.get_world_size(group))
    padded = part.new_zeros(size, *part.shape[1:])
    padded[: part.shape[0]] = part
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)[:num_tokens]


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, scores_TK: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.num_tokens, ctx.group = x_TD.shape[0], group
        share = share_of(ctx.num_tokens, group)
        return x_TD[share].clone(), scores_TK[share].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_scores: Tensor) -> tuple[Tensor, Tensor, None]:
        whole = [_gathered(grad, ctx.num_tokens, ctx.group) for grad in (grad_x, grad_scores)]
        return whole[0], whole[1], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_SD: Tensor, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
        ctx.share = share_of(num_tokens, group)
        return _gathered(out_SD, num_tokens, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        return grad_TD[ctx.share].contiguous(), None, None
