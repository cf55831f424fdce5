"""What `--placement` puts where: each made of the loads of the very ids that are then sent."""

from __future__ import annotations

import torch
from torch import Tensor

import symm_a2a
from bench.a2av.cases import Case


def place(case: Case, ids_WTK: Tensor) -> symm_a2a.Placement | None:
    """Return the placement of a case; None for the contiguous one.

    Args:
        case: sizes, and which placement.
        ids_WTK: int64, of all ranks, -1 where a slot is masked.

    Example:
        >>> from dataclasses import replace
        >>> case = Case("dispatch", "", "", ranks=2, tokens=4, hidden=4, experts=4, top_k=1, dtype="float32")
        >>> ids = torch.tensor([[0, 0, 0, 1], [2, 2, 3, -1]])[..., None]
        >>> place(replace(case, placement="worst"), ids).experts_of_rank
        ((0, 2), (1, 3))
        >>> place(replace(case, placement="best"), ids).experts_of_rank
        ((0, 3), (1, 2))
    """
    if case.placement == "contiguous":
        return None
    slots_E = torch.bincount(ids_WTK[ids_WTK >= 0], minlength=case.experts)
    if case.placement == "worst":
        # The busiest experts together.
        rank_E = slots_E.argsort(descending=True, stable=True).argsort() // (case.experts // case.ranks)
        return symm_a2a.Placement.from_ranks(rank_E.tolist(), case.ranks)
    more = 1 if case.placement == "replicas" else 0
    return symm_a2a.rebalance(slots_E.tolist(), case.ranks, case.experts // case.ranks + more)
