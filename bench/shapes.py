"""The named shapes: layers whose figures others publish, so that rows can be compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import symm_a2a


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer's exchange.

    Attributes:
        name: as in `--shape`.
        title: the model or benchmark it comes from.
        tokens: T of each rank.
        hidden: D, elements of a row.
        experts: E, of all ranks together.
        top_k: K, experts of a token.
        ranks: W.
        dtype: of rows.
    """

    name: str
    title: str
    tokens: int
    hidden: int
    experts: int
    top_k: int
    ranks: int
    dtype: torch.dtype = torch.bfloat16

    def config(self, **changes: object) -> symm_a2a.EPConfig:
        """Return the dispatcher's configuration: static capacity, twice the mean number of rows."""
        fields: dict[str, object] = dict(
            num_experts=self.experts,
            top_k=self.top_k,
            hidden_dim=self.hidden,
            max_tokens_per_rank=self.tokens,
            dtype=self.dtype,
            capacity=2 * self.tokens * self.top_k,
        )
        return symm_a2a.EPConfig(**(fields | changes))  # pyright: ignore[reportArgumentType]


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("olmoe", "OLMoE 1B-7B", tokens=4096, hidden=2048, experts=64, top_k=8, ranks=8),
        Shape("dsv3", "DeepSeek-V3", tokens=4096, hidden=7168, experts=256, top_k=8, ranks=8),
        Shape("qwen3", "Qwen3-235B-A22B", tokens=4096, hidden=4096, experts=128, top_k=8, ranks=8),
        Shape("kraken", "two ranks, 8 experts", tokens=4096, hidden=4096, experts=8, top_k=2, ranks=2),
        Shape("small", "DeepSeek-V3, decoding", tokens=128, hidden=7168, experts=256, top_k=8, ranks=8),
    )
}
