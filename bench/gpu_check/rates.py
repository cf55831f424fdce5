"""What a time says of a kernel: bytes by the formulas of `bench.limits`, for the load that was run."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.limits.load import Load
from bench.limits.traffic import Traffic, backward, forward
from symm_a2a import EPConfig
from symm_a2a.kernels.blocks import SMALL_TOKENS

TARGETS = {7168: 80.0, 2048: 75.0}
"""Percent of a plain copy's bandwidth that kernels are to reach, by the elements of a row."""

AIMED = ("expand", "gather", "finish", "expand of gradients")
"""Kernels with a target."""

LOCAL = ("count", "scatter", "gather", "scatter of gradients", "gather of gradients")
"""Kernels that store to peers, which are memory of the same device here."""

ORDER = ("count", "scatter", "expand", "gather", "finish")
ORDER = (*ORDER, *(f"{kernel} of gradients" for kernel in ORDER[1:]))


def loads_of(cfg: EPConfig, ids: list[Tensor], capacity: int, token_block: int) -> list[Load]:
    """Return every rank's load of a routing, counted.

    Args:
        cfg: of the dispatchers.
        ids: int64 `(T, K)` of each rank, on the CPU.
        capacity: rows of each rank.
        token_block: tokens that the count kernel takes at once.
    """
    W, E = len(ids), cfg.num_experts
    layout, L = cfg.layout(W), E // W
    owners = [torch.where(i >= 0, i // L, -1) for i in ids]
    # A copy for each rank that any slot of a token is for.
    copies_WW = torch.stack([torch.stack([(o == q).any(1).sum() for q in range(W)]) for o in owners])
    rows_W = torch.stack([torch.bincount(o[o >= 0], minlength=W) for o in owners]).sum(0)
    return [
        Load(
            ranks=W, experts=E, top_k=cfg.top_k, tokens=len(ids[rank]), capacity=layout.max_tokens,
            hidden=cfg.hidden_dim, padded=layout.padded_hidden, itemsize=cfg.dtype.itemsize,
            score_bytes=layout.score_dtype.itemsize, id_bytes=ids[rank].dtype.itemsize,
            token_block=token_block,
            kept=int(copies_WW[rank, rank]),
            sent=int(copies_WW[rank].sum() - copies_WW[rank, rank]),
            received=int(copies_WW[:, rank].sum() - copies_WW[rank, rank]),
            slots=int((ids[rank] >= 0).sum()), rows=int(rows_W[rank]),
            gap_rows=capacity - int(rows_W[rank]), counted_apart=len(ids[rank]) > SMALL_TOKENS,
        )
        for rank in range(W)
    ]  # fmt: skip


def bytes_of(load: Load) -> dict[str, float]:
    """Return the bytes that each kernel of a rank moves where all ranks are on one device, by name."""
    return {traffic.kernel: moved_here(traffic) for traffic in (*forward(load), *backward(load))}


def moved_here(traffic: Traffic) -> float:
    """Return the bytes that one launch reads and writes: what it sends is written to the same memory.

    What a rank receives meanwhile is not its own launch's work.
    """
    return traffic.reads.total + traffic.writes.total + traffic.sent.total


def gigabytes_per_second(moved: float, seconds: float) -> float:
    """Return a rate.

    Example:
        >>> gigabytes_per_second(3e9, 1.5)
        2.0
    """
    return moved / seconds / 1e9


def target_of(kernel: str, hidden: int) -> float | None:
    """Return the percent of a plain copy that a kernel is to reach, where it has a target.

    Example:
        >>> target_of("expand", 7168), target_of("scatter", 7168), target_of("expand", 64)
        (80.0, None, None)
    """
    return TARGETS.get(hidden) if kernel in AIMED else None


def verdict(percent: float | None, target: float | None) -> str:
    """Return how a rate compares with its target.

    Example:
        >>> verdict(81.0, 80.0), verdict(79.9, 80.0), verdict(79.9, None), verdict(None, 80.0)
        ('reached', 'below target', '', '')
    """
    if percent is None or target is None:
        return ""
    return "reached" if percent >= target else "below target"
