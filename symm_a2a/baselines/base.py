"""What the baselines share: how they live, what they check, and where an expert's rows lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from symm_a2a.config import EPConfig
from symm_a2a.errors import ClosedError, ConfigError, ExpertIdError, InputError, JoinedTwiceError
from symm_a2a.memory import require_agreement, require_device
from symm_a2a.placement import Placement, look_up
from symm_a2a.validation import check_combine, check_dispatch

Result = TypeVar("Result")


class BaselineHandle(Protocol):
    """What any baseline's dispatch leaves for its combine."""

    @property
    def num_rows(self) -> int:
        """R of the dispatch, padding included."""
        ...

    @property
    def sent(self) -> list[int]:
        """Rows that the dispatch sent to each rank, in rank order, this one included."""
        ...


HandleT = TypeVar("HandleT", bound=BaselineHandle)


class Joinable(Generic[Result]):
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


class BaselineDispatcher(ABC, Generic[HandleT]):
    """Dispatch and combine over collectives, NCCL's or gloo's.

    Rows come in the order (expert, origin rank, origin slot), and are ordinary tensors. Every rank of
    the group must make the same calls in the same order, also with zero tokens; in the backward too,
    which autograd sees to if every rank's loss depends on what `combine` gave it. A group of one does
    not communicate. Construction is collective too: ranks compare their configs.

    Args:
        cfg: sizes and dtype, equal on every rank; `capacity` must be `"exact"`. With a placement that is not
            contiguous the host waits once more in a dispatch, for whether the ids are in range.
        group: of the ranks that share the experts; None is the world, or where `torch.distributed` is
            not initialised, this process alone.
        device: where the rows live; None is the current CUDA device if the group's backend has NCCL
            (without a group: if there is one), and otherwise the CPU.

    Raises:
        EnvironmentUnsupportedError: neither a CPU nor a CUDA device that is there.
        ConfigError: a static capacity; experts that do not divide among the ranks; a placement for another
            number of ranks; or the ranks disagree.
    """

    handle_type: type[HandleT]

    def __init__(
        self,
        cfg: EPConfig,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Settle on the group and the device, and agree on the config."""
        if cfg.capacity != "exact":
            raise ConfigError(
                f'expected capacity="exact", the only one {type(self).__name__} has, got {cfg.capacity!r}'
            )
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self.cfg = cfg
        self.group = group
        self.rank, self.world_size = (
            (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        )
        if group is not None:
            # Before what only some ranks may raise.
            require_agreement(group, "configuration", f"{type(self).__name__}, {cfg.mark}")
        layout = cfg.layout(self.world_size)
        self._num_places, self._places_of_rank = layout.num_experts, layout.num_local_experts
        placement = cfg.placement
        self.num_local_experts = (
            self._places_of_rank if placement is None else len(placement.experts_of_rank[self.rank])
        )
        self.device = _resolve_device(group, device)
        self._score_dtype = layout.score_dtype
        self._closed = False
        self._table: torch.Tensor | None = None
        if placement is not None and not placement.is_contiguous:
            self._table, self._first_number = self._read(placement)
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
    ) -> tuple[torch.Tensor, torch.Tensor, HandleT]:
        """Bring every token to its experts' ranks; the host waits for what it must know.

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
        del lane
        self._check_open()
        check_dispatch(self.cfg, self.device, x_TD, scores_TK, topk_ids_TK, num_local_tokens_per_expert_E)
        rows_RD, counts_L, handle = self._dispatch(x_TD, scores_TK, self._places(topk_ids_TK.long()))
        # Places that hold no expert have no rows.
        return rows_RD, counts_L[: self.num_local_experts], handle

    def combine(self, y_RD: torch.Tensor, handle: HandleT, x_TD: torch.Tensor | None = None) -> torch.Tensor:
        """Bring the experts' rows back; add up each token's, weighted by its scores.

        Args:
            y_RD: `(R, D)` of `cfg.dtype`, any strides, a row for each that `dispatch` gave.
            handle: what that `dispatch` gave.
            x_TD: not read; taken because some trainers' dispatchers need it.

        Returns:
            `(T, D)` of `cfg.dtype`; zeros for a token whose slots are all masked.

        Raises:
            ClosedError: the dispatcher was closed.
            InputError: a shape, dtype or device that does not fit, or a handle of another kind of dispatcher.
        """
        del x_TD
        self._check_open()
        if not isinstance(handle, self.handle_type):
            raise InputError(f"expected the handle that dispatch gave, got {type(handle).__name__}")
        check_combine(self.cfg, self.device, y_RD, handle.num_rows)
        return self._combine(y_RD, handle)

    @abstractmethod
    def _dispatch(
        self, x_TD: torch.Tensor, scores_TK: torch.Tensor, places_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, HandleT]:
        """Do what `dispatch` says, with checked arguments but for the range of `places_TK`, int64.

        Rank `w` has the places `w * L` to `(w + 1) * L - 1`; of each of its L it gives a count.
        """

    @abstractmethod
    def _combine(self, y_RD: torch.Tensor, handle: HandleT) -> torch.Tensor:
        """Do what `combine` says, with checked arguments."""

    def _read(self, placement: Placement) -> tuple[torch.Tensor, int]:
        """Return how to find places, for `look_up`."""
        return placement.table(self.rank).to(self.device), placement.first_number(self.rank)

    def _places(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """Return int64 `(T, K)`, the place that each slot goes to.

        Where ids are places they stay as they are, also out of range: whoever reads them on the host refuses
        them.
        """
        if self._table is None:
            return ids_TK
        self._require_experts(ids_TK)
        return look_up(ids_TK, self._table, self._first_number)

    def _require_experts(self, ids_TK: torch.Tensor) -> None:
        """Raise unless all ids are in range; the host waits."""
        wrong_TK = (ids_TK < -1) | (ids_TK >= self.cfg.num_experts)
        if wrong_TK.any().item():
            raise self._wrong_id(int(ids_TK[wrong_TK][0]))

    def _wrong_id(self, wrong: int) -> ExpertIdError:
        return ExpertIdError(f"expected topk_ids_TK in [-1, {self.cfg.num_experts}), got {wrong}")

    def _require_in_range(self, sorted_N: torch.Tensor, start: list[int]) -> None:
        """Raise unless what `sort_by_expert` gave, its last part read by the host, shows ids in range."""
        if start[0] != 0 or start[-1] != len(sorted_N):
            raise self._wrong_id(int(sorted_N[0 if start[0] != 0 else -1]))

    def dispatch_async(
        self,
        x_TD: torch.Tensor,
        scores_TK: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor | None = None,
        *,
        lane: int | None = None,
    ) -> Joinable[tuple[torch.Tensor, torch.Tensor, HandleT]]:
        """Run `dispatch` and return an object whose `join()` gives its result, once.

        Nothing is left to overlap with: it is here so that dispatchers can be swapped.
        """
        return Joinable(self.dispatch(x_TD, scores_TK, topk_ids_TK, num_local_tokens_per_expert_E, lane=lane))

    def combine_async(
        self, y_RD: torch.Tensor, handle: HandleT, x_TD: torch.Tensor | None = None
    ) -> Joinable[torch.Tensor]:
        """Run `combine` and return an object whose `join()` gives its result, once."""
        return Joinable(self.combine(y_RD, handle, x_TD))

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
        """Run one step, forward and backward, with a row for every rank if the capacity allows.

        Collective: every rank of the group must call it. Connections and kernels exist afterwards.

        Raises:
            ClosedError: the dispatcher was closed.
        """
        cfg = self.cfg
        num_tokens = min(cfg.max_tokens_per_rank, -(-self.world_size // cfg.top_k))
        slots = torch.arange(num_tokens * cfg.top_k, dtype=torch.int64, device=self.device)
        ids_TK = (slots * self._places_of_rank % cfg.num_experts).view(num_tokens, cfg.top_k)
        options: dict[str, Any] = {"device": self.device, "requires_grad": True}
        with torch.inference_mode(False), torch.enable_grad():
            x_TD = torch.zeros(num_tokens, cfg.hidden_dim, dtype=cfg.dtype, **options)
            scores_TK = torch.zeros(num_tokens, cfg.top_k, dtype=self._score_dtype, **options)
            rows_RD, _, handle = self.dispatch(x_TD, scores_TK, ids_TK)
            self.combine(rows_RD, handle).sum().backward()

    def close(self) -> None:
        """Refuse further use; the group stays the caller's. Closing twice is allowed."""
        self._closed = True

    def __enter__(self) -> Any:
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


def sort_by_expert(ids_N: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sorted ids, the slots in that order, and where each id begins in it.

    Args:
        ids_N: int64, an expert for each slot, -1 for none.
        num_experts: E.

    Returns:
        ids: int64 `(N,)`, sorted.
        slots: int64 `(N,)`; those of one expert keep their order.
        start: int64 `(E + 2,)`, where each id from -1 to E would begin: the first is larger than 0 if there
            are smaller ids, the last smaller than N if there are larger ones.

    Example:
        >>> ids, slots, start = sort_by_expert(torch.tensor([1, -1, 0, 1]), num_experts=2)
        >>> slots.tolist(), start.tolist()
        ([1, 2, 0, 3], [0, 1, 2, 4])
    """
    sorted_N, slot_N = ids_N.sort(stable=True)
    candidates = torch.arange(-1, num_experts + 1, dtype=torch.int64, device=ids_N.device)
    return sorted_N, slot_N, torch.searchsorted(sorted_N, candidates)


def pad_counts(counts_L: torch.Tensor, pad_multiple: int) -> torch.Tensor:
    """Return the rows of each local expert, padding included."""
    return (counts_L + pad_multiple - 1) // pad_multiple * pad_multiple


def expert_major(counts_WL: torch.Tensor, padded_L: torch.Tensor, num_received: int) -> torch.Tensor:
    """Return int64 `(Q,)`: the row of each slot received, which come in (origin, expert, slot) order.

    Args:
        counts_WL: int64, slots from each origin for each local expert.
        padded_L: int64, rows of each local expert.
        num_received: Q, the sum of `counts_WL`; given, so that the host need not wait for it.

    Example:
        >>> expert_major(torch.tensor([[1, 2], [2, 0]]), torch.tensor([4, 2]), 5).tolist()
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
    return require_device(device)
