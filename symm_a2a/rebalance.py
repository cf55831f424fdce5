"""A placement proposed from recorded loads."""

from __future__ import annotations

from collections.abc import Sequence

from symm_a2a.errors import ConfigError
from symm_a2a.placement import Placement

_ROUNDS = 8
"""How often each expert's shares are set anew, given those of the others."""


def rebalance(slots_E: Sequence[float], world_size: int, num_local_experts: int | None = None) -> Placement:
    """Return a placement under which the given loads fall evenly on the ranks, as far as a greedy one can.

    Places asked for beyond one for each expert become replicas, one after another of the expert whose
    replicas have most to do. Then the replicas go, the heaviest first, each to the rank with the least load
    so far that has room and not that expert yet. Last, the shares of replicated experts move to where less is
    to do. The same loads give the same placement on every rank: take them from `stats().load.slots_E`, which
    is equal everywhere, and not from what one rank's router counted.

    Args:
        slots_E: `(E,)`, the load of each expert, in any unit, not negative.
        world_size: W.
        num_local_experts: places of each rank, all of them filled: those beyond one for each expert are for
            replicas. None for as many as the experts need, and no replicas.

    Raises:
        ConfigError: fewer places than experts, more replicas than ranks for every expert, or loads that are
            negative or have no finite sum.

    Example:
        >>> rebalance([8, 1, 1, 6], world_size=2).experts_of_rank
        ((0, 2), (1, 3))
        >>> placement = rebalance([9, 3], world_size=2, num_local_experts=2)
        >>> placement.experts_of_rank, placement.ranks_of_expert
        (((0, 1), (0, 1)), ((0, 1), (0, 1)))
    """
    loads = [float(load) for load in slots_E]
    num_experts = len(loads)
    if not loads:
        raise ConfigError("expected the load of at least one expert, got none")
    for name, value in (("world_size", world_size), ("num_local_experts", num_local_experts)):
        if (name == "world_size" or value is not None) and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"expected {name} to be a positive int, got {value!r}")
    num_local = -(-num_experts // world_size) if num_local_experts is None else num_local_experts
    if not (all(load >= 0 for load in loads) and sum(loads) < float("inf")):
        raise ConfigError(f"expected loads that are not negative, of a finite sum, got {loads}")
    if not num_experts <= world_size * num_local <= world_size * num_experts:
        raise ConfigError(
            f"expected places for {num_experts} experts, at most {num_experts} on a rank, got {num_local} on "
            f"each of {world_size} ranks"
        )
    extra = 0 if num_local_experts is None else world_size * num_local - num_experts
    replicas = _replicas(loads, world_size, extra)
    ranks = _pack(loads, replicas, world_size, num_local)
    experts = tuple(tuple(sorted(mine)) for mine in ranks)
    return Placement(experts, _level(loads, Placement(experts)))


def _replicas(loads: list[float], world_size: int, extra: int) -> list[int]:
    """Return how many replicas each expert has, one and those of the `extra` places that it needs most."""
    replicas = [1] * len(loads)
    for _ in range(extra):
        open_experts = [e for e, n in enumerate(replicas) if n < world_size]
        replicas[max(open_experts, key=lambda e: (loads[e] / replicas[e], -replicas[e], -e))] += 1
    return replicas


def _pack(loads: list[float], replicas: list[int], world_size: int, num_local: int) -> list[set[int]]:
    """Return each rank's experts; heavy replicas first, each to the rank with the least to do.

    An expert is at most once on a rank. So where all places are to be filled, a rank that has as much room
    as there are experts to come gets one of each, and of those with more replicas fewer ranks are left: they
    come first.
    """
    ranks: list[set[int]] = [set() for _ in range(world_size)]
    total = [0.0] * world_size
    full = sum(replicas) == world_size * num_local
    by_weight = sorted(range(len(loads)), key=lambda e: (-replicas[e], -loads[e] / replicas[e], e))
    for number, expert in enumerate(by_weight):
        to_come = len(loads) - number
        room = [num_local - len(mine) for mine in ranks]
        chosen = sorted(
            (w for w in range(world_size) if room[w]),
            key=lambda w: (full and room[w] < to_come, total[w], -room[w], w),
        )[: replicas[expert]]
        for rank in chosen:
            ranks[rank].add(expert)
            total[rank] += loads[expert] / replicas[expert]
    return ranks


def _level(loads: list[float], placement: Placement) -> tuple[tuple[float, ...], ...]:
    """Return shares that fill up the less loaded of each expert's ranks first."""
    ranks_of_expert = placement.ranks_of_expert
    share = {(w, e): 1 / len(ranks) for e, ranks in enumerate(ranks_of_expert) for w in ranks}
    total = [sum(share[w, e] * loads[e] for e in mine) for w, mine in enumerate(placement.experts_of_rank)]
    for _ in range(_ROUNDS):
        for expert in sorted(range(len(loads)), key=lambda e: (-loads[e], e)):
            ranks = ranks_of_expert[expert]
            if len(ranks) == 1 or not loads[expert]:
                continue
            for w in ranks:
                total[w] -= share[w, expert] * loads[expert]
            parts = _fill([total[w] for w in ranks], loads[expert])
            if sum(parts) > 0:  # Beside much larger loads it may come to nothing.
                share.update(
                    {(w, expert): part / loads[expert] for w, part in zip(ranks, parts, strict=True)}
                )
            for w in ranks:
                total[w] += share[w, expert] * loads[expert]
    return tuple(tuple(share[w, e] for e in mine) for w, mine in enumerate(placement.experts_of_rank))


def _fill(levels: list[float], amount: float) -> list[float]:
    """Return what each vessel takes when an amount is poured over vessels filled to these levels.

    Example:
        >>> _fill([1.0, 4.0, 2.0], 4.0)
        [2.5, 0.0, 1.5]
    """
    ordered = sorted(levels)
    surface = 0.0
    for count in range(1, len(ordered) + 1):
        surface = (amount + sum(ordered[:count])) / count
        if count == len(ordered) or surface <= ordered[count]:
            break
    return [max(0.0, surface - level) for level in levels]
