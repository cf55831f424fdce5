"""All-gather and reduce-scatter (AG/RS): every rank gets all tokens, and keeps what its experts need.

    dispatch    all-gather of the ids and scores; stable sort of all slots by expert; all-gather of the
                tokens; rows of this rank's experts
    combine     this rank's part of every token's weighted sum; reduce-scatter (sum) to the origins

The backward of a combine is the all-gather of its gradient, that of a dispatch the reduce-scatter of the
gradients of tokens and scores. A token goes to all other ranks, whatever its experts: fewer rows than one per
slot where K is larger than W, and more where it is smaller.

Ranks may have different numbers of tokens. The collectives want equal parts (gloo's all-gather has no others,
and NCCL makes a broadcast for each rank of them), so tokens are filled up to those of the rank with most. To
learn that number takes no message of its own: ids and scores, small beside the tokens, are filled up to
`cfg.max_tokens_per_rank`, with an id that no slot has. Gloo's reduce-scatter sends as much as an all-reduce.

The host waits twice in a dispatch: for this rank's ids, whether they are in range, before anything is sent,
and for the numbers of tokens and rows. Nothing waits in a combine or in a backward.

A backward exists on every rank for the reasons told in `all_to_all`, by an anchor as there. Tokens and
scores are gathered by one autograd function: a combine, which always needs the scores, leads its backward to
the dispatch also where the experts' output does not depend on their input, and the two reduce-scatters come
in one order on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from symm_a2a.baselines.base import BaselineDispatcher, sort_by_expert
from symm_a2a.baselines.own_experts import OwnSlots, find_slots

ABSENT = -2
"""The place of slots of tokens that a rank does not have."""


@dataclass(frozen=True, eq=False)
class AllGatherHandle:
    """What a combine needs from its dispatch; it may be combined more than once.

    Attributes:
        num_tokens: T of the dispatch.
        sent: tokens sent to each rank, those that only fill up included.
        slots: of this rank's experts.
        scores: fp32 (fp64 for fp64 rows) `(N, K)`, of all ranks' tokens, differentiable.
    """

    num_tokens: int
    sent: list[int]
    slots: OwnSlots
    scores: torch.Tensor

    @property
    def num_rows(self) -> int:
        """R of the dispatch, padding included."""
        return self.slots.num_rows


class AllGatherTokenDispatcher(BaselineDispatcher[AllGatherHandle]):
    """Dispatch by all-gather, combine by reduce-scatter, of whole tokens; see `BaselineDispatcher`.

    Any number of ranks, and any router. In a combine each rank adds up its experts' rows in fp32 (fp64 for
    fp64 rows) and rounds to `cfg.dtype`; the ranks' parts are added up by the collective, in that dtype.
    The gradient of a token is `index_add`'s over its rows on a rank, and the collective's over the ranks.

    Example:
        >>> from symm_a2a.config import EPConfig
        >>> cfg = EPConfig(
        ...     num_experts=2, top_k=1, hidden_dim=1, max_tokens_per_rank=4, dtype=torch.float32
        ... )
        >>> x, scores, ids = torch.tensor([[1.0], [2.0]]), torch.full((2, 1), 0.5), torch.tensor([[1], [0]])
        >>> with AllGatherTokenDispatcher(cfg, device="cpu") as dispatcher, torch.no_grad():
        ...     rows, counts, handle = dispatcher.dispatch(x, scores, ids)
        ...     out = dispatcher.combine(rows, handle)
        >>> rows.tolist(), counts.tolist(), out.tolist()
        ([[2.0], [1.0]], [1, 1], [[0.5], [1.0]])
    """

    handle_type = AllGatherHandle

    def _dispatch(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, places_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, AllGatherHandle]:
        cfg, L, K, ranks = self.cfg, self._places_of_rank, self.cfg.top_k, self.world_size
        if self._table is None:
            self._require_experts(places_TK)

        places_WCK, scores_WCK = self._gather_routing(scores_TK.detach(), places_TK)
        _, slot_N, start = sort_by_expert(places_WCK.flatten(), self._num_places)
        mine = start[1 + self.rank * L : 2 + (self.rank + 1) * L]
        tokens_W = (places_WCK[:, :, 0] != ABSENT).sum(1)
        numbers = torch.cat([tokens_W, mine]).tolist()
        longest, mine_host = max(numbers[:ranks]), numbers[ranks:]

        x_ND, scores_NK = _GatherTokens.apply(
            self._anchor, x_TD, scores_TK, scores_WCK[:, :longest], self.group
        )
        # From a slot among W x C x K to one among W x longest x K.
        slot_S, slots_of_rank = slot_N[mine_host[0] : mine_host[-1]], cfg.max_tokens_per_rank * K
        places_S = slot_S // slots_of_rank * (longest * K) + slot_S % slots_of_rank
        slots, counts_L = find_slots(places_S, mine.diff(), mine_host, ranks * longest, K, cfg.pad_multiple)
        handle = AllGatherHandle(x_TD.shape[0], [longest] * ranks, slots, scores_NK)
        return slots.take_rows(x_ND), counts_L, handle

    def _gather_routing(
        self, scores_TK: torch.Tensor, places_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 and floating `(W, C, K)`, places and scores of all ranks, in one message."""
        fill = (0, 0, 0, self.cfg.max_tokens_per_rank - len(places_TK))
        scores_CK = F.pad(scores_TK.to(self._score_dtype), fill)
        bits = torch.int32 if self._score_dtype == torch.float32 else torch.int64
        places_CK = F.pad(places_TK, fill, value=ABSENT).to(bits)
        message = all_gather(torch.stack([places_CK, scores_CK.view(bits)]), self.group)
        places_WCK, scores_WCK = message.view(self.world_size, 2, *places_CK.shape).unbind(1)
        return places_WCK.long(), scores_WCK.view(self._score_dtype)

    def _combine(self, y_RD: torch.Tensor, handle: AllGatherHandle) -> torch.Tensor:
        sums_ND = handle.slots.sum_rows(y_RD, handle.scores)
        return _ScatterSums.apply(self._anchor, sums_ND, handle.num_tokens, self.group)


