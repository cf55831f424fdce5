"""From options to a plan: what is to be done, on what, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.plan import hardware, measured_file
from bench.plan.assumptions import BYTES_PER_PARAMETER
from bench.plan.hardware import Profile
from bench.plan.imbalance import rank_loads
from bench.plan.measured import Measured
from bench.plan.models import MODELS, Model
from bench.plan.options import GB, MICRO, TERA, Options
from bench.plan.schedules import Schedule, Uneven, schedule
from bench.plan.verdict import Verdict, judge
from bench.plan.work import Computed


@dataclass(frozen=True)
class Plan:
    """What came of it.

    Attributes:
        work: that was planned.
        capacity: bytes of a device's memory; None if memory is no matter.
        together: the step without Domino.
        interleaved: the step with it, for each number of micro-batches.
        uneven: the spreads that were tried, with the verdict's number of micro-batches.
        verdict: whether it helps.
    """

    work: Computed | Measured
    capacity: float | None
    together: Schedule
    interleaved: list[Schedule]
    uneven: list[Uneven]
    verdict: Verdict

    @property
    def best(self) -> Schedule:
        """The step that the verdict is about."""
        return next(one for one in self.interleaved if one.micro_batches == self.verdict.micro_batches)


def make(options: Options) -> Plan:
    """Return the plan that is asked for.

    Raises:
        ValueError: names, sizes or files that cannot be.
    """
    options.check()
    work = _measured(options) if options.measured else _computed(options)
    capacity = work.profile.capacity if isinstance(work, Computed) else None
    together = schedule(work, 1)
    interleaved = [schedule(work, M) for M in sorted(set(options.micro_batches))]
    verdict = judge(together, interleaved, capacity)
    uneven = _uneven(work, options.imbalance, verdict.micro_batches) if isinstance(work, Computed) else []
    return Plan(work, capacity, together, interleaved, uneven, verdict)


def _uneven(work: Computed, variations: tuple[float, ...], micro_batches: int) -> list[Uneven]:
    return [
        Uneven(
            variation,
            max(rank_loads(variation, work.ranks, work.model.experts // work.ranks)),
            schedule(work, 1, variation).seconds,
            schedule(work, micro_batches, variation).seconds,
        )
        for variation in variations
    ]


def _measured(options: Options) -> Measured:
    assert options.measured is not None
    found = measured_file.from_file(options.measured)
    return replace(found, lanes=options.lanes, checkpoint=options.checkpoint)


def _computed(options: Options) -> Computed:
    model = model_of(options)
    layers = model.layers if options.layers == "all" else options.layers
    if layers > model.layers:
        raise ValueError(f"expected at most the {model.layers} layers of {options.shape}, got {layers}")
    given = options.bytes_per_parameter
    return Computed(
        model=model,
        profile=profile_of(options),
        tokens=options.tokens,
        ranks=options.ranks,
        layers=layers,
        context=options.context,
        lanes=options.lanes,
        exact=options.capacity == "exact",
        checkpoint=options.checkpoint,
        how=options.batches,
        bytes_per_parameter=BYTES_PER_PARAMETER if given is None else given,
    )


def model_of(options: Options) -> Model:
    """Return the named model, with the sizes that are given.

    Raises:
        ValueError: an unknown name, or sizes that cannot be.
    """
    if options.shape not in MODELS:
        raise ValueError(f"expected --shape to be one of {', '.join(MODELS)}, got {options.shape}")
    names = ("hidden", "experts", "top_k", "intermediate", "shared", "heads", "kv_heads", "head_dim")
    model = MODELS[options.shape].changed(**{name: getattr(options, name) for name in names})
    if model.top_k > model.experts:
        raise ValueError(f"expected --top-k of at most {model.experts} experts, got {model.top_k}")
    return model


def profile_of(options: Options) -> Profile:
    """Return the hardware, with the figures that are given.

    Raises:
        ValueError: an unknown name, a file that cannot be read, or figures that cannot be.
    """
    own_link = options.link is not None or options.profile is not None
    link = None if options.link is None else options.link * GB
    profile = hardware.named(options.hardware, 2 if own_link else options.ranks, link)
    if options.profile:
        profile = hardware.from_file(options.profile, profile)

    def scaled(figure: float | None, unit: float) -> float | None:
        return None if figure is None else figure * unit

    shares = ("contention", "gemm_efficiency", "link_efficiency", "memory_efficiency", "half_speed_rows")
    return profile.changed(
        flops=scaled(options.tflops, TERA),
        memory=scaled(options.memory_bandwidth, GB),
        link=link,
        capacity=scaled(options.memory, GB),
        latency=scaled(options.latency, MICRO),
        overhead=scaled(options.overhead, MICRO),
        **{name: getattr(options, name) for name in shares},
    )
