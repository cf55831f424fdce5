"""One rank's experts, for a rank that has the tokens of all: their rows, and their part of the sums."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from symm_a2a.baselines.base import expert_major, pad_counts


@dataclass(frozen=True, eq=False)
class OwnSlots:
    """The slots of one rank's experts, among those of all N tokens that the rank has; S of them.

    Attributes:
        num_rows: R, padding included.
        rows: int64 `(S,)`, which row each slot is.
        tokens: int64 `(S,)`, the token of each.
        places: int64 `(S,)`, `token * K + k`.
        num_tokens: N.
    """

    num_rows: int
    rows: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    num_tokens: int

    def take_rows(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return `(R, D)`, a copy of its token for each slot, zeros where there is none; differentiable."""
        rows_SD = x_ND.index_select(0, self.tokens)
        return rows_SD.new_zeros(self.num_rows, x_ND.shape[1]).index_copy(0, self.rows, rows_SD)

    def sum_rows(self, y_RD: torch.Tensor, scores_NK: torch.Tensor) -> torch.Tensor:
        """Return `(N, D)` of the dtype of `y_RD`: each token's rows times their scores, added up.

        Products and sums are taken in the dtype of the scores, and rounded once.

        Args:
            y_RD: what the experts made of the rows; differentiable.
            scores_NK: fp32, or fp64 for fp64 rows; differentiable.
        """
        score_S = scores_NK.reshape(-1).index_select(0, self.places)
        weighted_SD = y_RD.index_select(0, self.rows).to(scores_NK.dtype) * score_S[:, None]
        sums_ND = weighted_SD.new_zeros(self.num_tokens, y_RD.shape[1])
        return sums_ND.index_add(0, self.tokens, weighted_SD).to(y_RD.dtype)


def find_slots(
    places_S: torch.Tensor,
    counts_L: torch.Tensor,
    start: list[int],
    num_tokens: int,
    top_k: int,
    pad_multiple: int,
) -> tuple[OwnSlots, torch.Tensor]:
    """Return the slots of a rank's experts, and int32 `(L,)`, the rows of each expert, padding included.

    Args:
        places_S: int64, `token * K + k` of each slot, in the order (expert, token, k).
        counts_L: int64, slots of each expert.
        start: of L + 1 numbers, whose differences are the counts; on the host, which need not wait then.
        num_tokens: N.
        top_k: K.
        pad_multiple: each expert's rows are padded to a multiple of it.

    Example:
        >>> slots, counts = find_slots(torch.tensor([3, 0, 2]), torch.tensor([1, 2]), [0, 1, 3], 2, 2, 2)
        >>> slots.rows.tolist(), slots.tokens.tolist(), slots.num_rows, counts.tolist()
        ([0, 2, 3], [1, 0, 1], 4, [2, 2])
    """
    padded_L = pad_counts(counts_L, pad_multiple)
    slots = OwnSlots(
        num_rows=sum(-(-(end - begin) // pad_multiple) * pad_multiple for begin, end in pairwise(start)),
        rows=expert_major(counts_L[None], padded_L, len(places_S)),
        tokens=places_S // top_k,
        places=places_S,
        num_tokens=num_tokens,
    )
    return slots, padded_L.to(torch.int32)
