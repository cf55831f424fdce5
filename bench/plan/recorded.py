"""A micro-batch's costs as the timelines of a synchronous run show them.

The run takes micro-batches one after another, each forward and each backward in a recording of its own:

    for x in micro_batches:
        with dispatcher.record() as forward:
            (out,) = symm_a2a.Domino(dispatcher, 1).run(block, [x])
        with dispatcher.record() as backward:
            out.sum().backward()

Between two exchanges lies compute. What follows a combine and what precedes the next layer's dispatch cannot
be told apart, and need not be: no schedule puts anything between them. So `post` of a layer holds both, and
only the first layer has a `pre`. Launches and joins count without the time in which they waited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from bench.plan.costs import Position
from bench.plan.measured import KINDS, STAGES, Measured, RankTimes, Seen
from symm_a2a import Link
from symm_a2a.kernels.channel import Kind
from symm_a2a.timeline import Exchange, Timeline


def from_timelines(
    forwards: Iterable[Timeline], backwards: Iterable[Timeline], link: Link | None = None
) -> Measured:
    """Return what a synchronous run's timelines show: medians over its micro-batches.

    Args:
        forwards: one for each micro-batch on each rank.
        backwards: the same of backwards.
        link: that was emulated; None to take the median time in flight of all exchanges as a latency.

    Raises:
        ValueError: no timelines, or some that are not of such runs.
    """
    forwards, backwards = list(forwards), list(backwards)
    ranks = sorted({timeline.rank for timeline in forwards})
    if not ranks or ranks != sorted({timeline.rank for timeline in backwards}):
        raise ValueError(f"expected forwards and backwards of the same ranks, got forwards of {ranks}")
    if link is None:
        flights = [e.flight.seconds for timeline in (*forwards, *backwards) for e in timeline.exchanges]
        link = Link(latency=median(flights))
    layers = len(forwards[0].exchanges) // 2
    times = [
        _rank_times(
            [_split(one, layers, forward=True) for one in forwards if one.rank == rank]
            + [_split(one, layers, forward=False) for one in backwards if one.rank == rank]
        )
        for rank in ranks
    ]
    return Measured(tuple(times), layers, link)


def _rank_times(parts: Sequence[tuple[dict[Position, float], list[tuple[Kind, Seen]]]]) -> RankTimes:
    compute: dict[Position, list[float]] = {}
    exchanges: dict[Kind, list[Seen]] = {}
    for stretches, seen in parts:
        for at, seconds in stretches.items():
            compute.setdefault(at, []).append(seconds)
        for kind, one in seen:
            exchanges.setdefault(kind, []).append(one)
    return RankTimes(
        {at: median(seconds) for at, seconds in compute.items()},
        {kind: Seen(*map(median, zip(*seen, strict=True))) for kind, seen in exchanges.items()},
    )


def _split(
    timeline: Timeline, layers: int, *, forward: bool
) -> tuple[dict[Position, float], list[tuple[Kind, Seen]]]:
    """Return the stretches of compute of one micro-batch's forward or backward, and its exchanges."""
    first, second = KINDS[:2] if forward else KINDS[2:]
    kinds = [exchange.kind for exchange in timeline.exchanges]
    if kinds != [first, second] * layers:
        raise ValueError(
            f"expected {first.title} and {second.title} in turns, {layers} layers of one micro-batch, got "
            f"{', '.join(kind.title for kind in kinds) or 'nothing'}; record each forward and backward apart"
        )
    order = range(layers) if forward else range(layers - 1, -1, -1)
    ends = [timeline.span.begin, *(exchange.join.end for exchange in timeline.exchanges)]
    begins = [*(exchange.launch.begin for exchange in timeline.exchanges), timeline.span.end]
    gaps = [max(0.0, begin - end) for end, begin in zip(ends, begins, strict=True)]
    compute: dict[Position, float] = {(forward, stage, layer): 0.0 for stage in STAGES for layer in order}
    head, tail = gaps[0], gaps[-1]
    for place, layer in enumerate(order):
        out, back = timeline.exchanges[2 * place : 2 * place + 2]
        # Shared experts run between launch and join of a combine, and of its backward.
        beside = back if forward else out
        compute[forward, "shared", layer] = max(0.0, beside.join.begin - beside.launch.end)
        compute[forward, "experts", layer] = gaps[2 * place + 1]
        # Between layers: forward what follows this one, backward what precedes it.
        if place + 1 < layers:
            compute[forward, "post", layer if forward else layer - 1] = gaps[2 * place + 2]
    first_stage, last_stage = ("pre", "post") if forward else ("post", "pre")
    compute[forward, first_stage, order[0]] = head
    compute[forward, last_stage, order[-1]] = tail
    return compute, [(exchange.kind, _seen(exchange)) for exchange in timeline.exchanges]


def _seen(exchange: Exchange) -> Seen:
    waited = exchange.wait.seconds if exchange.beside else exchange.flight.seconds
    return Seen(exchange.launch.seconds, max(0.0, exchange.join.seconds - waited), exchange.nbytes)
