"""One node that several results leave through, so that a backward reaches all of them or none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Aliases and not views: what comes out may be changed in place, as any result.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def tie(tensors: list[Tensor]) -> list[Tensor]:
    """Return the same tensors; a gradient that is missing for some of them counts as zeros.

    Exchanges must run on every rank or none. Behind a tie a loss may use any of the results,
    and the backward of every exchange before it still runs.
    """
    return list(_Tie.apply(*tensors))
