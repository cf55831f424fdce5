"""The token dispatcher: what a trainer calls."""

from __future__ import annotations

import torch
from torch import Tensor

from symm_a2a import ops
from symm_a2a.arena_share import ArenaShare
from symm_a2a.eager import eager
from symm_a2a.errors import InputError
from symm_a2a.exchange import Routing, join_barrier, join_counts, launch_barrier, launch_counts
from symm_a2a.handle import Handle, PendingAgain, PendingCombine, PendingDispatch
from symm_a2a.kernels.channel import Kind
from symm_a2a.ops.split import (
    AgainState,
    CombineState,
    DispatchState,
    start_again,
    start_combine,
    start_dispatch,
)
from symm_a2a.validation import check_again, check_combine, check_dispatch, check_ids
from symm_a2a.warmup import run_everything


class SymmTokenDispatcher(ArenaShare):
    """Moves token rows to the ranks of their experts and back, through symmetric memory.

    Every rank of the group runs every exchange in the same order, forward and backward, also
    with zero tokens. Results are ordinary tensors; no later call changes them.

    Args:
        cfg: sizes and policies, equal on every rank.
        group: the expert-parallel group; None for the default group, or a group of one where
            torch.distributed is not initialised. Construction is collective over it.
        device: where rows live; None for the current CUDA device, or for the CPU where there is none
            or the group's backend is gloo.
        backend: `"cuda"`, `"host"` or `"virtual"`; None chooses by device and group.
        link: to emulate between ranks that are CPU processes, so that it can be seen what hides under
            what; None for none.
        arena: another dispatcher's arena, to share its memory and lanes; `group`, `device`, `backend`
            and `link` then come with it, and construction is not collective. Its owner closes it.

    Raises:
        ConfigError: a size does not fit the group or the arena, or the ranks disagree.
        EnvironmentUnsupportedError: the backend cannot work here.

    Example:
        >>> from symm_a2a import EPConfig
        >>> cfg = EPConfig(num_experts=2, top_k=1, hidden_dim=2, max_tokens_per_rank=4, dtype=torch.float32)
        >>> with SymmTokenDispatcher(cfg, device="cpu") as dispatcher:
        ...     x, scores, ids = torch.eye(2), torch.tensor([[1.0], [0.5]]), torch.tensor([[1], [0]])
        ...     rows, tokens_per_expert, handle = dispatcher.dispatch(x, scores, ids)
        ...     out = dispatcher.combine(rows * 10, handle)
        >>> rows.tolist(), tokens_per_expert.tolist(), out.tolist()
        ([[0.0, 1.0], [1.0, 0.0]], [1, 1], [[10.0, 0.0], [0.0, 5.0]])
    """

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank, replicas included: L, unless a placement says otherwise."""
        placement = self.cfg.placement
        if placement is None:
            return self.arena.layout.num_local_experts
        return len(placement.experts_of_rank[self.rank])

    def dispatch(
        self,
        x_TD: Tensor,
        scores_TK: Tensor,
        topk_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor | None = None,
        *,
        lane: int | None = None,
    ) -> tuple[Tensor, Tensor, Handle]:
        """Send every token to the ranks of its experts, and return the rows that arrive here.

        Args:
            x_TD: token rows of `cfg.dtype`; T may differ between ranks and calls, and be 0.
            scores_TK: the weight of each slot, any floating dtype; applied by `combine`, in
                fp32 (fp64 for fp64 rows).
            topk_ids_TK: int32 or int64, the expert of each slot; -1 masks a slot. The same
                expert twice counts twice.
            num_local_tokens_per_expert_E: accepted as trainers pass it, and not needed.
            lane: which lane to use, the same on every rank; None for 0, or in a `Domino` run for the
                micro-batch's own.

        Returns:
            Rows `(R, D)` in (expert, origin rank, origin slot) order, each expert's padded with
            zero rows to `cfg.pad_multiple`; int32 `(L,)`, the rows of each local expert, pads
            included; and the handle for `combine`. R is what arrived with `capacity="exact"`,
            else the static capacity, with zeros behind the last expert's rows.

        Raises:
            InputError: a wrong shape, dtype or device, or more tokens than the capacity of a
                rank; no peer has been touched.
            ExpertIdError: an id out of range; nothing was sent for that slot. The peers have their
                rows and go on to combine, which this rank, without a handle, cannot: give up the
                step on every rank.
            LaneBusyError: the lane has an exchange in flight.
            ExchangeError: a peer did not take part, or runs another operation.
            ClosedError: the dispatcher was closed.
        """
        self._require_open()
        check_dispatch(self.cfg, self.device, x_TD, scores_TK, topk_ids_TK, num_local_tokens_per_expert_E)
        number = self._lanes[self._index(lane)]
        rows_RD, tokens_per_expert_L, *routing, token = ops.dispatch(
            x_TD, scores_TK.to(self.arena.layout.score_dtype), topk_ids_TK, self.arena.anchor,
            self._ledger.card, self._ledger.table, number,
            self.world_size, self.arena.layout.num_local_experts, self.cfg.max_tokens_per_rank,
            self._capacity, self.cfg.pad_multiple,
        )  # fmt: skip
        handle = Handle(Routing(*routing), [token], rows_RD.shape[0], self.cfg.pad_multiple, number)
        return rows_RD, tokens_per_expert_L[: self.num_local_experts], handle

    def combine(self, y_RD: Tensor, handle: Handle, x_TD: Tensor | None = None) -> Tensor:
        """Return each token's weighted sum of expert outputs to its origin.

        Args:
            y_RD: one output row for each row of the dispatch, of `cfg.dtype`.
            handle: of the dispatch; it may be combined again.
            x_TD: accepted as trainers pass it, and not needed.

        Returns:
            `(T, D)`: `sum_k score[t, k] * y[row of (t, k)]`, summed in fp32 (fp64 for fp64
            rows), rounded once per rank it comes from and once at the end. Masked and dropped
            slots add nothing.

        Raises:
            InputError: a wrong shape, dtype or device; no peer has been touched.
            LaneBusyError, ExchangeError, ClosedError: as for `dispatch`.
        """
        del x_TD
        self._require_open()
        self._check_combine(y_RD, handle)
        out_TD, token = ops.combine(
            y_RD, *handle.routing, self._token(handle), handle.lane, handle.pad_multiple
        )
        self._keep(token)
        return out_TD

    def dispatch_again(self, x_TD: Tensor, handle: Handle) -> Tensor:
        """Send other rows of the same tokens where a dispatch sent the first ones.

        Needs no ids and no scores, sends no counts and no headers, and the host waits for nothing, whatever
        the capacity. `combine` takes what the experts make of these rows with the same handle. Its backward
        is a part of the dispatch's: gradients of both are asked for at once, and once that has run the handle
        serves without gradients alone.

        Args:
            x_TD: as many rows as were dispatched, of `cfg.dtype`.
            handle: of the dispatch; the exchange runs in its lane.

        Returns:
            `(R, D)`: each slot's row in the place where the dispatch put it, zeros where that had zeros;
            differentiable.

        Raises:
            InputError: a wrong shape, dtype, device, or a handle of another arena.
            LaneBusyError, ExchangeError, ClosedError: as for `dispatch`.
        """
        self._require_open()
        self._check_again(x_TD, handle)
        rows_RD, token = ops.dispatch_again(
            x_TD, *handle.routing, self._token(handle), handle.lane, handle.num_rows, handle.pad_multiple
        )
        self._keep(token)
        handle.follow(token)
        return rows_RD

    @eager
    def dispatch_async(
        self,
        x_TD: Tensor,
        scores_TK: Tensor,
        topk_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor | None = None,
        *,
        lane: int | None = None,
    ) -> PendingDispatch:
        """Launch a dispatch; `join` on the result gives what `dispatch` returns.

        Between the two anything may run that does not use the same lane; in the backward the
        gap is there too. On a GPU the launch runs on the lane's own stream, and `join` makes the
        current stream wait for it. Eager mode only. Arguments and errors are those of `dispatch`.
        """
        self._require_open()
        check_dispatch(self.cfg, self.device, x_TD, scores_TK, topk_ids_TK, num_local_tokens_per_expert_E)
        on, number = self._lane(lane), self._lanes[self._index(lane)]
        state = DispatchState(
            on, self.arena.anchor, self._capacity, self.cfg.pad_multiple,
            self._ledger.table, self._ledger.card,
        )  # fmt: skip
        flying = start_dispatch(state, x_TD, scores_TK.to(on.layout.score_dtype), topk_ids_TK)
        return PendingDispatch(state, flying, number, self.num_local_experts)

    @eager
    def combine_async(self, y_RD: Tensor, handle: Handle, x_TD: Tensor | None = None) -> PendingCombine:
        """Launch a combine; `join` on the result gives what `combine` returns.

        Arguments and errors are those of `combine`; eager mode only.
        """
        del x_TD
        self._require_open()
        self._check_combine(y_RD, handle)
        state = CombineState(self._lane_of(handle), self.arena.anchor.detach(), handle.pad_multiple)
        flying = start_combine(state, y_RD, handle.routing, self._token(handle))
        return PendingCombine(state, flying)

    @eager
    def dispatch_again_async(self, x_TD: Tensor, handle: Handle) -> PendingAgain:
        """Launch a second dispatch; `join` on the result gives what `dispatch_again` returns.

        Arguments and errors are those of `dispatch_again`; eager mode only.
        """
        self._require_open()
        self._check_again(x_TD, handle)
        state = AgainState(
            self._lane_of(handle), self.arena.anchor.detach(), handle.routing, handle.num_rows,
            handle.pad_multiple,
        )  # fmt: skip
        return PendingAgain(state, start_again(state, x_TD, self._token(handle)), handle)

    @eager
    def barrier(self, *, lane: int | None = None) -> None:
        """Wait until every rank has called this; on a GPU, the device waits. One launch there.

        It orders nothing but itself, and uses the lane as an exchange does.

        Raises:
            LaneBusyError, ExchangeError, ClosedError: as for `dispatch`.
        """
        self._require_open()
        on = self._lane(lane)
        launch_barrier(on)
        join_barrier(on)

    @eager
    def broadcast_counts(self, topk_ids_TK: Tensor, *, lane: int | None = None) -> Tensor:
        """Exchange the numbers of slots that each rank has for each expert, and no rows.

        Args:
            topk_ids_TK: as for `dispatch`.
            lane: as for `dispatch`.

        Returns:
            int32 `(W, E)`: slots of each rank for each expert, equal on every rank.

        Raises:
            InputError, ExpertIdError, LaneBusyError, ExchangeError, ClosedError: as for `dispatch`.
        """
        self._require_open()
        check_ids(self.cfg, self.device, topk_ids_TK)
        on = self._lane(lane)
        counts_WE = launch_counts(on, topk_ids_TK, self._ledger.table, self._ledger.card)
        join_counts(on, counts_WE, self._ledger.card)
        placement = self.cfg.placement
        if placement is None or self._ledger.table is None:
            return counts_WE
        return placement.of_experts(counts_WE)

    @eager
    def warmup(self) -> None:
        """Run every operation once in every lane, so that all kernels are compiled.

        Collective. Call it before capturing a graph or measuring time.
        """
        self._require_open()
        for index, lane in enumerate(self.arena.lanes):
            lane.warm_up()
            run_everything(self, index)

    def require_dispatchable(
        self, x_TD: Tensor, scores_TK: Tensor, topk_ids_TK: Tensor, lane: int | None
    ) -> None:
        """Raise what a dispatch of these arguments would, and launch nothing."""
        self._require_open()
        check_dispatch(self.cfg, self.device, x_TD, scores_TK, topk_ids_TK)
        self._lane(lane).require_idle(Kind.DISPATCH)

    def require_combinable(self, y_RD: Tensor, handle: Handle) -> None:
        """Raise what a combine of these arguments would, and launch nothing."""
        self._require_open()
        self._check_combine(y_RD, handle)
        self._lane_of(handle).require_idle(Kind.COMBINE)

    def require_dispatchable_again(self, x_TD: Tensor, handle: Handle) -> None:
        """Raise what a second dispatch of these arguments would, and launch nothing."""
        self._require_open()
        self._check_again(x_TD, handle)
        self._lane_of(handle).require_idle(Kind.DISPATCH_AGAIN)

    def _token(self, handle: Handle) -> Tensor:
        """Return what ties an exchange to its dispatch in autograd's graph.

        Of a dispatch without gradients that is the anchor, so that a backward runs on every rank, also where
        the rows need no gradient. Of one in inference mode nothing can be saved for a backward.
        """
        token = handle.token
        infers = not torch.compiler.is_compiling() and token.is_inference()
        return token if token.requires_grad or infers else self.arena.anchor

    def _keep(self, token: Tensor) -> None:
        """Keep a compiler from dropping an exchange whose result a rank does not use, or has no tokens of.

        Without a backward nothing reads the token; a mutation cannot be dropped.
        """
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            self.arena.sink.copy_(token)

    def _check_again(self, x_TD: Tensor, handle: Handle) -> None:
        self._check_handle(handle)
        check_again(self.cfg, self.device, x_TD, handle.num_tokens)

    def _check_combine(self, y_RD: Tensor, handle: Handle) -> None:
        self._check_handle(handle)
        check_combine(self.cfg, self.device, y_RD, handle.num_rows)

    def _check_handle(self, handle: Handle) -> None:
        if not isinstance(handle, Handle):
            raise InputError(f"expected the handle of a dispatch, got {type(handle).__name__}")
        if handle.lane not in self._lanes:
            raise InputError(
                "expected a handle of this arena, got one of a dispatcher that has another arena"
            )
