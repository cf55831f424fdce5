"""What a spread of tokens over experts makes of the ranks: which one is the busiest, and by how much.

Say the tokens per expert have a coefficient of variation `c`, and a rank's experts are like any `L = E / W`
of them. Their sum then has one of `c / sqrt(L)`. W such ranks are taken to lie where W draws from a normal
distribution lie in the mean (Blom): the r-th of them at `z_r`, where

    z_r = Phi^-1((r - 3/8) / (W + 1/4)),   load_r = max(0, 1 + c / sqrt(L) * z_r), scaled to a mean of 1.

A rank's share of all slots is `p = load / W`; it gets a copy of a token with probability `1 - (1 - p)^K`, as
if the token's K experts were drawn one by one. The same ranks are busy in every layer.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from statistics import NormalDist

from bench.limits.load import Load


def rank_loads(variation: float, ranks: int, local_experts: int) -> list[float]:
    """Return each rank's rows, as a multiple of the mean, the idlest rank first.

    Args:
        variation: the coefficient of variation of tokens per expert.
        ranks: W.
        local_experts: L.

    Example:
        >>> [round(load, 2) for load in rank_loads(0.5, 4, 16)]
        [0.87, 0.96, 1.04, 1.13]
    """
    normal, spread = NormalDist(), variation / sqrt(local_experts)
    places = [(rank - 3 / 8) / (ranks + 1 / 4) for rank in range(1, ranks + 1)]
    loads = [max(0.0, 1 + spread * normal.inv_cdf(place)) for place in places]
    mean = sum(loads) / ranks
    return [load / mean for load in loads]


def loads_of(even: Load, rank_loads_W: list[float]) -> list[Load]:
    """Return what each rank moves, where an even load is known.

    Args:
        even: of every rank, under uniform routing.
        rank_loads_W: each rank's rows, as a multiple of the mean.
    """
    W, K = even.ranks, even.top_k
    # A rank can get no more than a slot for each of its experts, or all K, of every token.
    most = W * min(K, even.local_experts) / K

    def reached(load: float) -> float:
        return 1 - (1 - min(1.0, min(load, most) / W)) ** K

    copies_W = [even.kept * reached(load) / reached(1.0) for load in rank_loads_W]
    everyone = sum(copies_W)
    return [
        replace(
            even,
            kept=copies,
            sent=everyone - copies,
            received=(W - 1) * copies,
            rows=even.rows * min(load, most),
        )
        for copies, load in zip(copies_W, rank_loads_W, strict=True)
    ]
