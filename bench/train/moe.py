"""The layer of experts: a router, a dispatcher, and the experts that live on this rank.

The layer yields each exchange when it is launched, and is resumed with what its `join` gives:
`symm_a2a.Domino` runs another micro-batch meanwhile. Without one, joined at once, it is the same layer
with synchronous exchanges: `rows, counts, handle = dispatcher.dispatch(x, scores, ids)`, and
`out = dispatcher.combine(y, handle)`.

Shape letters as in the package: `T` tokens of this rank, `D` elements of a row, `K` experts per token,
`E` experts, `L` of them on this rank, `R` rows that arrive here; `H` is the experts' hidden size.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench.train.options import Options


class Experts(nn.Module):
    """The L experts of one rank: two matrices each, with a squared ReLU between them.

    Every rank draws the weights of all E experts and keeps its own, so that the model is the same for
    any number of ranks.
    """

    def __init__(self, options: Options, mine: slice, generator: torch.Generator) -> None:
        super().__init__()
        E, D, H = options.experts, options.dim, 2 * options.dim
        self.up_LDH = nn.Parameter(torch.randn(E, D, H, generator=generator)[mine] * D**-0.5)
        self.down_LHD = nn.Parameter(torch.randn(E, H, D, generator=generator)[mine] * 0.5 * H**-0.5)

    def forward(self, rows_RD: torch.Tensor, tokens_per_expert_L: torch.Tensor) -> torch.Tensor:
        """Return `(R, D)`: each expert's answer to its rows, which lie one expert after another."""
        pieces = rows_RD.split(tokens_per_expert_L.tolist())
        outputs = [
            F.relu(rows @ up).square() @ down
            for rows, up, down in zip(pieces, self.up_LDH, self.down_LHD, strict=True)
        ]
        return torch.cat(outputs)


class Routed(NamedTuple):
    """What a router did with one micro-batch of this rank.

    Attributes:
        probability_E: what it gave to each expert, the mean over the tokens; differentiable.
        load_E: int64, slots that it sent to each expert.
        ids_TK: int64, the experts that each token went to.
    """

    probability_E: torch.Tensor
    load_E: torch.Tensor
    ids_TK: torch.Tensor


class MoE(nn.Module):
    """Sends each token to its K best experts, wherever they live, and adds up their answers.

    Args:
        options: sizes.
        dispatcher: carries the rows; one is shared by all layers.
        group: of the ranks; None for a process of its own, with all the experts.
        generator: of the weights.
    """

    def __init__(
        self, options: Options, dispatcher: Any, group: dist.ProcessGroup | None, generator: torch.Generator
    ) -> None:
        super().__init__()
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        num_local = options.experts // ranks
        self.top_k, self.num_experts = options.top_k, options.experts
        self.dispatcher = dispatcher
        self.router_ED = nn.Parameter(
            torch.randn(options.experts, options.dim, generator=generator) * options.dim**-0.5
        )
        self.experts = Experts(options, slice(rank * num_local, (rank + 1) * num_local), generator)

    def forward(self, x_TD: torch.Tensor) -> Generator[Any, Any, tuple[torch.Tensor, Routed]]:
        """Return the experts' sums `(T, D)`, and what a loss of their balance needs; yields its exchanges."""
        probability_TE = F.linear(x_TD, self.router_ED).softmax(-1)
        scores_TK, ids_TK = probability_TE.topk(self.top_k, dim=-1)
        scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
        rows_RD, tokens_per_expert_L, handle = yield self.dispatcher.dispatch_async(x_TD, scores_TK, ids_TK)
        y_RD = self.experts(rows_RD, tokens_per_expert_L)
        out_TD = yield self.dispatcher.combine_async(y_RD, handle)
        load_E = torch.bincount(ids_TK.flatten(), minlength=self.num_experts)
        return out_TD, Routed(probability_TE.mean(0), load_E, ids_TK)
