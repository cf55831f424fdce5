"""Measured costs in a JSON file.

    {"layers": 4, "latency": 0.001, "bandwidth": 1e9, "ranks": [{
        "compute": {"forward": {"pre": 0.06, "experts": 0.06, "shared": 0, "post": 0.02}, "backward": {...}},
        "exchanges": {"dispatch": {"launch": 0.01, "join": 0.01, "bytes": 1e6}, "combine": {...},
                      "combine_backward": {...}, "dispatch_backward": {...}}}, ...]}

Seconds of one micro-batch, and bytes that leave a rank; an object for each rank. A stage may have a list of
seconds, one for each layer. What is left out is nothing, and a bandwidth without end.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bench.plan.costs import Position
from bench.plan.hardware import read_object
from bench.plan.measured import KINDS, STAGES, Measured, RankTimes, Seen
from symm_a2a import Link


def from_file(path: Path) -> Measured:
    """Return the costs in a JSON file, of the form above.

    Raises:
        ValueError: says what is wrong with it.
    """
    found = read_object(path)
    try:
        layers = int(found["layers"])
        bandwidth = found.get("bandwidth")
        link = Link(latency=found.get("latency", 0.0), bandwidth=math.inf if bandwidth is None else bandwidth)
        ranks = tuple(_read_rank(rank, layers) for rank in found["ranks"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected layers, ranks, and in each compute and exchanges, in {path}: {error!r}"
        ) from error
    if layers < 1 or len(ranks) < 2:
        raise ValueError(f"expected a layer and two ranks at least in {path}, got {layers} and {len(ranks)}")
    return Measured(ranks, layers, link)


def as_object(measured: Measured) -> dict[str, Any]:
    """Return costs in the form of the file."""
    return {
        "layers": measured.layers,
        "latency": measured.link.latency,
        "bandwidth": None if math.isinf(measured.link.bandwidth) else measured.link.bandwidth,
        "ranks": [_write_rank(rank, measured.layers) for rank in measured.ranks],
    }


def _read_rank(given: dict[str, Any], layers: int) -> RankTimes:
    compute: dict[Position, float] = {}
    for name, forward in (("forward", True), ("backward", False)):
        for stage in STAGES:
            seconds = given["compute"][name].get(stage, 0.0)
            seconds = seconds if isinstance(seconds, list) else [seconds] * layers
            if len(seconds) != layers or not all(float(one) >= 0 for one in seconds):
                raise ValueError(f"expected {name} {stage} in seconds, or {layers} of them, got {seconds}")
            compute |= {(forward, stage, layer): float(one) for layer, one in enumerate(seconds)}
    exchanges = {}
    for kind in KINDS:
        one = given["exchanges"][kind.name.lower()]
        exchanges[kind] = Seen(one.get("launch", 0.0), one.get("join", 0.0), one.get("bytes", 0.0))
    return RankTimes(compute, exchanges)


def _write_rank(rank: RankTimes, layers: int) -> dict[str, Any]:
    return {
        "compute": {
            name: {
                stage: [rank.compute[forward, stage, layer] for layer in range(layers)] for stage in STAGES
            }
            for name, forward in (("forward", True), ("backward", False))
        },
        "exchanges": {
            kind.name.lower(): {"launch": seen.launch, "join": seen.join, "bytes": seen.nbytes}
            for kind, seen in rank.exchanges.items()
        },
    }
