"""The micro-batches' outputs, tied: one backward reaches all of them or none."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from symm_a2a.ops.tie import tie


def tie_outputs(outputs: list[Any]) -> list[Any]:
    """Return the outputs with all tensors in them that have a gradient to pass on sent through one node."""
    leaves, structure = tree_flatten(outputs)
    places = [i for i, leaf in enumerate(leaves) if _was_computed(leaf)]
    if places:
        for i, tensor in zip(places, tie([leaves[i] for i in places]), strict=True):
            leaves[i] = tensor
    return tree_unflatten(leaves, structure)


def _was_computed(leaf: Any) -> bool:
    """Whether autograd would go on from here; a parameter, for one, stays the parameter."""
    return isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf
