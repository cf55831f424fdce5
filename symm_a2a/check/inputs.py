"""The tensors that the ranks put into a step, drawn from its case's seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symm_a2a.check.cases import Case, Step

LEAVES = ("x", "scores", "weight", "bias")
"""Those of the tensors that may require a gradient."""


@dataclass(eq=False)
class Tensors:
    """One rank's tensors of a step; all but scores and ids are of the row dtype.

    An expert makes `row * weight + bias` of a row; as no bias is zero, not zeros of a pad row. `grad_out`
    is the gradient of what the combine gives.
    """

    x: Tensor  # (T, D)
    scores: Tensor  # (T, K)
    ids: Tensor  # (T, K)
    weight: Tensor  # (L, D)
    bias: Tensor  # (L, D)
    grad_out: Tensor  # (T, D)


def draw_inputs(case: Case, step: Step) -> list[Tensors]:
    """Return every rank's tensors of a step, on the CPU; the same wherever it is called."""
    generator = torch.Generator().manual_seed((case.seed * 1009 + step.number) % (1 << 63))
    E, K, D = (case.sizes[name] for name in ("num_experts", "top_k", "hidden_dim"))
    L = E // len(step.tokens)

    def values(rows: int) -> Tensor:
        # Away from zero: no product of a few of them underflows in fp16, where relative bounds end.
        size = torch.rand(rows, D, generator=generator, dtype=torch.float64) * 1.9 + 0.1
        return (size * (torch.randint(0, 2, size.shape, generator=generator) * 2 - 1)).to(case.dtype)

    inputs = []
    for rank, T in enumerate(step.tokens):
        x, ids = values(T), _draw_ids(step.routing, generator, rank, T, K, E, L)
        scores = torch.rand(T, K, generator=generator, dtype=torch.float64) + 0.05
        scores[torch.rand(T, K, generator=generator) < 0.05] = 0.0
        if step.special:
            for share, value in ((0.05, "-0.0"), (0.01, "nan"), (0.01, "inf"), (0.01, "-inf")):
                x[torch.rand(T, D, generator=generator) < share] = float(value)
            scores[ids < 0] = float("nan")
        grad_out = values(T)
        if step.strides[4] == "expanded":
            grad_out = grad_out[:1].expand(T, D)
        scores, ids = scores.to(getattr(torch, step.scores_dtype)), ids.to(getattr(torch, step.ids_dtype))
        inputs.append(Tensors(x, scores, ids, values(L), values(L), grad_out))
    return inputs


def _draw_ids(routing: str, generator: torch.Generator, rank: int, T: int, K: int, E: int, L: int) -> Tensor:
    """Return int64 `(T, K)` expert ids, some of them -1 where the routing is not `"distinct"`."""
    if routing == "distinct":
        return torch.rand(T, E, generator=generator).topk(K, dim=1).indices
    if routing == "masked":
        return torch.full((T, K), -1)
    bounds = {"one expert": (E - 1, E), "one rank": (0, L), "local": (rank * L, (rank + 1) * L)}
    ids = torch.randint(*bounds.get(routing, (0, E)), (T, K), generator=generator)
    if routing == "skewed":
        ids = (ids.double() / E).pow(4).mul(E).long()
    masked = torch.rand(T, K, generator=generator) < (0.15 if routing == "any" else 0.05)
    # And tokens that no expert gets.
    masked |= torch.rand(T, 1, generator=generator) < 0.05
    return ids.masked_fill(masked, -1)


def place(tensors: Tensors, step: Step, rank: int, device: torch.device) -> Tensors:
    """Return a rank's tensors on its device, in the step's memory layouts, where gradients end up."""
    x, scores, ids, _, grad_out = step.strides
    strides = {"x": x, "scores": scores, "ids": ids, "grad_out": grad_out}
    wanted = {"x": step.x_grad[rank], "scores": step.scores_grad[rank], "weight": True, "bias": True}
    placed = {name: lay_out(t.to(device), strides.get(name, "plain")) for name, t in vars(tensors).items()}
    return Tensors(**{name: t.detach().requires_grad_(wanted.get(name, False)) for name, t in placed.items()})


def lay_out(values: Tensor, strides: str) -> Tensor:
    """Return equal values `(rows, columns)` in another memory layout."""
    rows, columns = values.shape
    if strides == "transposed":
        return values.t().contiguous().t()
    if strides == "sliced":
        return torch.stack([values, torch.zeros_like(values)], 2)[:, :, 0]
    if strides == "shifted":
        # Contiguous, but not where an allocator would put it: wide loads are not aligned.
        return torch.cat([values.new_zeros(1), values.flatten()])[1:].view(rows, columns)
    if strides == "expanded":
        return values[:1].expand(rows, columns)
    return values
