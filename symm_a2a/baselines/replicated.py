"""Replicated tokens: every rank has all tokens and the same router result, and runs its own experts.

    dispatch    rows of this rank's experts, by a map of all experts to those (-1 for another rank's); nothing
                is sent
    combine     this rank's part of every token's weighted sum; all-reduce (sum)

What expert parallelism is where tokens are not sharded: with tensor parallel attention, or a data parallel
size of one. Tokens, scores and ids must be the same on every rank, bit for bit: `check_replicated` looks.

Gradients follow the trainer's convention for replicated activations: every rank computes the same loss from
the same output. So the gradient that reaches a combine is whole, and the same, on every rank, and its
backward sends nothing; what a rank's experts make of it is a part of the gradients of tokens and scores, and
the backward of a dispatch all-reduces them. `x.grad` and `scores.grad` are then complete on every rank, equal
to those of a single rank with all the experts: do not add them up over the ranks again, nor the gradients of
what lies before the layer. An expert's weights have their whole gradient on their rank.

A backward exists on every rank by the means told in `all_gather`. The host waits once in a dispatch, for the
counts, which say whether the ids are in range too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from symm_a2a.baselines.all_gather import all_gather
from symm_a2a.baselines.base import BaselineDispatcher, sort_by_expert
from symm_a2a.baselines.own_experts import OwnSlots, find_slots
from symm_a2a.errors import InputError
from symm_a2a.memory.group import exchange
from symm_a2a.placement import Placement


@dataclass(frozen=True, eq=False)
class ReplicatedHandle:
    """What a combine needs from its dispatch; it may be combined more than once.

    Attributes:
        sent: rows sent to each rank: none.
        slots: of this rank's experts.
        scores: fp32 (fp64 for fp64 rows) `(T, K)`, differentiable.
    """

    sent: list[int]
    slots: OwnSlots
    scores: torch.Tensor

    @property
    def num_rows(self) -> int:
        """R of the dispatch, padding included."""
        return self.slots.num_rows


class ReplicatedTokenDispatcher(BaselineDispatcher[ReplicatedHandle]):
    """Every rank dispatches the same tokens to its own experts; a combine adds up all ranks' parts.

    See `BaselineDispatcher`, and above for the gradients. T counts the tokens of all, and so does
    `cfg.max_tokens_per_rank`; the origin of every row is the group. In a combine each rank adds up its
    experts' rows in fp32 (fp64 for fp64 rows) and rounds to `cfg.dtype`; the ranks' parts are added up by the
    collective, in that dtype. Of a placement's replicas all ranks choose the one that a token of rank 0 would
    go to, by the shares, whatever `prefer_local` says.

    Example:
        >>> from symm_a2a.config import EPConfig
        >>> cfg = EPConfig(
        ...     num_experts=2, top_k=1, hidden_dim=1, max_tokens_per_rank=4, dtype=torch.float32
        ... )
        >>> x, scores, ids = torch.tensor([[1.0], [2.0]]), torch.full((2, 1), 0.5), torch.tensor([[1], [0]])
        >>> with ReplicatedTokenDispatcher(cfg, device="cpu") as dispatcher, torch.no_grad():
        ...     rows, counts, handle = dispatcher.dispatch(x, scores, ids)
        ...     out = dispatcher.combine(rows, handle)
        >>> rows.tolist(), counts.tolist(), out.tolist()
        ([[2.0], [1.0]], [1, 1], [[0.5], [1.0]])
    """

    handle_type = ReplicatedHandle

    def _read(self, placement: Placement) -> tuple[torch.Tensor, int]:
        # All ranks choose the same replica of a slot's expert. A token is on all of them, and near to none.
        return replace(placement, prefer_local=False).table(0).to(self.device), placement.first_number(0)

    def check_replicated(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, topk_ids_TK: torch.Tensor
    ) -> None:
        """Raise, on every rank, unless all ranks have the same tensors, bit for bit.

        Collective, and not cheap: all three tensors of the first rank are sent to all, and the host waits.

        Raises:
            InputError: another shape, dtype or content than the first rank's.
        """
        if self.group is None or self.world_size == 1:
            return
        names, tensors = ("x_TD", "scores_TK", "topk_ids_TK"), (x_TD, scores_TK, topk_ids_TK)
        kinds = exchange(
            self.group,
            "; ".join(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in zip(names, tensors, strict=True)),
        )
        for rank, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise InputError(
                    f"expected the same tokens on every rank, got {kinds[0]} on rank 0 and {kind} on rank "
                    f"{rank}"
                )
        same = []
        for tensor in tensors:
            mine = tensor.detach().contiguous()
            first = mine.clone()
            dist.broadcast(first, dist.get_global_rank(self.group, 0), group=self.group)
            same.append((first.view(torch.uint8) == mine.view(torch.uint8)).all())
        for rank, equal in enumerate(all_gather(torch.stack(same)[None].int(), self.group).tolist()):
            wrong = [name for name, one in zip(names, equal, strict=True) if not one]
            if wrong:
                raise InputError(
                    f"expected the same tokens on every rank, got other {' and '.join(wrong)} on rank {rank} "
                    "than on rank 0"
                )

    def _dispatch(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, places_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, ReplicatedHandle]:
        cfg, L = self.cfg, self._places_of_rank
        ids_N, slot_N, start = sort_by_expert(places_TK.reshape(-1), self._num_places)
        start_host = start.tolist()
        self._require_in_range(ids_N, start_host)
        mine = slice(1 + self.rank * L, 2 + (self.rank + 1) * L)
        mine_host = start_host[mine]
        slots, counts_L = find_slots(
            slot_N[mine_host[0] : mine_host[-1]], start[mine].diff(), mine_host, len(x_TD), cfg.top_k,
            cfg.pad_multiple,
        )  # fmt: skip
        x_TD, scores_TK = _Enter.apply(self._anchor, x_TD, scores_TK.to(self._score_dtype), self.group)
        handle = ReplicatedHandle([0] * self.world_size, slots, scores_TK)
        return slots.take_rows(x_TD), counts_L, handle

    def _combine(self, y_RD: torch.Tensor, handle: ReplicatedHandle) -> torch.Tensor:
        sums_TD = handle.slots.sum_rows(y_RD, handle.scores)
        return _Leave.apply(sums_TD, self.group)


class _Enter(torch.autograd.Function):
    """Nothing; its backward adds up the gradients that all ranks' experts give."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del anchor
        ctx.group = group
        # Scores are kept by the handle until the combine: the caller may overwrite its own.
        return x_TD.view_as(x_TD), scores_TK.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x_TD: torch.Tensor, grad_scores_TK: torch.Tensor) -> tuple[Any, ...]:
        # Also where nothing here needs the result: the peers do.
        return None, _all_reduce(grad_x_TD, ctx.group), _all_reduce(grad_scores_TK, ctx.group), None


class _Leave(torch.autograd.Function):
    """All-reduce of all ranks' parts of the sums; each gets the whole gradient in its backward."""

    @staticmethod
    def forward(ctx: Any, sums_TD: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        del ctx
        return _all_reduce(sums_TD, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: torch.Tensor) -> tuple[Any, ...]:
        del ctx
        return grad_TD, None


def _all_reduce(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the sum of all ranks' parts."""
    if group is None or dist.get_world_size(group) == 1:
        return part
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
