"""Which rank holds which expert, and which of its replicas a slot goes to.

The kernels know places: rank `w` has places `w * L` to `(w + 1) * L - 1`, and a place holds one expert or
none. A placement says what is where. A dispatch turns expert ids into places first; from there on all is as
if the experts were places.

Of an expert with replicas each origin chooses for itself, by the token's number and its own rank; nobody has
to be told, and a recompute chooses the same. `(t * 40503 + rank * 2**16 / W) mod 2**16` walks through the
numbers below 2**16 as evenly for any stretch of tokens as a sequence can (40503 is 2**16 over the golden
ratio), and the replicas have intervals of it, as long as their shares.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from symm_a2a.errors import ConfigError

SHARE_UNITS = 1 << 16
"""Shares are kept in 1/65536, and are whole numbers: equal on every rank to the last bit."""

STRIDE = 40503
"""From one token's number to the next one's: 65536 over the golden ratio."""

NOWHERE = -1
"""In a table of places, where an expert has no further replica."""


@dataclass(frozen=True)
class Placement:
    """Which experts each rank holds, in the order of their rows there; equal on every rank.

    Args:
        experts_of_rank: for each rank its experts. Every expert from 0 on is somewhere; one that several
            ranks hold has replicas. Ranks may hold different numbers of experts, also none.
        shares: for each of these places, the part of its expert's slots that goes there, in any unit; those
            of an expert with one replica do not matter. None for equal parts.
        prefer_local: send a slot to the replica on its own rank, if there is one, whatever the shares.

    Raises:
        ConfigError: an expert is missing, twice on one rank, or no id; or shares of another shape, negative,
            of no finite sum, or of which none of an expert's is positive.

    Example:
        >>> placement = Placement(((0, 3), (1, 2)))
        >>> placement.num_experts, placement.world_size, placement.num_local_experts
        (4, 2, 2)
        >>> placement.ranks_of_expert
        ((0,), (1,), (1,), (0,))
    """

    experts_of_rank: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...] | None = None
    prefer_local: bool = False

    def __post_init__(self) -> None:
        try:
            experts = tuple(tuple(map(operator.index, mine)) for mine in self.experts_of_rank)
        except TypeError:
            raise ConfigError(
                "expected experts_of_rank to have for each rank a sequence of ints, got "
                f"{self.experts_of_rank!r}"
            ) from None
        object.__setattr__(self, "experts_of_rank", experts)
        found = sorted(set(itertools.chain(*experts)))
        if not found or found != list(range(len(found))):
            raise ConfigError(f"expected every expert from 0 on to be on some rank, got experts {found}")
        for rank, mine in enumerate(experts):
            if len(set(mine)) < len(mine):
                raise ConfigError(f"expected an expert once on a rank, got {list(mine)} on rank {rank}")
        if self.shares is not None:
            self._check_shares(self.shares)

    def _check_shares(self, shares: tuple[tuple[float, ...], ...]) -> None:
        try:
            shares = tuple(tuple(map(float, mine)) for mine in shares)
        except (TypeError, ValueError):
            raise ConfigError(
                f"expected shares to have for each rank a sequence of numbers, got {shares!r}"
            ) from None
        object.__setattr__(self, "shares", shares)
        sizes, expected = [len(mine) for mine in shares], [len(mine) for mine in self.experts_of_rank]
        if sizes != expected:
            raise ConfigError(f"expected a share for each place, {expected} of the ranks, got {sizes}")
        every = list(itertools.chain(*shares))
        if not (all(share >= 0 for share in every) and sum(every) < float("inf")):
            raise ConfigError(f"expected shares that are not negative, of a finite sum, got {shares}")
        for expert in range(self.num_experts):
            if not sum(self._shares_of(expert)) > 0:
                raise ConfigError(f"expected some share of expert {expert} to be positive, got none")

    @classmethod
    def contiguous(cls, num_experts: int, world_size: int) -> Placement:
        """Return what dispatchers do without a placement: rank `w` holds `w * L` to `(w + 1) * L - 1`.

        Raises:
            ConfigError: the experts do not divide among the ranks.
        """
        for name, value in (("num_experts", num_experts), ("world_size", world_size)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"expected {name} to be a positive int, got {value!r}")
        if num_experts % world_size:
            raise ConfigError(
                f"expected num_experts divisible by the number of ranks, got {num_experts} experts for "
                f"{world_size} ranks"
            )
        num_local = num_experts // world_size
        return cls(tuple(tuple(range(w * num_local, (w + 1) * num_local)) for w in range(world_size)))

    @classmethod
    def from_ranks(cls, rank_of_expert: Sequence[int], world_size: int) -> Placement:
        """Return the placement of each expert on one rank, in ascending order there.

        Args:
            rank_of_expert: `(E,)`, the rank of each expert.
            world_size: W.

        Raises:
            ConfigError: a rank outside `[0, W)`.

        Example:
            >>> Placement.from_ranks([0, 1, 1, 0], 2).experts_of_rank
            ((0, 3), (1, 2))
        """
        try:
            ranks = list(map(operator.index, rank_of_expert))
        except TypeError:
            raise ConfigError(
                f"expected rank_of_expert to have an int for each, got {rank_of_expert!r}"
            ) from None
        wrong = [rank for rank in ranks if not 0 <= rank < world_size]
        if wrong:
            raise ConfigError(f"expected ranks in [0, {world_size}), got {wrong[0]}")
        return cls(tuple(tuple(e for e, rank in enumerate(ranks) if rank == w) for w in range(world_size)))

    @cached_property
    def num_experts(self) -> int:
        """E, the experts, each counted once."""
        return 1 + max(itertools.chain(*self.experts_of_rank))

    @property
    def world_size(self) -> int:
        """W, the ranks."""
        return len(self.experts_of_rank)

    @cached_property
    def num_local_experts(self) -> int:
        """L, the most experts of a rank: every rank has so many places."""
        return max(map(len, self.experts_of_rank))

    @property
    def num_places(self) -> int:
        """`W * L`, places of all ranks, also those that hold nothing."""
        return self.world_size * self.num_local_experts

    @cached_property
    def ranks_of_expert(self) -> tuple[tuple[int, ...], ...]:
        """For each expert the ranks that hold it, ascending."""
        return tuple(
            tuple(w for w, mine in enumerate(self.experts_of_rank) if expert in mine)
            for expert in range(self.num_experts)
        )

    @property
    def mark(self) -> int:
        """A number from 1 to 2**31 - 1, made of all the placement says: other placements have other marks."""
        digest = hashlib.sha256(repr(self).encode()).digest()
        return 1 + int.from_bytes(digest[:8], "little") % ((1 << 31) - 1)

    @property
    def is_contiguous(self) -> bool:
        """Whether places are experts, in order: nothing has to be translated."""
        return list(itertools.chain(*self.experts_of_rank)) == list(range(self.num_places))

    def table(self, rank: int) -> torch.Tensor:
        """Return int32 `(E, N, 2)`: for each expert and replica its place, and where its interval ends.

        N is the most replicas of an expert. An interval begins where the one before it ends, the first one at
        0; the last one ends at 65536. Of fewer replicas the rest have place -1 and an end of 65536.

        Args:
            rank: whose slots are sent; it matters with `prefer_local` alone.

        Example:
            >>> Placement(((0, 1), (1, 2))).table(0).tolist()
            [[[0, 65536], [-1, 65536]], [[1, 32768], [2, 65536]], [[3, 65536], [-1, 65536]]]
        """
        most = max(map(len, self.ranks_of_expert))
        table = torch.empty((self.num_experts, most, 2), dtype=torch.int32, device="cpu")
        table[:, :, 0], table[:, :, 1] = NOWHERE, SHARE_UNITS
        for expert, ranks in enumerate(self.ranks_of_expert):
            shares = self._shares_of(expert)
            if self.prefer_local and rank in ranks:
                shares = [float(w == rank) for w in ranks]
            total, so_far = sum(shares), 0.0
            for n, (w, share) in enumerate(zip(ranks, shares, strict=True)):
                so_far += share
                table[expert, n, 0] = w * self.num_local_experts + self.experts_of_rank[w].index(expert)
                table[expert, n, 1] = round(SHARE_UNITS * so_far / total)
        return table

    def places(self, ids_TK: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the place of every slot, as a dispatch finds it: the oracle of the kernel.

        Args:
            ids_TK: integers `(T, K)`, the expert of each slot, or -1.
            rank: whose slots they are.

        Returns:
            int64 `(T, K)`: places; -1 where the id is.

        Example:
            >>> Placement(((0, 1), (1, 2))).places(torch.tensor([[1, 0], [1, -1], [2, 1]]), rank=0).tolist()
            [[1, 0], [2, -1], [3, 1]]
        """
        return look_up(ids_TK, self.table(rank).to(ids_TK.device), self.first_number(rank))

    def first_number(self, rank: int) -> int:
        """Return the number of a rank's first token, by which its replica is chosen."""
        return rank * SHARE_UNITS // self.world_size

    def of_experts(self, values_P: torch.Tensor) -> torch.Tensor:
        """Return the sums of each expert's replicas, given a value of each place.

        Args:
            values_P: `(..., W * L)`.

        Returns:
            `(..., E)`, of the same dtype.

        Example:
            >>> Placement(((0, 1), (1, 2))).of_experts(torch.tensor([[3, 1, 5, 2]])).tolist()
            [[3, 6, 2]]
        """
        places, experts = [], []
        for rank, mine in enumerate(self.experts_of_rank):
            places += [rank * self.num_local_experts + number for number in range(len(mine))]
            experts += mine
        index = torch.tensor(experts, device=values_P.device)
        sums = values_P.new_zeros(*values_P.shape[:-1], self.num_experts)
        return sums.index_add(-1, index, values_P[..., torch.tensor(places, device=values_P.device)])

    def _shares_of(self, expert: int) -> list[float]:
        """Return the shares of an expert's replicas, in the order of their ranks."""
        if self.shares is None:
            return [1.0] * len(self.ranks_of_expert[expert])
        return [self.shares[w][self.experts_of_rank[w].index(expert)] for w in self.ranks_of_expert[expert]]


def look_up(ids_TK: torch.Tensor, table: torch.Tensor, first_number: int) -> torch.Tensor:
    """Return the place of every slot, int64 `(T, K)`; see `Placement.places`.

    Args:
        ids_TK: integers, in `[-1, E)`.
        table: of `Placement.table`, on the device of the ids.
        first_number: of `Placement.first_number`.
    """
    token_T = torch.arange(ids_TK.shape[0], device=ids_TK.device)
    number_T = (token_T * STRIDE + first_number) % SHARE_UNITS
    place, end = table[ids_TK.long().clamp(min=0)].unbind(-1)
    replica_TK = (number_T[:, None, None] >= end).sum(-1)
    return torch.where(ids_TK < 0, -1, place.gather(-1, replica_TK[..., None]).squeeze(-1).long())
