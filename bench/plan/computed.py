"""A micro-batch's costs, computed from sizes and a machine's speeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bench.limits.load import Load, expected
from bench.limits.traffic import (
    Traffic,
    count,
    expand,
    expand_grad,
    finish,
    finish_grad,
    gather,
    gather_grad,
    scatter,
    scatter_grad,
    total,
)
from bench.plan.assumptions import JOIN_KERNELS, LAUNCH_KERNELS
from bench.plan.costs import Costs, ExchangeCost, Position
from bench.plan.hardware import Profile
from bench.plan.imbalance import loads_of, rank_loads
from bench.plan.models import Model
from bench.plan.operations import Stage
from bench.plan.stages import expert_seconds, host_seconds, post_seconds, pre_seconds, shared_seconds
from bench.shapes import Shape
from symm_a2a.kernels.channel import Kind

KERNELS: dict[Kind, tuple[Callable[[Load], Traffic], Callable[[Load], Traffic]]] = {
    Kind.DISPATCH: (scatter, expand),
    Kind.COMBINE: (gather, finish),
    Kind.COMBINE_BACKWARD: (scatter_grad, expand_grad),
    Kind.DISPATCH_BACKWARD: (gather_grad, finish_grad),
}
"""What a launch runs, and what a join runs; a dispatch counts first."""


def shape_of(model: Model, tokens: int, ranks: int) -> Shape:
    """Return a layer's exchange, as the benchmarks know it."""
    return Shape(
        model.name, model.title, tokens=tokens, hidden=model.hidden, experts=model.experts,
        top_k=model.top_k, ranks=ranks,
    )  # fmt: skip


def costs_of(
    model: Model,
    profile: Profile,
    *,
    tokens: int,
    ranks: int,
    layers: int,
    context: int,
    exact: bool = True,
    variation: float = 0.0,
) -> Costs:
    """Return what a micro-batch costs.

    Args:
        model: sizes.
        profile: speeds.
        tokens: of each rank.
        ranks: W.
        layers: all alike.
        context: tokens of a sequence.
        exact: whether rows are as many as arrive, and the host waits for their number; otherwise there is
            room for twice the mean, and what is left of it is filled with zeros.
        variation: the coefficient of variation of tokens per expert.
    """
    even = expected(shape_of(model, tokens, ranks))
    rank_loads_W = rank_loads(variation, ranks, even.local_experts)
    loads_W = loads_of(even, rank_loads_W)
    if not exact:
        loads_W = [replace(load, gap_rows=max(0.0, 2 * even.rows - load.rows)) for load in loads_W]
    stages = _stages(model, profile, tokens, context, loads_W)
    compute: dict[Position, np.ndarray] = {}
    host: dict[Position, float] = {}
    for (forward, stage), seconds_W in stages.items():
        for layer in range(layers):
            compute[forward, stage, layer] = seconds_W
            host[forward, stage, layer] = host_seconds(profile, stage, forward=forward)
    exchanges = {kind: _exchange(kind, profile, loads_W, exact) for kind in KERNELS}
    return Costs(compute, exchanges, host)


def _stages(
    model: Model, profile: Profile, tokens: int, context: int, loads_W: list[Load]
) -> dict[tuple[bool, Stage], np.ndarray]:
    stages: dict[tuple[bool, Stage], np.ndarray] = {}
    for forward in (True, False):
        back = not forward
        alike: dict[Stage, float] = {
            "pre": pre_seconds(model, profile, tokens, context, backward=back),
            "post": post_seconds(model, profile, tokens, backward=back),
        }
        if model.shared:
            alike["shared"] = shared_seconds(model, profile, tokens, backward=back)
        stages |= {(forward, stage): np.full(len(loads_W), time) for stage, time in alike.items()}
        local = loads_W[0].local_experts
        experts = [
            expert_seconds(model, profile, load.rows / local, local, backward=back) for load in loads_W
        ]
        stages[forward, "experts"] = np.array(experts)
    return stages


def _exchange(kind: Kind, profile: Profile, loads_W: list[Load], exact: bool) -> ExchangeCost:
    launch, join = KERNELS[kind]
    memory = profile.memory * profile.memory_efficiency
    link = profile.link * profile.link_efficiency
    counts = [count(load) for load in loads_W] if kind == Kind.DISPATCH and loads_W[0].counted_apart else []
    sent = [launch(load) for load in loads_W]
    if counts:
        sent = [total("dispatch", [counted, one]) for counted, one in zip(counts, sent, strict=True)]

    def send_seconds(traffic: Traffic) -> float:
        return max(traffic.sent.total / link, traffic.in_memory / memory)

    counted_W = None
    if kind == Kind.DISPATCH and exact:
        counted_W = np.array([send_seconds(count(load)) for load in loads_W])
    return ExchangeCost(
        launch_W=np.zeros(len(loads_W)),
        send_W=np.array([send_seconds(traffic) for traffic in sent]),
        receive_W=np.array([traffic.received.total / link for traffic in sent]),
        join_W=np.array([join(load).in_memory / memory for load in loads_W]),
        nbytes_W=np.array([traffic.sent.total for traffic in sent]),
        counted_W=counted_W,
        launch_host=LAUNCH_KERNELS * profile.overhead,
        join_host=JOIN_KERNELS * profile.overhead,
    )
