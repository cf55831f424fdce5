"""The shortest times that the bytes allow: each kernel alone, a pass, and a pass with its copies hidden."""

from __future__ import annotations

from dataclasses import dataclass

from bench.limits.hardware import Hardware
from bench.limits.load import Load
from bench.limits.traffic import Traffic, backward, forward, total

MICRO = 1e6


@dataclass(frozen=True)
class Pass:
    """Times of a forward or a backward, in microseconds.

    Attributes:
        kernels: of each kernel, by name, in order.
        sum: of all, one after another.
        hidden: if all that passes memory ran while something passes the link.
    """

    kernels: dict[str, float]
    sum: float
    hidden: float


@dataclass(frozen=True)
class Budget:
    """Both passes of one load on one hardware."""

    forward: Pass
    backward: Pass


def speed_of_light(traffic: Traffic, hardware: Hardware, ranks: int) -> float:
    """Return the microseconds of a kernel that keeps memory or the link busy all the time."""
    memory = traffic.in_memory / hardware.memory
    link = traffic.over_link / hardware.link_among(ranks) if ranks > 1 else 0.0
    return MICRO * max(memory, link)


def budget_of(load: Load, hardware: Hardware) -> Budget:
    """Return the times of a load on some hardware."""
    return Budget(_pass(forward(load), hardware, load.ranks), _pass(backward(load), hardware, load.ranks))


def _pass(traffics: list[Traffic], hardware: Hardware, ranks: int) -> Pass:
    kernels = {traffic.kernel: speed_of_light(traffic, hardware, ranks) for traffic in traffics}
    return Pass(kernels, sum(kernels.values()), speed_of_light(total("all", traffics), hardware, ranks))


def dispatch_overhead(load: Load) -> float:
    """Return the bytes beside the payload that a dispatch sends, as a share of its payload."""
    sent = total("dispatch", forward(load)[:-2]).sent
    return sent.rest / sent.payload if sent.payload else 0.0


def whole_overhead(load: Load) -> float:
    """Return the bytes beside the payload that forward and backward send, as a share of their payload."""
    sent = total("all", [*forward(load), *backward(load)]).sent
    return sent.rest / sent.payload if sent.payload else 0.0


def rows_for_slots(load: Load) -> float:
    """Return the bytes of rows that an all-to-all with one row for each slot sends, in one direction."""
    return load.row * load.slots * load.others / load.ranks
