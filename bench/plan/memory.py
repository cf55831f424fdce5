"""What a step keeps in a rank's memory at its fullest: between the forward and the backward.

Counted are, for each layer that the rank has:

- parameters: its share of the experts, and all else of a layer, at so many bytes each;
- activations that autograd saves: for each token its input, two norms' results, the projections' results,
  attention's result, the sum after attention, router scores in fp32, and the combined row; for each row at
  the experts the row, gate, up and their product, and the experts' output; and the routing tensors.
  With a checkpoint per layer only the inputs of layers, and everything of one layer;
- symmetric memory, by the library's own `EPConfig.symmetric_bytes`.

All micro-batches of a step are in memory when its backward begins. Left out: embedding and head, the
optimizer's state, what a kernel needs for itself, and what an uneven routing adds on the busiest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import symm_a2a
from bench.plan.gemm import ITEMSIZE
from bench.plan.models import Model


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: float
    activations: float
    symmetric: int

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.activations + self.symmetric


def memory_of(
    model: Model,
    micro_tokens: list[int],
    *,
    ranks: int,
    layers: int,
    lanes: int,
    bytes_per_parameter: float,
    checkpoint: bool = False,
) -> Memory:
    """Return what a step of micro-batches with so many tokens each keeps.

    Args:
        model: sizes.
        micro_tokens: tokens of each micro-batch on a rank.
        ranks: W.
        layers: of the rank.
        lanes: of the dispatcher.
        bytes_per_parameter: of weights, gradients and whatever else is kept of each.
        checkpoint: whether each layer keeps its input alone.

    Raises:
        ConfigError: sizes that the library refuses.
    """
    config = symm_a2a.EPConfig(
        num_experts=model.experts,
        top_k=model.top_k,
        hidden_dim=model.hidden,
        max_tokens_per_rank=max(micro_tokens),
        num_lanes=lanes,
    )
    symmetric = config.symmetric_bytes(ranks)
    parameters = model.other_parameters + model.expert_parameters * model.experts // ranks
    whole = sum(_saved(model, tokens, max(micro_tokens), ranks) for tokens in micro_tokens)
    inputs = sum(micro_tokens) * model.hidden * ITEMSIZE
    activations = layers * inputs + whole if checkpoint else layers * whole
    return Memory(layers * parameters * bytes_per_parameter, activations, symmetric)


def _saved(model: Model, tokens: int, capacity: int, ranks: int) -> float:
    """Return the bytes that a layer saves of a micro-batch, under uniform routing."""
    D, I, K, W = model.hidden, model.intermediate, model.top_k, ranks  # noqa: E741
    projected = sum(columns for _, columns in model.attention.projections(D))
    of_token = 5 * D + projected + model.attention.value_dims + 2 * model.experts + 3 * I * model.shared
    of_row = 2 * D + 3 * I
    routing = 8 * K * capacity * W + 4 * (W + K) * tokens
    return ITEMSIZE * (tokens * of_token + tokens * K * of_row) + routing
