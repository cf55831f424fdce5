"""One rank's share of a case: what goes in, and what is to come out.

A row's contents tell its origin rank, token and k, so every rank knows each row that it must get without
asking anyone, and no row in a wrong place looks right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import symm_a2a
from bench.a2av.cases import Case
from bench.a2av.placements import place
from bench.dispatchers import Sharing
from symm_a2a import reference
from symm_a2a.reference import RankRows

DIGITS, BASE = 4, 241
"""A row is a number of so many digits to this base, again and again; 241 integers fit into bfloat16."""

BLOCK = 4096
"""Rows that are encoded at once."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One rank's tensors of a case.

    Attributes:
        case: sizes.
        rank: this rank.
        device: of the tensors.
        ids_WTK: int64, of all ranks, on the CPU.
        origin_T: int64, the rank that each of this rank's tokens is of, on the CPU: itself, but where it has
            those of all.
        token_T: int64, which of that rank's tokens it is, on the CPU.
        ids_TK: int64, of this rank's tokens.
        x_TD: the rows of this rank's tokens.
        scores_TK: float32.
        grad_TD: the gradient of what a combine gives.
        placement: which rank has which experts; None for equal parts, in order.
        rows: which slot each row that arrives here holds.
        copies_WW: int64, distinct (token, destination) pairs from each rank to each, on the CPU.
        slots_WW: int64, unmasked slots from each rank to each, on the CPU.
    """

    case: Case
    rank: int
    device: torch.device
    ids_WTK: Tensor
    origin_T: Tensor
    token_T: Tensor
    ids_TK: Tensor
    x_TD: Tensor
    scores_TK: Tensor
    grad_TD: Tensor
    placement: symm_a2a.Placement | None
    rows: RankRows
    copies_WW: Tensor
    slots_WW: Tensor

    @property
    def most_rows(self) -> int:
        """Rows of the rank that gets most of them; at least 1."""
        return max(1, int(self.slots_WW.sum(0).max()))

    def row_of(self, origin: Tensor, token: Tensor, k: Tensor) -> Tensor:
        """Return `(N, D)`, the row of each slot; zeros where the origin is -1.

        For k = 0 that is what the token's `x` is.
        """
        code_N = (origin * self.case.tokens + token) * self.case.top_k + k
        return encode(torch.where(origin < 0, -1, code_N).to(self.device), self.case)

    def slots(self, capacity: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return origin, token and k of the rows that arrive; -1 for those that only fill a capacity up."""
        fill = 0 if capacity is None else capacity - len(self.rows.origin)
        slots_3R = torch.stack([self.rows.origin, self.rows.token, self.rows.k])
        origin, token, k = F.pad(slots_3R, (0, fill), value=-1)
        return origin, token, k


def make_problem(case: Case, rank: int, device: torch.device, ids_WTK: Tensor, seed: int) -> Problem:
    """Return a rank's share of a case.

    Args:
        case: sizes.
        rank: this rank.
        device: where its rows live.
        ids_WTK: of `draw_ids`.
        seed: of the scores.
    """
    placement = place(case, ids_WTK)
    places_WTK, num_places = ids_WTK, case.experts
    if placement is not None:
        places_WTK = torch.stack([placement.places(ids, origin) for origin, ids in enumerate(ids_WTK)])
        num_places = placement.num_places
    rank_WTK = torch.where(places_WTK < 0, -1, places_WTK // (num_places // case.ranks))
    return Problem(
        case=case,
        rank=rank,
        device=device,
        ids_WTK=ids_WTK,
        **_tokens_of([rank], case, device, ids_WTK, seed),
        placement=placement,
        rows=reference.route(list(places_WTK), num_places)[rank],
        copies_WW=count(rank_WTK, distinct=True),
        slots_WW=count(rank_WTK, distinct=False),
    )


def share_out(problem: Problem, sharing: Sharing, seed: int) -> Problem:
    """Return the problem with what ranks do not share out, tokens or experts, all on every rank.

    Args:
        problem: of `make_problem`.
        sharing: of the dispatcher.
        seed: as for `make_problem`.
    """
    case, ids_WTK, rank = problem.case, problem.ids_WTK, problem.rank
    if not sharing.tokens:
        problem = replace(problem, **_tokens_of(range(case.ranks), case, problem.device, ids_WTK, seed))
    if not sharing.experts:
        rows = reference.route([ids_WTK[rank]], case.experts)[0]
        rows = replace(rows, origin=torch.where(rows.origin < 0, -1, rank))
        stays = [torch.diag(sent_WW.sum(1)) for sent_WW in (problem.copies_WW, problem.slots_WW)]
        problem = replace(problem, rows=rows, copies_WW=stays[0], slots_WW=stays[1])
    return problem


def _tokens_of(
    ranks: Sequence[int], case: Case, device: torch.device, ids_WTK: Tensor, seed: int
) -> dict[str, Any]:
    """Return the fields of a problem that are of tokens, for those of some ranks."""
    T, K = case.tokens, case.top_k
    origin_T = torch.tensor(ranks).repeat_interleave(T)
    token_T = torch.arange(T).repeat(len(ranks))
    x_TD = encode(((origin_T * T + token_T) * K).to(device), case)
    generators = [torch.Generator().manual_seed(seed * 1009 + rank) for rank in ranks]
    scores = [torch.rand(T, K, generator=generator) + 0.05 for generator in generators]
    return {
        "origin_T": origin_T,
        "token_T": token_T,
        "ids_TK": torch.cat([ids_WTK[rank] for rank in ranks]).to(device),
        "x_TD": x_TD,
        "scores_TK": torch.cat(scores).to(device),
        # The other way round, so that it is not x.
        "grad_TD": x_TD.flip(1).contiguous(),
    }


def encode(code_N: Tensor, case: Case) -> Tensor:
    """Return `(N, D)` of the case's dtype: rows of small integers that spell the codes; -1 gives zeros.

    Column `d` holds digit `d % DIGITS`, shifted by an amount of its own, so that no column is another's.
    """
    out_ND = torch.empty(len(code_N), case.hidden, dtype=case.row_dtype, device=code_N.device)
    column_D = torch.arange(case.hidden, device=code_N.device)
    shift_D = (column_D * 7 % BASE).to(torch.int16)
    power = torch.tensor([BASE**digit for digit in range(DIGITS)], device=code_N.device)
    for begin in range(0, len(code_N), BLOCK):
        code = code_N[begin : begin + BLOCK, None]
        digits = (code // power % BASE).to(torch.int16)
        values = (digits[:, column_D % DIGITS] + shift_D) % BASE - BASE // 2
        out_ND[begin : begin + BLOCK] = values.masked_fill(code < 0, 0)
    return out_ND


def count(rank_WTK: Tensor, *, distinct: bool) -> Tensor:
    """Return int64 `(W, W)`, slots from each rank to each; or, distinct, copies.

    Args:
        rank_WTK: int64, the rank that each slot goes to, -1 where it is masked.
        distinct: count a token once for each rank.

    Example:
        >>> ranks = torch.tensor([[[0, 0]], [[1, -1]]])
        >>> count(ranks, distinct=False).tolist(), count(ranks, distinct=True).tolist()
        ([[2, 0], [0, 1]], [[1, 0], [0, 1]])
    """
    # The first column counts masked slots.
    hits_WTW = torch.zeros(*rank_WTK.shape[:2], len(rank_WTK) + 1, dtype=torch.int64)
    hits_WTW.scatter_add_(2, rank_WTK + 1, torch.ones_like(rank_WTK))
    return (hits_WTW.clamp_max(1) if distinct else hits_WTW).sum(1)[:, 1:]
