"""The oracle: what dispatch and combine mean, in plain PyTorch over all ranks at once.

Every function takes one tensor per rank of the group, in rank order, and returns one per rank.
Nothing here communicates, and nothing is clever: a row is found with Python loops, and moved with
indexing that autograd differentiates. Any dtype, some hundreds of tokens.

Shape letters: `W` ranks, `T` tokens of a rank (ranks may differ), `D` hidden, `K` top-k, `E` experts,
`L = E / W` local experts, `R` rows of a rank. Rank `w` owns experts `w * L` to `(w + 1) * L - 1`.

Rows are ordered by (expert, origin rank, origin slot), `slot = token * K + k`. A slot with id -1 is
masked and has no row. A token routed to one expert twice has two rows there.

Each expert's rows start at a multiple of `pad_multiple`, and are followed by padding rows up to the
next one; an expert without rows has no padding either. With `capacity="exact"` a rank has as many
rows as its experts need; with an `int` it has that many, padding rows at the end if fewer are
needed, and a row whose place would be at or past the capacity is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from symm_a2a.errors import ConfigError, ExpertIdError, InputError

Capacity = int | Literal["exact"]

PADDING = -1
"""Origin, token and k of a row that belongs to no slot."""


@dataclass(frozen=True, eq=False)
class RankRows:
    """Where the rows of one rank come from.

    Attributes:
        origin: int64 `(R,)`, the rank each row's token lives on; -1 for a padding row.
        token: int64 `(R,)`, the row's token on that rank; -1 for a padding row.
        k: int64 `(R,)`, which of the token's K slots it is; -1 for a padding row.
        tokens_per_expert: int32 `(L,)`, rows of each local expert, padding included; their running
            sum is where each expert's rows end.
        num_dropped: slots that found no place below the capacity.
    """

    origin: torch.Tensor
    token: torch.Tensor
    k: torch.Tensor
    tokens_per_expert: torch.Tensor
    num_dropped: int


def _check(ids: list[torch.Tensor], num_experts: int) -> None:
    """Raise unless the ids can be routed: whole experts per rank, ids in range, one K."""
    if not ids or num_experts % len(ids):
        raise ConfigError(
            f"expected num_experts divisible by the number of ranks, got {num_experts} experts "
            f"for {len(ids)} ranks"
        )
    for rank, ids_TK in enumerate(ids):
        if ids_TK.dim() != 2 or ids_TK.shape[1] != ids[0].shape[1]:
            raise InputError(f"expected ids of shape (T, K) with one K, got {[tuple(i.shape) for i in ids]}")
        wrong = ids_TK[(ids_TK < -1) | (ids_TK >= num_experts)]
        if wrong.numel():
            raise ExpertIdError(f"expected ids in [-1, {num_experts}), got {wrong[0].item()} on rank {rank}")


def route(
    ids: list[torch.Tensor], num_experts: int, pad_multiple: int = 1, capacity: Capacity = "exact"
) -> list[RankRows]:
    """Return, for each rank, the slot that every one of its rows holds.

    Args:
        ids: integers `(T, K)` per rank, the expert of each slot, or -1.
        num_experts: E, a multiple of the ranks.
        pad_multiple: each expert's rows are padded to a multiple of this.
        capacity: rows of a rank, or `"exact"`.

    Raises:
        ConfigError: the experts do not divide among the ranks.
        ExpertIdError: an id outside `[-1, num_experts)`.
        InputError: ids that are not `(T, K)` with one K.

    Example:
        >>> first, second = route([torch.tensor([[3, 0]]), torch.tensor([[0, -1]])], num_experts=4)
        >>> first.origin.tolist(), first.k.tolist(), first.tokens_per_expert.tolist()
        ([0, 1], [1, 0], [2, 0])
        >>> second.origin.tolist(), second.k.tolist(), second.tokens_per_expert.tolist()
        ([0], [0], [0, 1])
    """
    _check(ids, num_experts)
    slots_of_expert: list[list[tuple[int, int, int]]] = [[] for _ in range(num_experts)]
    for origin, ids_TK in enumerate(ids):
        for token, experts in enumerate(ids_TK.tolist()):
            for k, expert in enumerate(experts):
                if expert >= 0:
                    slots_of_expert[expert].append((origin, token, k))

    num_local = num_experts // len(ids)
    padding = (PADDING, PADDING, PADDING)
    ranks = []
    for rank in range(len(ids)):
        rows: list[tuple[int, int, int]] = []
        counts = []
        for slots in slots_of_expert[rank * num_local : (rank + 1) * num_local]:
            padded = slots + [padding] * (-len(slots) % pad_multiple)
            room = len(padded) if capacity == "exact" else max(0, capacity - len(rows))
            counts.append(min(len(padded), room))
            rows += padded
        dropped = 0
        if capacity != "exact":
            dropped = sum(row != padding for row in rows[capacity:])
            rows = rows[:capacity] + [padding] * (capacity - len(rows))
        origin_R, token_R, k_R = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).unbind(1)
        counts_L = torch.tensor(counts, dtype=torch.int32)
        ranks.append(RankRows(origin_R, token_R, k_R, counts_L, dropped))
    return ranks


def _first_token_of_rank(ids: list[torch.Tensor]) -> torch.Tensor:
    """Return int64 `(W,)`: where each rank's tokens start when all ranks' are concatenated."""
    counts = torch.tensor([len(ids_TK) for ids_TK in ids], dtype=torch.int64)
    return counts.cumsum(0) - counts


def _with_zero_row(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the parts' rows one after another and a row of zeros, which index -1 finds."""
    return torch.cat([*parts, parts[0].new_zeros(1, *parts[0].shape[1:])])


