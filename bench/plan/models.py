"""The named models: sizes of one layer, as their public configurations have them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Grouped:
    """Attention whose query heads share key and value heads."""

    heads: int
    kv_heads: int
    head_dim: int

    def projections(self, hidden: int) -> list[tuple[int, int]]:
        """Return the inner size and the columns of each matrix."""
        width, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [(hidden, width + 2 * shared), (width, hidden)]

    @property
    def score_dims(self) -> int:
        """Elements multiplied for one score, over all heads."""
        return self.heads * self.head_dim

    @property
    def value_dims(self) -> int:
        """Elements of a token's result, over all heads."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Latent:
    """Attention whose queries, keys and values come from small latent rows (MLA), expanded for training."""

    heads: int
    query_rank: int
    kv_rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int

    def projections(self, hidden: int) -> list[tuple[int, int]]:
        """Return the inner size and the columns of each matrix."""
        return [
            (hidden, self.query_rank + self.kv_rank + self.rotated_dim),
            (self.query_rank, self.score_dims),
            (self.kv_rank, self.heads * (self.plain_dim + self.value_dim)),
            (self.value_dims, hidden),
        ]

    @property
    def score_dims(self) -> int:
        """Elements multiplied for one score, over all heads."""
        return self.heads * (self.plain_dim + self.rotated_dim)

    @property
    def value_dims(self) -> int:
        """Elements of a token's result, over all heads."""
        return self.heads * self.value_dim


@dataclass(frozen=True)
class Model:
    """A stack of layers of experts, all alike; rows and weights in bf16.

    Attributes:
        name: as in `--shape`.
        title: what it is.
        layers: with experts, in the whole model.
        hidden: D, elements of a row.
        experts: E.
        top_k: K.
        intermediate: I, elements within an expert, which has a gate.
        shared: experts that serve every token, of the same size.
        attention: before the experts.
        source: where the sizes are published.
    """

    name: str
    title: str
    layers: int
    hidden: int
    experts: int
    top_k: int
    intermediate: int
    shared: int
    attention: Grouped | Latent
    source: str

    def changed(self, **sizes: int | None) -> Model:
        """Return the model with other sizes; None leaves one as it is.

        Args:
            **sizes: fields, or `heads`, `kv_heads`, `head_dim` of grouped attention.

        Raises:
            ValueError: a size is not positive, or the attention is not grouped.
        """
        given = {name: size for name, size in sizes.items() if size is not None}
        for name, size in given.items():
            if size < (0 if name == "shared" else 1):
                raise ValueError(f"expected a positive --{name.replace('_', '-')}, got {size}")
        of_heads = {name: given.pop(name) for name in ("heads", "kv_heads", "head_dim") if name in given}
        attention = self.attention
        if of_heads:
            if not isinstance(attention, Grouped):
                raise ValueError(
                    f"expected --{next(iter(of_heads)).replace('_', '-')} with a model of grouped attention, "
                    f"got {self.name}, whose attention is latent; take another --shape, and give its sizes"
                )
            attention = replace(attention, **of_heads)
        title = f"{self.title}, changed" if given or of_heads else self.title
        return replace(self, **given, attention=attention, title=title)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def other_parameters(self) -> int:
        """Weights of a layer that every rank has: attention, router, shared experts."""
        attention = sum(inner * columns for inner, columns in self.attention.projections(self.hidden))
        return attention + self.hidden * self.experts + self.shared * self.expert_parameters


_HUB = "https://huggingface.co/{}/blob/main/config.json"

MODELS = {
    model.name: model
    for model in (
        Model(
            "olmoe", "OLMoE 1B-7B", layers=16, hidden=2048, experts=64, top_k=8, intermediate=1024, shared=0,
            attention=Grouped(16, 16, 128), source=_HUB.format("allenai/OLMoE-1B-7B-0924"),
        ),
        Model(
            "deepseek-v3", "DeepSeek-V3", layers=58, hidden=7168, experts=256, top_k=8, intermediate=2048,
            shared=1, attention=Latent(128, 1536, 512, 128, 64, 128),
            source=_HUB.format("deepseek-ai/DeepSeek-V3"),
        ),
        Model(
            "qwen3-moe", "Qwen3-235B-A22B", layers=94, hidden=4096, experts=128, top_k=8, intermediate=1536,
            shared=0, attention=Grouped(64, 4, 128), source=_HUB.format("Qwen/Qwen3-235B-A22B"),
        ),
        Model(
            "mixtral", "Mixtral 8x7B", layers=32, hidden=4096, experts=8, top_k=2, intermediate=14336,
            shared=0, attention=Grouped(32, 8, 128), source=_HUB.format("mistralai/Mixtral-8x7B-v0.1"),
        ),
    )
}  # fmt: skip
"""By name. The three dense layers of DeepSeek-V3 are not among its 58."""
