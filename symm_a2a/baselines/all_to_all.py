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

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from symm_a2a.config import EPConfig
from symm_a2a.errors import ClosedError, ConfigError, ExpertIdError, InputError, JoinedTwiceError
from symm_a2a.validation import check_combine, check_dispatch

Result = TypeVar("Result")


class _Joinable(Generic[Result]):
    """An exchange that is already done, in no lane; `join` gives its result, once."""

    lane = None

    def __init__(self, result: Result) -> None:
        self._result: Result | None = result

    def join(self) -> Result:
        """Return the result.

        Raises:
            JoinedTwiceError: it was joined before.
        """
        if self._result is None:
            raise JoinedTwiceError("expected one join of an exchange, got a second")
        result, self._result = self._result, None
        return result


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


class AllToAllTokenDispatcher:
    """Dispatch and combine by variable all-to-all of one row per slot, over NCCL or gloo.

    Rows come in the order (expert, origin rank, origin slot), and are ordinary tensors. Every rank of
    the group must make the same calls in the same order, also with zero tokens; in the backward too,
    which autograd sees to if every rank's loss depends on what `combine` gave it.

    Args:
        cfg: sizes and dtype, equal on every rank; `capacity` must be `"exact"`.
        group: of the ranks that share the experts; None is the world, or where `torch.distributed` is
            not initialised, this process alone, without communication.
        device: where the rows live; None is the current CUDA device if the group's backend has NCCL
            (without a group: if there is one), and otherwise the CPU.

    Raises:
        ConfigError: a static capacity; or experts that do not divide among the ranks.

    Example:
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

    def __init__(
        self,
        cfg: EPConfig,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Settle on the group and the device; nothing is sent."""
        if cfg.capacity != "exact":
            raise ConfigError(
                f'expected capacity="exact", the only one AllToAllTokenDispatcher has, got {cfg.capacity!r}'
            )
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self.cfg = cfg
        self.group = group
        self.world_size = dist.get_world_size(group) if group is not None else 1
        layout = cfg.layout(self.world_size)
        self.num_local_experts = layout.num_local_experts
        self.device = _resolve_device(group, device)
        self._score_dtype = layout.score_dtype
        self._closed = False
        # Explicit dtype and device, and no inference mode: trainers build models under any of these.
        with torch.inference_mode(False):
            self._anchor = torch.zeros(1, dtype=torch.float32, device=self.device, requires_grad=True)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor | None = None,
        *,
        lane: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, AllToAllHandle]:
        """Send every token to its experts' ranks; the host waits for the counts.

        Args:
            x_TD: `(T, D)` of `cfg.dtype`, any strides, T from 0 to `cfg.max_tokens_per_rank`.
            scores_TK: `(T, K)` of any floating point dtype; `combine` weighs with them.
            topk_ids_TK: `(T, K)` of int32 or int64, an expert per slot; -1 masks the slot. The same
                expert twice in a token counts twice.
            num_local_tokens_per_expert_E: `(E,)`; not read, the ids say the same.
            lane: taken so that dispatchers can be swapped; collectives know no lanes.

        Returns:
            rows: `(R, D)` of `cfg.dtype`; it requires grad wherever grad mode is on.
            tokens per expert: int32 `(L,)`, padding rows included; their sum is R.
            handle: for `combine`.

        Raises:
            ClosedError: the dispatcher was closed.
            InputError: a shape, dtype or device that does not fit.
            ExpertIdError: an id outside `[-1, E)`; nothing was sent.
        """
        self._check_open()
        check_dispatch(self.cfg, self.device, x_TD, scores_TK, topk_ids_TK, num_local_tokens_per_expert_E)
        num_experts, num_local, ranks = self.cfg.num_experts, self.num_local_experts, self.world_size

        ids_N, slot_N = topk_ids_TK.reshape(-1).long().sort(stable=True)
        # Where each id from -1 to E would start in the sorted ids: the first says whether there are
        # smaller ids, the last whether there are larger ones.
        candidates = torch.arange(-1, num_experts + 1, dtype=torch.int64, device=self.device)
        start = torch.searchsorted(ids_N, candidates)
        start_host = start.tolist()
        if start_host[0] != 0 or start_host[-1] != len(ids_N):
            wrong = ids_N[0 if start_host[0] != 0 else -1].item()
            raise ExpertIdError(f"expected topk_ids_TK in [-1, {num_experts}), got {wrong}")
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
        pad = self.cfg.pad_multiple
        padded_L = (counts_WL.sum(0) + pad - 1) // pad * pad
        *received, num_rows = torch.cat([received, padded_L.sum(0, keepdim=True)]).tolist()
        row_Q = _expert_major(counts_WL, padded_L, sum(received))

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

    def combine(
        self, y_RD: torch.Tensor, handle: AllToAllHandle, x_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Send the experts' rows back; add up each token's, weighted by its scores.

        A row times its score is taken in fp32 (fp64 for fp64 rows) and rounded to `cfg.dtype`. The sum
        over a token's slots is `index_add`'s in that dtype, as in trainers: on CUDA rounded at every
        step, in any order; on the CPU rounded once.

        Args:
            y_RD: `(R, D)` of `cfg.dtype`, any strides, a row for each that `dispatch` gave.
            handle: what that `dispatch` gave.
            x_TD: not read; taken because some trainers' dispatchers need it.

        Returns:
            `(T, D)` of `cfg.dtype`; zeros for a token whose slots are all masked.

        Raises:
            ClosedError: the dispatcher was closed.
            InputError: a shape, dtype or device that does not fit, or another dispatcher's handle.
        """
        self._check_open()
        if not isinstance(handle, AllToAllHandle):
            raise InputError(f"expected the handle that dispatch gave, got {type(handle).__name__}")
        check_combine(self.cfg, self.device, y_RD, handle.num_rows)
        anchor = self._anchor + handle.token
        y_SD, _ = _AllToAll.apply(
            anchor, y_RD.index_select(0, handle.received_rows), handle.received, handle.sent, self.group
        )
        weighted_SD = (y_SD.to(self._score_dtype) * handle.sent_scores[:, None]).to(self.cfg.dtype)
        out_TD = weighted_SD.new_zeros(handle.num_tokens, self.cfg.hidden_dim)
        return out_TD.index_add(0, handle.sent_tokens, weighted_SD)

    def dispatch_async(
        self,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor | None = None,
        *,
        lane: int | None = None,
    ) -> _Joinable[tuple[torch.Tensor, torch.Tensor, AllToAllHandle]]:
        """Run `dispatch` and return an object whose `join()` gives its result, once.

        Nothing is left to overlap with: it is here so that dispatchers can be swapped.
        """
        return _Joinable(
            self.dispatch(x_TD, scores_TK, topk_ids_TK, num_local_tokens_per_expert_E, lane=lane)
        )

    def combine_async(
        self, y_RD: torch.Tensor, handle: AllToAllHandle, x_TD: torch.Tensor | None = None
    ) -> _Joinable[torch.Tensor]:
        """Run `combine` and return an object whose `join()` gives its result, once."""
        return _Joinable(self.combine(y_RD, handle, x_TD))

    @property
    def num_lanes(self) -> int:
        """Exchanges that may be in flight at once, as the config has it; here they end where they begin."""
        return self.cfg.num_lanes

    def in_lane(self, lane: int) -> AbstractContextManager[None]:
        """Do nothing: there are no lanes here."""
        del lane
        return nullcontext()

    def require_idle(self, lane: int | None = None) -> None:
        """Raise `ClosedError` after `close`; nothing is ever in flight here."""
        del lane
        self._check_open()

    def give_up(self, reason: str) -> None:
        """Refuse further use; peers that wait for this rank wait as long as the group's own timeout."""
        del reason
        self.close()

    def warmup(self) -> None:
        """Run one step, forward and backward, that sends a row to every rank if the capacity allows.

        Collective: every rank of the group must call it. Connections and kernels exist afterwards.

        Raises:
            ClosedError: the dispatcher was closed.
        """
        cfg = self.cfg
        num_tokens = min(cfg.max_tokens_per_rank, -(-self.world_size // cfg.top_k))
        slots = torch.arange(num_tokens * cfg.top_k, dtype=torch.int64, device=self.device)
        ids_TK = (slots * self.num_local_experts % cfg.num_experts).view(num_tokens, cfg.top_k)
        with torch.inference_mode(False), torch.enable_grad():
            x_TD = torch.zeros(
                num_tokens, cfg.hidden_dim, dtype=cfg.dtype, device=self.device, requires_grad=True
            )
            scores_TK = torch.zeros(
                num_tokens, cfg.top_k, dtype=self._score_dtype, device=self.device, requires_grad=True
            )
            rows_RD, _, handle = self.dispatch(x_TD, scores_TK, ids_TK)
            self.combine(rows_RD, handle).sum().backward()

    def close(self) -> None:
        """Refuse further use; the group stays the caller's. Closing twice is allowed."""
        self._closed = True

    def __enter__(self) -> AllToAllTokenDispatcher:
        """Return the dispatcher; it is closed at the end of the block."""
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the dispatcher."""
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("expected an open dispatcher, got one that was closed")


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


def _expert_major(counts_WL: torch.Tensor, padded_L: torch.Tensor, num_received: int) -> torch.Tensor:
    """Return int64 `(Q,)`: the row of each slot received, which come in (origin, expert, slot) order.

    Args:
        counts_WL: int64, slots from each origin for each local expert.
        padded_L: int64, rows of each local expert.
        num_received: Q, the sum of `counts_WL`; given, so that the host need not wait for it.

    Example:
        >>> _expert_major(torch.tensor([[1, 2], [2, 0]]), torch.tensor([4, 2]), 5).tolist()
        [0, 4, 5, 1, 2]
    """
    expert_start_L = padded_L.cumsum(0) - padded_L
    row_WL = expert_start_L + counts_WL.cumsum(0) - counts_WL
    counts = counts_WL.flatten()
    slot_WL = counts.cumsum(0) - counts
    shift_Q = (row_WL.flatten() - slot_WL).repeat_interleave(counts, output_size=num_received)
    return torch.arange(num_received, dtype=torch.int64, device=counts.device) + shift_Q


def _resolve_device(group: dist.ProcessGroup | None, device: torch.device | str | None) -> torch.device:
    """Return the device with its index, or the one that fits the group."""
    if device is None:
        nccl = group is None or "nccl" in dist.get_backend_config(group)
        device = "cuda" if nccl and torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cuda" and resolved.index is None:
        resolved = torch.device("cuda", torch.cuda.current_device())
    return resolved
