"""The micro-batches' outputs, tied: one backward reaches all of them or none."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from symm_a2a.ops.tie import tie


def tie_outputs(outputs: list[Any]) -> list[Any]:
    """Return the outputs with all tensors in them that require a gradient sent through one node."""
    leaves, structure = tree_flatten(outputs)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if places:
        for i, tensor in zip(places, tie([leaves[i] for i in places]), strict=True):
            leaves[i] = tensor
    return tree_unflatten(leaves, structure)
