"""The layer of experts: a router, a dispatcher, and the experts that live on this rank.

Shape letters as in the package: `T` tokens of this rank, `D` elements of a row, `K` experts per token,
`E` experts, `L` of them on this rank, `R` rows that arrive here; `H` is the experts' hidden size.
"""

from __future__ import annotations

from typing import Any

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


class MoE(nn.Module):
    """Sends each token to its K best experts, wherever they live, and adds up their answers.

    Args:
        options: sizes.
        dispatcher: carries the rows; one is shared by all layers.
        group: of the ranks; None for a process of its own, with all the experts.
        generator: of the weights.

    Attributes:
        load_E: int64, slots that the last forward sent to each expert, from all ranks.
        ids_TK: int64, the experts that this rank's tokens went to in the last forward.
    """

    def __init__(
        self, options: Options, dispatcher: Any, group: dist.ProcessGroup | None, generator: torch.Generator
    ) -> None:
        super().__init__()
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        num_local = options.experts // ranks
        self.top_k, self.num_experts = options.top_k, options.experts
        self.dispatcher, self.group = dispatcher, group
        self.router_ED = nn.Parameter(
            torch.randn(options.experts, options.dim, generator=generator) * options.dim**-0.5
        )
        self.experts = Experts(options, slice(rank * num_local, (rank + 1) * num_local), generator)
        self.load_E = torch.zeros(options.experts, dtype=torch.int64)
        self.ids_TK = torch.zeros(0, options.top_k, dtype=torch.int64)

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts' sums `(T, D)`, and how unevenly the experts are used (1 is evenly)."""
        probability_TE = F.linear(x_TD, self.router_ED).softmax(-1)
        scores_TK, ids_TK = probability_TE.topk(self.top_k, dim=-1)
        self.ids_TK = ids_TK
        scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
        rows_RD, tokens_per_expert_L, handle = self.dispatcher.dispatch(x_TD, scores_TK, ids_TK)
        out_TD = self.dispatcher.combine(self.experts(rows_RD, tokens_per_expert_L), handle)
        return out_TD, self._imbalance(probability_TE, ids_TK)

    def _imbalance(self, probability_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """Return `E * sum_e (share of slots of e) * (mean probability of e)`.

        The shares are those of all ranks together. What is left is linear in the tokens, so the mean of
        the ranks' values is the value of the whole batch, and so are the gradients.
        """
        self.load_E = torch.bincount(ids_TK.flatten(), minlength=self.num_experts)
        if self.group is not None:
            dist.all_reduce(self.load_E, group=self.group)
        share_E = self.load_E.to(probability_TE.dtype) / self.load_E.sum()
        return self.num_experts * (share_E * probability_TE.mean(0)).sum()
