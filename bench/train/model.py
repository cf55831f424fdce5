"""A byte-level transformer, small enough to learn English-looking statistics in a minute on a CPU.

Shape letters: `B` sequences, `S` tokens of one, `D` elements of a token's row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench.train.moe import Experts, MoE
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(B, S, D)`, and the imbalance of the experts."""
        x_BSD = x_BSD + self._attend(normalize(x_BSD), cos, sin)
        out_TD, imbalance = self.moe(normalize(x_BSD).flatten(0, 1))
        return x_BSD + out_TD.view_as(x_BSD), imbalance

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

    def forward(self, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of predicting each next byte, in nats, and the layers' summed imbalance.

        Args:
            windows: int64 `(B, S + 1)`, bytes.
        """
        x_BSD = embedded = F.embedding(windows[:, :-1], self.embedding)
        for distance, weight in enumerate(self.neighbours, start=1):
            x_BSD = x_BSD + weight * F.pad(embedded, (0, 0, distance, 0))[:, :-distance]
        imbalances = []
        for block in self.blocks:
            x_BSD, imbalance = block(x_BSD, self.cos, self.sin)
            imbalances.append(imbalance)
        logits = F.linear(normalize(x_BSD), self.head)
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        return loss, torch.stack(imbalances).sum()

    def replicated(self) -> list[nn.Parameter]:
        """Return the parameters that every rank holds: all but the experts'."""
        owned = {
            id(p) for module in self.modules() if isinstance(module, Experts) for p in module.parameters()
        }
        return [p for p in self.parameters() if id(p) not in owned]

    def load_E(self) -> torch.Tensor:
        """Return int64 `(E,)`, slots of the last forward by expert, all layers and ranks together."""
        return torch.stack([module.load_E for module in self.modules() if isinstance(module, MoE)]).sum(0)

    def ids_MTK(self) -> torch.Tensor:
        """Return int64 `(M, T, K)`, the experts of this rank's tokens in the last forward, by layer."""
        return torch.stack([module.ids_TK for module in self.modules() if isinstance(module, MoE)])
