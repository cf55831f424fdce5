"""Whether Domino helps, and why, or why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.plan.assumptions import GIB, LITTLE_COMMUNICATION, USABLE_MEMORY, WORTHWHILE
from bench.plan.schedules import Schedule, gain

Reason = Literal[
    "helps", "memory", "communication too short", "compute too short", "micro-batches too small", "one lane"
]


_TOO_SMALL = (
    "smaller micro-batches cost what they hide, or more; whole batches, where gradients accumulate, do not"
)


@dataclass(frozen=True)
class Verdict:
    """What to do.

    Attributes:
        reason: in a few words; "helps" is the only one for it.
        micro_batches: of the best way with Domino that fits, or the best of all if none does.
        gain: the share of the step that it saves.
        text: for a person.
    """

    reason: Reason
    micro_batches: int
    gain: float
    text: str

    @property
    def helps(self) -> bool:
        """Whether to use Domino."""
        return self.reason == "helps"


def fits(schedule: Schedule, capacity: float | None) -> bool:
    """Return whether a schedule fits a device's memory, as far as anybody knows."""
    if capacity is None or schedule.memory is None:
        return True
    return schedule.memory.total <= USABLE_MEMORY * capacity


def judge(together: Schedule, interleaved: Sequence[Schedule], capacity: float | None) -> Verdict:
    """Return the verdict.

    Args:
        together: the step without Domino.
        interleaved: the step with it, for each number of micro-batches.
        capacity: bytes of a device's memory; None if memory is no matter.
    """
    fitting = [one for one in interleaved if fits(one, capacity)]
    best = min(fitting or interleaved, key=lambda one: one.seconds)
    saved = gain(together.seconds, best.seconds)
    reason, text = _reason(together, best, saved, capacity, any_fits=bool(fitting))
    return Verdict(reason, best.micro_batches, saved, text)


def _reason(
    together: Schedule, best: Schedule, saved: float, capacity: float | None, *, any_fits: bool
) -> tuple[Reason, str]:
    """Return why, and the sentences that say so."""
    if not any_fits:
        return "memory", _of_memory(together, best, capacity)
    waited = together.exposed / together.seconds
    covered, lost = together.exposed - best.exposed, _lost(together, best)
    hidden = f"{_ms(covered)} are hidden" if covered > 0 else "nothing is hidden"
    account = (
        f"A step with {best.micro_batches} micro-batches takes {_ms(best.seconds)} in place of "
        f"{_ms(together.seconds)}, {_change(saved)}: of {_ms(together.exposed)} that it waits for exchanges "
        f"{hidden}, and {_ms(lost)} are lost to smaller products, launches and contention."
    )
    if saved >= WORTHWHILE:
        return "helps", f"Domino helps. {account}{_rest(together, best)}"
    no = f"Domino does not help here: {{}}. {account}"
    if best.lanes == 1 and best.micro_batches > 1:
        return "one lane", no.format("with one lane no exchange runs beside another micro-batch's compute")
    if waited < LITTLE_COMMUNICATION and saved > -WORTHWHILE:
        return "communication too short", no.format(
            f"exchanges are {waited:.1%} of the step, too little to matter"
        )
    if best.exposed >= lost:
        return "compute too short", no.format(
            f"compute is too short to cover the exchanges, {_ms(best.exposed)} stay exposed"
        )
    return "micro-batches too small", no.format(_TOO_SMALL)


def _rest(together: Schedule, best: Schedule) -> str:
    """Return a sentence about what stays exposed, where that is worth one."""
    if best.exposed < 0.01 * best.seconds:
        return ""
    cover = ": compute is too short to cover all" if best.exposed > together.exposed / 4 else ""
    return f" {_ms(best.exposed)} stay exposed{cover}."


def _of_memory(together: Schedule, best: Schedule, capacity: float | None) -> str:
    assert capacity is not None
    assert best.memory is not None
    assert together.memory is not None
    usable = f"{USABLE_MEMORY * capacity / GIB:.1f} GiB"
    if not fits(together, capacity):
        return (
            f"The step does not fit, with Domino or without: {_gib(together)} of {usable} without. Take "
            "fewer --layers on a rank, fewer --tokens, more --ranks, or --checkpoint."
        )
    return (
        f"Domino does not fit: {best.micro_batches} micro-batches take {_gib(best)} of {usable}, "
        f"{_gib(together)} without. Take fewer --tokens in a micro-batch, or --checkpoint."
    )


def _lost(together: Schedule, best: Schedule) -> float:
    """Return the seconds by which all that is not waiting has grown."""
    return (best.seconds - best.exposed) - (together.seconds - together.exposed)


def _gib(schedule: Schedule) -> str:
    assert schedule.memory is not None
    return f"{schedule.memory.total / GIB:.1f} GiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _change(saved: float) -> str:
    return f"{saved:.1%} less" if saved >= 0 else f"{-saved:.1%} more"