class _GatherTokens(torch.autograd.Function):
    """All-gather of tokens, filled up to equal numbers; its backward adds up what all ranks' experts give."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        scores_WTK: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del anchor
        ctx.group, ctx.num_tokens, ctx.score_dtype = group, len(x_TD), scores_TK.dtype
        x_ND = all_gather(_fill_up(x_TD, scores_WTK.shape[1]), group)
        return x_ND, scores_WTK.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x_ND: torch.Tensor, grad_scores_NK: torch.Tensor) -> tuple[Any, ...]:
        # Also where nothing here needs the result: the peers do.
        grad_x_TD = reduce_scatter(grad_x_ND, ctx.group)[: ctx.num_tokens]
        grad_scores_TK = reduce_scatter(grad_scores_NK, ctx.group)[: ctx.num_tokens]
        return None, grad_x_TD, grad_scores_TK.to(ctx.score_dtype), None, None


class _ScatterSums(torch.autograd.Function):
    """Reduce-scatter of all ranks' parts of the sums; its backward is the all-gather of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        sums_ND: torch.Tensor,
        num_tokens: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        del anchor
        mine = reduce_scatter(sums_ND, group)
        ctx.group, ctx.longest = group, len(mine)
        return mine[:num_tokens].clone() if num_tokens < len(mine) else mine

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[Any, ...]:
        grad_ND = all_gather(_fill_up(grad_TD, ctx.longest), ctx.group)
        return None, grad_ND, None, None


def _fill_up(rows: torch.Tensor, number: int) -> torch.Tensor:
    return rows if len(rows) == number else F.pad(rows, (0, 0, 0, number - len(rows)))


def all_gather(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return `(W * n, ...)`, the equally many rows of every rank, in rank order."""
    if group is None or dist.get_world_size(group) == 1:
        return rows
    out = rows.new_empty(dist.get_world_size(group) * len(rows), *rows.shape[1:])
    # Renamed in torch 2.13; the older name warns there.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, rows.contiguous(), group=group)
    return out


def reduce_scatter(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return `(n, ...)`: part r of all ranks' `(W * n, ...)` on rank r, added up."""
    if group is None or dist.get_world_size(group) == 1:
        return rows
    out = rows.new_empty(len(rows) // dist.get_world_size(group), *rows.shape[1:])
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce(out, rows.contiguous(), group=group)
    return out
