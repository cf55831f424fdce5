"""A byte-level transformer, small enough to learn English-looking statistics in a minute on a CPU.

Its forward is a generator over one micro-batch; `whole_batch` makes one loss of what all of them return.

Shape letters: `B` sequences, `S` tokens of one, `D` elements of a token's row, `E` experts, `N` layers,
`M` micro-batches.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench.train.moe import Experts, MoE, Routed
from bench.train.options import HEAD_DIM, Options

VOCABULARY = 256
NEIGHBOURS = 3
"""Earlier bytes that a byte's embedding is mixed with: short words are seen before attention has learned."""


def normalize(x: torch.Tensor) -> torch.Tensor:
    """Scale the last dimension to a root mean square of 1."""
    return F.rms_norm(x, (x.shape[-1],))


class Block(nn.Module):
    """Causal attention, then a layer of experts; each adds to its input."""

    def __init__(
        self, options: Options, dispatcher: Any, group: dist.ProcessGroup | None, generator: torch.Generator
    ) -> None:
        super().__init__()
        D, scale = options.dim, options.dim**-0.5
        self.qkv = nn.Parameter(torch.randn(3 * D, D, generator=generator) * scale)
        self.project = nn.Parameter(torch.randn(D, D, generator=generator) * 0.5 * scale)
        self.moe = MoE(options, dispatcher, group, generator)

    def forward(
        self, x_BSD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> Generator[Any, Any, tuple[torch.Tensor, Routed]]:
        """Return `(B, S, D)`, and what the router did; yields the experts' exchanges."""
        x_BSD = x_BSD + self._attend(normalize(x_BSD), cos, sin)
        out_TD, routing = yield from self.moe(normalize(x_BSD).flatten(0, 1))
        return x_BSD + out_TD.view_as(x_BSD), routing

    def _attend(self, x_BSD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = F.linear(x_BSD, self.qkv).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        query, key = (rotate(normalize(part), cos, sin) for part in heads[:2])
        mixed = F.scaled_dot_product_attention(query, key, heads[2], is_causal=True)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.project)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs of elements by an angle that grows with the position (rotary embedding)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Model(nn.Module):
    """The whole model of one rank: everything but the experts is the same on every rank.

    Args:
        options: sizes and the seed.
        dispatcher: carries the rows of all layers.
        group: of the ranks; None for a process of its own, with all the experts.
    """

    def __init__(self, options: Options, dispatcher: Any, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(options.seed)
        D = options.dim
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, D, generator=generator))
        self.neighbours = nn.Parameter(torch.randn(NEIGHBOURS, D, generator=generator) * 0.5)
        self.blocks = nn.ModuleList(
            Block(options, dispatcher, group, generator) for _ in range(options.layers)
        )
        self.head = nn.Parameter(torch.randn(VOCABULARY, D, generator=generator) * 0.02)
        frequency = 10_000.0 ** -(torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
        angle = torch.outer(torch.arange(options.context), frequency)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, windows: torch.Tensor) -> Generator[Any, Any, tuple[torch.Tensor, list[Routed]]]:
        """Return the mean loss of predicting each next byte, in nats, and what each layer's router did.

        Args:
            windows: int64 `(B, S + 1)`, bytes of one micro-batch.
        """
        x_BSD = embedded = F.embedding(windows[:, :-1], self.embedding)
        for distance, weight in enumerate(self.neighbours, start=1):
            x_BSD = x_BSD + weight * F.pad(embedded, (0, 0, distance, 0))[:, :-distance]
        routings = []
        for block in self.blocks:
            x_BSD, routing = yield from block(x_BSD, self.cos, self.sin)
            routings.append(routing)
        logits = F.linear(normalize(x_BSD), self.head)
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()), routings

    def replicated(self) -> list[nn.Parameter]:
        """Return the parameters that every rank holds: all but the experts'."""
        owned = {
            id(p) for module in self.modules() if isinstance(module, Experts) for p in module.parameters()
        }
        return [p for p in self.parameters() if id(p) not in owned]


class BatchLoss(NamedTuple):
    """One rank's part of the loss of a whole batch; the ranks' parts add up, and so do their gradients.

    Attributes:
        loss: mean over the tokens of all ranks, in nats.
        imbalance: how unevenly the experts are used, summed over layers (1 each is evenly).
        load_E: int64, slots that went to each expert, from all layers and ranks.
    """

    loss: torch.Tensor
    imbalance: torch.Tensor
    load_E: torch.Tensor


def whole_batch(
    outputs: Sequence[tuple[torch.Tensor, list[Routed]]],
    shares: Sequence[float],
    group: dist.ProcessGroup | None,
) -> BatchLoss:
    """Return the loss of the batch that micro-batches and ranks make up together.

    The imbalance of a layer is `E * sum_e (share of slots of e) * (mean probability of e)`, both of the
    whole batch. A product of means is not the mean of products: the slots are added up first. What is left
    is linear in the tokens.

    Args:
        outputs: what the model returned for each micro-batch.
        shares: of each micro-batch in the tokens of all ranks.
        group: of the ranks; None for a process of its own.
    """
    load_NE = torch.stack([torch.stack([r.load_E for r in routings]) for _, routings in outputs]).sum(0)
    if group is not None:
        dist.all_reduce(load_NE, group=group)
    loss_M = torch.stack([loss for loss, _ in outputs])
    probability_MNE = torch.stack(
        [torch.stack([r.probability_E for r in routings]) for _, routings in outputs]
    )
    share_M = loss_M.new_tensor(shares)
    slots_NE = load_NE.to(loss_M.dtype) / load_NE.sum(1, keepdim=True)
    imbalance_M = load_NE.shape[1] * (slots_NE * probability_MNE).sum((1, 2))
    return BatchLoss((share_M * loss_M).sum(), (share_M * imbalance_M).sum(), load_NE.sum(0))
