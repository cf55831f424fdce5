"""What uniform routing makes of a token: K different experts, each set of them as likely as another."""

from __future__ import annotations

from math import comb


def distinct_ranks(ranks: int, experts: int, top_k: int) -> float:
    """Return the copies of one token, when its K distinct experts are equally likely to be any of the E.

    A rank gets a copy unless all K experts are among the `E - E/W` of the others:
    `W * (1 - C(E - E/W, K) / C(E, K))`, exactly.

    Example:
        >>> [round(distinct_ranks(ranks, 64, 8), 2) for ranks in (1, 4, 8)]
        [1.0, 3.66, 5.43]
    """
    return ranks * (1 - comb(experts - experts // ranks, top_k) / comb(experts, top_k))
