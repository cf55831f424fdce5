"""How long the stages of a layer take: arithmetic over speeds, by the assumptions of one file."""

from __future__ import annotations

from bench.plan import gemm
from bench.plan.assumptions import (
    ACTIVATION_PASSES,
    ACTIVATION_PASSES_BACKWARD,
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    KERNELS,
    ROW_PASSES,
)
from bench.plan.hardware import Profile
from bench.plan.models import Model
from bench.plan.operations import Stage

BACKWARD_ATTENTION = 2.5
"""Products of attention's backward for each of its forward, which has two: five, one of them a repetition."""


def pre_seconds(model: Model, profile: Profile, tokens: int, context: int, *, backward: bool) -> float:
    """Return the seconds of norms, attention and router on a rank."""
    projections = sum(
        gemm.seconds(profile, tokens, inner, columns, backward=backward)
        for inner, columns in model.attention.projections(model.hidden)
    )
    router = gemm.seconds(profile, tokens, model.hidden, model.experts, backward=backward)
    # Each token attends, in the mean, to half of its sequence: once for the scores, once for the values.
    flops = tokens * context * (model.attention.score_dims + model.attention.value_dims)
    speed = profile.flops * (ATTENTION_BACKWARD if backward else ATTENTION_FORWARD)
    attention = flops * (BACKWARD_ATTENTION if backward else 1.0) / speed
    return projections + router + attention + _elementwise(model, profile, tokens, "pre", backward)


def post_seconds(model: Model, profile: Profile, tokens: int, *, backward: bool) -> float:
    """Return the seconds of what follows the combine."""
    return _elementwise(model, profile, tokens, "post", backward)


def shared_seconds(model: Model, profile: Profile, tokens: int, *, backward: bool) -> float:
    """Return the seconds of the shared experts, which see every token of a rank."""
    return _mlp_seconds(
        model, profile, tokens, model.intermediate * model.shared, experts=None, backward=backward
    )


def expert_seconds(model: Model, profile: Profile, rows: float, experts: int, *, backward: bool) -> float:
    """Return the seconds of a rank's experts that have so many rows each, in the mean."""
    return _mlp_seconds(model, profile, rows, model.intermediate, experts=experts, backward=backward)


def _mlp_seconds(
    model: Model, profile: Profile, rows: float, inner: int, *, experts: int | None, backward: bool
) -> float:
    if rows <= 0:
        return 0.0
    products = sum(
        gemm.seconds(profile, rows, *sizes, experts=experts, backward=backward)
        for sizes in ((model.hidden, 2 * inner), (inner, model.hidden))
    )
    passes = ACTIVATION_PASSES_BACKWARD if backward else ACTIVATION_PASSES
    moved = passes * inner * rows * (experts or 1) * gemm.ITEMSIZE
    return products + moved / (profile.memory * profile.memory_efficiency)


def host_seconds(profile: Profile, stage: Stage, *, forward: bool) -> float:
    """Return the seconds in which the host issues a stage."""
    return KERNELS[stage] * profile.overhead * (1 if forward else 2)


def _elementwise(model: Model, profile: Profile, tokens: int, stage: str, backward: bool) -> float:
    moved = ROW_PASSES[stage] * model.hidden * tokens * gemm.ITEMSIZE * (2 if backward else 1)
    return moved / (profile.memory * profile.memory_efficiency)
