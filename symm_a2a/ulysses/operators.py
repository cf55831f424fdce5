"""The two exchanges as operators, each the other's backward: for eager mode and compiled graphs.

They are functional. Two one-element tensors keep autograd and compilers from dropping one of them on the one
rank that would not miss it, which would leave the peers waiting: the anchor, a leaf that requires a
gradient, enters every exchange, and a token leaves it and enters its backward.

Sizes are arguments, though the group knows them: they are part of a graph's identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from symm_a2a.kernels.ulysses import Kind
from symm_a2a.ulysses.table import group_of


@torch.library.custom_op("symm_a2a::seq_to_head", mutates_args=())
def seq_to_head(
    x: Tensor, anchor: Tensor, group: int, world_size: int, replicas: int
) -> tuple[Tensor, Tensor]:
    """`(b, s, h, d)` to `(b, W * s, h * replicas / W, d)`, and a token, over group number `group`."""
    return group_of(group).exchange(Kind.SEQ_TO_HEAD, x, replicas)


@seq_to_head.register_fake
def _(x: Tensor, anchor: Tensor, group: int, world_size: int, replicas: int) -> tuple[Tensor, Tensor]:
    b, s, h, d = x.shape
    return x.new_empty((b, s * world_size, h * replicas // world_size, d)), torch.empty_like(anchor)


@torch.library.custom_op("symm_a2a::head_to_seq", mutates_args=())
def head_to_seq(
    x: Tensor, anchor: Tensor, group: int, world_size: int, replicas: int
) -> tuple[Tensor, Tensor]:
    """`(b, S, H, d)` to `(b, S / W, H * W / replicas, d)`, replicas added up, and a token."""
    return group_of(group).exchange(Kind.HEAD_TO_SEQ, x, replicas)


@head_to_seq.register_fake
def _(x: Tensor, anchor: Tensor, group: int, world_size: int, replicas: int) -> tuple[Tensor, Tensor]:
    b, s, h, d = x.shape
    return x.new_empty((b, s // world_size, h * world_size // replicas, d)), torch.empty_like(anchor)


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    _, _, *ctx.sizes = inputs
    ctx.shape, ctx.dtype = output[0].shape, output[0].dtype
    ctx.save_for_backward(output[1])


def _gradient(ctx: Any, grad: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what to exchange in a backward, zeros where only the token was used, and the token."""
    (token,) = ctx.saved_tensors
    return token.new_zeros(ctx.shape, dtype=ctx.dtype) if grad is None else grad, token


def _seq_to_head_backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    return *torch.ops.symm_a2a.head_to_seq(*_gradient(ctx, grad), *ctx.sizes), None, None, None


def _head_to_seq_backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    return *torch.ops.symm_a2a.seq_to_head(*_gradient(ctx, grad), *ctx.sizes), None, None, None


seq_to_head.register_autograd(_seq_to_head_backward, setup_context=_context)
head_to_seq.register_autograd(_head_to_seq_backward, setup_context=_context)