def dispatch(
    xs: list[torch.Tensor],
    ids: list[torch.Tensor],
    num_experts: int,
    pad_multiple: int = 1,
    capacity: Capacity = "exact",
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return each rank's rows and how many of them each local expert has.

    Args:
        xs: `(T, D)` per rank, one dtype, any.
        ids: integers `(T, K)` per rank, -1 for a masked slot.
        num_experts: E, a multiple of the ranks.
        pad_multiple: each expert's rows are padded to a multiple of this, with zeros.
        capacity: rows of a rank, or `"exact"`.

    Returns:
        `(R, D)` per rank, a copy of a token's `x` per row, differentiable in `xs`; and int32 `(L,)`
        per rank.

    Raises:
        ConfigError: the experts do not divide among the ranks.
        ExpertIdError: an id outside `[-1, num_experts)`.
        InputError: ids that are not `(T, K)` with one K.
    """
    ranks = route(ids, num_experts, pad_multiple, capacity)
    first_W = _first_token_of_rank(ids)
    x_ND = _with_zero_row(xs)
    rows = []
    for rank in ranks:
        index_R = torch.where(rank.origin >= 0, first_W[rank.origin] + rank.token, -1)
        rows.append(x_ND[index_R.to(x_ND.device)])
    return rows, [rank.tokens_per_expert for rank in ranks]


def combine(
    ys: list[torch.Tensor],
    scores: list[torch.Tensor],
    ids: list[torch.Tensor],
    num_experts: int,
    pad_multiple: int = 1,
    capacity: Capacity = "exact",
    accumulate: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """Return each rank's `out[t] = sum over k of scores[t, k] * y[row of (t, k)]`.

    A masked or dropped slot contributes nothing, whatever its score, and its score's gradient is zero.
    Padding rows of `ys` are never read, and their gradient is zero.

    Args:
        ys: `(R, D)` per rank, what the experts made of the rows that `dispatch` gave.
        scores: floats `(T, K)` per rank.
        ids: as they were given to `dispatch`, and so are `num_experts`, `pad_multiple`, `capacity`.
        num_experts: E.
        pad_multiple: see `dispatch`.
        capacity: see `dispatch`.
        accumulate: the dtype that products and sums are taken in.

    Returns:
        `(T, D)` of dtype `accumulate` per rank, differentiable in `ys` and `scores`.

    Raises:
        ConfigError: the experts do not divide among the ranks.
        ExpertIdError: an id outside `[-1, num_experts)`.
        InputError: ids that are not `(T, K)` with one K, or a `y` with another number of rows than
            the routing gives.
    """
    ranks = route(ids, num_experts, pad_multiple, capacity)
    first_W = _first_token_of_rank(ids)
    row_NK = torch.full((sum(len(ids_TK) for ids_TK in ids), ids[0].shape[1]), -1)
    first_row = 0
    for number, (rank, y_RD) in enumerate(zip(ranks, ys, strict=True)):
        if len(y_RD) != len(rank.origin):
            raise InputError(f"expected {len(rank.origin)} rows of y on rank {number}, got {len(y_RD)}")
        real = rank.origin >= 0
        token_R = first_W[rank.origin[real]] + rank.token[real]
        row_NK[token_R, rank.k[real]] = first_row + real.nonzero().squeeze(1)
        first_row += len(y_RD)
    row_NK = row_NK.to(ys[0].device)
    y_NKD = _with_zero_row(ys)[row_NK].to(accumulate)
    # A masked slot's score may be anything, also NaN: it must not reach the product.
    score_NK = torch.where(row_NK >= 0, torch.cat(scores), 0).to(accumulate)
    out_ND = (score_NK[:, :, None] * y_NKD).sum(1)
    return list(out_ND.split([len(ids_TK) for ids_TK in ids]))


def count_slots(ids: list[torch.Tensor], num_experts: int) -> torch.Tensor:
    """Return int64 `(W, W)`: unmasked slots of each origin rank (row) for each rank's experts (column).

    Raises:
        ConfigError: the experts do not divide among the ranks.
        ExpertIdError: an id outside `[-1, num_experts)`.
        InputError: ids that are not `(T, K)` with one K.
    """
    return _count(ids, num_experts, distinct=False)


def count_copies(ids: list[torch.Tensor], num_experts: int) -> torch.Tensor:
    """Return int64 `(W, W)`: tokens of each origin rank (row) with a slot on each rank (column).

    That is the number of distinct (token, destination rank) pairs: a token with several slots on one
    rank counts once there.

    Raises:
        ConfigError: the experts do not divide among the ranks.
        ExpertIdError: an id outside `[-1, num_experts)`.
        InputError: ids that are not `(T, K)` with one K.

    Example:
        >>> ids = [torch.tensor([[0, 1], [1, 2]]), torch.tensor([[3, 3]])]
        >>> count_copies(ids, num_experts=4).tolist()
        [[2, 1], [0, 1]]
        >>> count_slots(ids, num_experts=4).tolist()
        [[3, 1], [0, 2]]
    """
    return _count(ids, num_experts, distinct=True)


def _count(ids: list[torch.Tensor], num_experts: int, *, distinct: bool) -> torch.Tensor:
    _check(ids, num_experts)
    num_local = num_experts // len(ids)
    counts_WW = torch.zeros(len(ids), len(ids), dtype=torch.int64)
    for origin, ids_TK in enumerate(ids):
        for experts in ids_TK.tolist():
            ranks = [expert // num_local for expert in experts if expert >= 0]
            for rank in set(ranks) if distinct else ranks:
                counts_WW[origin, rank] += 1
    return counts_WW
