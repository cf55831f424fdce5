"""Which experts the tokens choose. Every rank draws the ids of all, and gets the same ones."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.a2av.cases import Case
from bench.trace import Trace


def draw_ids(case: Case, seed: int, trace: Trace | None, step: int = -1, layer: int = 0) -> Tensor:
    """Return int64 `(W, T, K)`, the expert of every slot, -1 where it is masked.

    Args:
        case: sizes and routing.
        seed: of what is random.
        trace: for the routing "trace".
        step: of the trace.
        layer: of the trace.
    """
    W, T, K, E = case.ranks, case.tokens, case.top_k, case.experts
    generator = torch.Generator().manual_seed(seed)
    if case.routing == "balanced":
        return _balanced(W, T, K, E)
    if case.routing == "uniform":
        return torch.rand(W, T, E, generator=generator).topk(K, dim=-1).indices
    if case.routing == "zipf":
        return _zipf(W, T, K, E, generator)
    if case.routing == "one-hot":
        ids = torch.full((W, T, K), -1)
        ids[:, :, 0] = 0
        return ids
    if case.routing == "one-rank":
        num_local = E // W
        mine = min(K, num_local)
        ids = torch.full((W, T, K), -1)
        ids[:, :, :mine] = torch.rand(W, T, num_local, generator=generator).topk(mine, dim=-1).indices
        return ids
    if case.routing == "even":
        return torch.arange(T).div(T // W, rounding_mode="floor").expand(W, T)[:, :, None]
    if case.routing == "none":
        return torch.zeros(W, T, K, dtype=torch.int64)
    assert trace is not None
    return torch.from_numpy(trace.layer(step, layer)).long()


def _balanced(W: int, T: int, K: int, E: int) -> Tensor:
    """Deal the slots out to the ranks in turn, and on each rank to its experts in turn.

    Example:
        >>> _balanced(W=2, T=2, K=2, E=4).tolist()
        [[[0, 2], [1, 3]], [[0, 2], [1, 3]]]
    """
    slot = torch.arange(W * T * K).view(W, T, K)
    return slot % W * (E // W) + slot // W % (E // W)


def _zipf(W: int, T: int, K: int, E: int, generator: torch.Generator) -> Tensor:
    """Draw K different experts a token, the n-th most popular one with weight 1/n.

    Which expert is how popular is random too: the popular ones need not share a rank.
    """
    weight = torch.empty(E)
    weight[torch.randperm(E, generator=generator)] = 1 / torch.arange(1, E + 1)
    # The K largest of log(weight) + Gumbel noise are a sample without replacement.
    noise = -(-torch.rand(W, T, E, generator=generator).clamp_min(1e-30).log()).log()
    return (weight.log() + noise).topk(K, dim=-1).indices
