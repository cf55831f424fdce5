"""The standard all-to-all, over collectives: the reference of every trainer.

    dispatch    stable sort of the slots by expert; all-to-all of the counts; all-to-all of the rows,
                one per slot; from rank-major to expert-major order
    combine     back to rank-major order; all-to-all back; times the score; added up per token

The host waits twice in a dispatch: for this rank's counts, which say whether the ids are in range and
how to split what is sent, and for the counts received. Nothing waits in a combine or in a backward.

How a backward exists on every rank: a collective that one rank leaves out hangs the others, but a rank
may have no tokens, no rows, or an input that needs no gradient. So the all-to-all is an autograd
function that also takes a one-element leaf, the anchor, which requires grad: wherever grad mode is on,
its output does too. It gives a one-element token beside the rows, and the dispatch's token enters the
combine: the backward of a combine therefore reaches the dispatch also where the experts' output does
not depend on their input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from symm_a2a.baselines.base import BaselineDispatcher, expert_major, pad_counts, sort_by_expert


@dataclass(frozen=True, eq=False)
class AllToAllHandle:
    """What a combine needs from its dispatch; it may be combined more than once.

    Attributes:
        num_tokens: T of the dispatch.
        num_rows: R of the dispatch, padding included.
        sent: slots sent to each rank, in rank order; their sum is S.
        received: slots received from each rank; their sum is Q.
        sent_tokens: int64 `(S,)`, the token of each sent slot, in the order sent: (expert, slot).
        sent_scores: fp32 (fp64 for fp64 rows) `(S,)`, the score of each, differentiable.
        received_rows: int64 `(Q,)`, which row each received slot is, in the order received.
        token: one element; carries the dependence of a combine's backward on the dispatch.
    """

    num_tokens: int
    num_rows: int
    sent: list[int]
    received: list[int]
    sent_tokens: torch.Tensor
    sent_scores: torch.Tensor
    received_rows: torch.Tensor
    token: torch.Tensor


class AllToAllTokenDispatcher(BaselineDispatcher[AllToAllHandle]):
    """Dispatch and combine by variable all-to-all of one row per slot; see `BaselineDispatcher`.

    In a combine, a row times its score is taken in fp32 (fp64 for fp64 rows) and rounded to `cfg.dtype`.
    The sum over a token's slots is `index_add`'s in that dtype, as in trainers: on CUDA rounded at every
    step, in any order; on the CPU rounded once.

    Example:
        >>> from symm_a2a.config import EPConfig
        >>> cfg = EPConfig(
        ...     num_experts=2, top_k=1, hidden_dim=1, max_tokens_per_rank=4, dtype=torch.float32
        ... )
        >>> x, scores, ids = torch.tensor([[1.0], [2.0]]), torch.full((2, 1), 0.5), torch.tensor([[1], [0]])
        >>> with AllToAllTokenDispatcher(cfg, device="cpu") as dispatcher, torch.no_grad():
        ...     rows, counts, handle = dispatcher.dispatch(x, scores, ids)
        ...     out = dispatcher.combine(rows, handle)
        >>> rows.tolist(), counts.tolist(), out.tolist()
        ([[2.0], [1.0]], [1, 1], [[0.5], [1.0]])
    """

    handle_type = AllToAllHandle

    def _dispatch(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, places_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, AllToAllHandle]:
        num_local, ranks = self._places_of_rank, self.world_size
        ids_N, slot_N, start = sort_by_expert(places_TK.reshape(-1), self._num_places)
        start_host = start.tolist()
        self._require_in_range(ids_N, start_host)
        sent = [
            start_host[1 + (rank + 1) * num_local] - start_host[1 + rank * num_local] for rank in range(ranks)
        ]
        slot_S = slot_N[start_host[1] :]
        token_S = slot_S // self.cfg.top_k

        counts_WL = start[1:].diff().view(ranks, num_local)
        if ranks > 1:
            # (destination rank, expert) becomes (origin rank, expert).
            counts_WL = _exchange(counts_WL, [1] * ranks, [1] * ranks, self.group)
        received = counts_WL.sum(1)
        padded_L = pad_counts(counts_WL.sum(0), self.cfg.pad_multiple)
        *received, num_rows = torch.cat([received, padded_L.sum(0, keepdim=True)]).tolist()
        row_Q = expert_major(counts_WL, padded_L, sum(received))

        rows_QD, token = _AllToAll.apply(
            self._anchor, x_TD.index_select(0, token_S), sent, received, self.group
        )
        rows_RD = rows_QD.new_zeros(num_rows, self.cfg.hidden_dim).index_copy(0, row_Q, rows_QD)
        handle = AllToAllHandle(
            num_tokens=x_TD.shape[0],
            num_rows=num_rows,
            sent=sent,
            received=received,
            sent_tokens=token_S,
            sent_scores=scores_TK.reshape(-1).index_select(0, slot_S).to(self._score_dtype),
            received_rows=row_Q,
            token=token,
        )
        return rows_RD, padded_L.to(torch.int32), handle

    def _combine(self, y_RD: torch.Tensor, handle: AllToAllHandle) -> torch.Tensor:
        anchor = self._anchor + handle.token
        y_SD, _ = _AllToAll.apply(
            anchor, y_RD.index_select(0, handle.received_rows), handle.received, handle.sent, self.group
        )
        weighted_SD = (y_SD.to(self._score_dtype) * handle.sent_scores[:, None]).to(self.cfg.dtype)
        out_TD = weighted_SD.new_zeros(handle.num_tokens, self.cfg.hidden_dim)
        return out_TD.index_add(0, handle.sent_tokens, weighted_SD)


class _AllToAll(torch.autograd.Function):
    """Variable all-to-all of rows; its backward is the reverse all-to-all, always."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        rows_SD: torch.Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows_SD, sent, received, group), torch.zeros_like(anchor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_QD: torch.Tensor, grad_token: torch.Tensor) -> tuple[Any, ...]:
        # Also where nothing here needs the result: the peers do.
        grad_SD = _exchange(grad_QD, ctx.received, ctx.sent, ctx.group)
        # A gradient of zeros, not None: what gave this function its anchor is to be run in any case.
        return grad_token, grad_SD, None, None, None


def _exchange(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the rows that the ranks sent to this one, in rank order.

    Args:
        rows: `(sum(sent), ...)`, those for each rank one after another.
        sent: rows for each rank.
        received: rows from each rank.
        group: of the ranks; a group of one does not communicate.
    """
    if group is None or dist.get_world_size(group) == 1:
        return rows
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
