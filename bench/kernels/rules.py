"""What the compiled kernels must keep to, as data; one place for the command and the tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.kernels.figures import ANNOUNCED, Figures
from bench.kernels.gpus import GPUS
from bench.kernels.polls import loops_by_file, poll_faults

FLAGS = {
    "_assign_kernel": (0, 0),
    "_count_kernel[KIND=0]": (1, 2),
    "_row_count_kernel": (1, 1),
    "_credit_kernel[KIND=1]": (1, 1),
    "_free_kernel": (0, 1),
    "_looks_kernel": (1, 0),
    "_barrier_kernel[HAS_COUNTS=0,KIND=6]": (2, 5),
    "_barrier_kernel[HAS_COUNTS=1,KIND=7]": (2, 5),
    "_scatter_kernel[PLACE=1,COUNTS_TOO=0,KIND=0]": (1, 2),
    "_scatter_kernel[PLACE=1,COUNTS_TOO=1,KIND=0]": (2, 4),
    "_scatter_kernel[PLACE=0,COUNTS_TOO=0,KIND=3]": (2, 4),
    "_scatter_kernel[PLACE=0,COUNTS_TOO=0,KIND=4]": (2, 4),
    "_expand_kernel": (1, 3),
    "_expand_again_kernel": (1, 2),
    "_expand_grad_kernel": (1, 2),
    "_expand_kernel[HOLDS=1]": (1, 2),
    "_expand_again_kernel[HOLDS=1]": (1, 1),
    "_expand_grad_kernel[HOLDS=1]": (1, 1),
    "_gather_kernel[WEIGHTED=1,HAS_SCORES=1,KIND=1]": (2, 3),
    "_gather_kernel[WEIGHTED=0,HAS_SCORES=1,KIND=2]": (2, 3),
    "_gather_kernel[WEIGHTED=0,HAS_SCORES=0,KIND=5]": (2, 3),
    "_finish_kernel[HAS_SCORES=0,KIND=1]": (1, 2),
    "_finish_kernel[HAS_SCORES=1,KIND=2]": (1, 2),
    "_finish_kernel[HAS_SCORES=0,KIND=5]": (1, 2),
    "_finish_kernel[HOLDS=1,HAS_SCORES=0,KIND=1]": (1, 1),
    "_finish_kernel[HOLDS=1,HAS_SCORES=1,KIND=2]": (1, 1),
    "_finish_kernel[HOLDS=1,HAS_SCORES=0,KIND=5]": (1, 1),
    "_count_slots_kernel": (0, 0),
    "_align_kernel": (0, 0),
    "_send_heads_kernel[KIND=0,STRIDED=0]": (1, 2),
    "_send_heads_kernel[KIND=0,STRIDED=1]": (1, 2),
    "_send_heads_kernel[KIND=1,STRIDED=0]": (1, 2),
    "_send_heads_kernel[KIND=1,STRIDED=1]": (1, 2),
    "_send_heads_kernel[KIND=2,STRIDED=0]": (1, 2),
    "_take_heads_kernel[KIND=0,SUMS=0]": (1, 1),
    "_take_heads_kernel[KIND=1,SUMS=0]": (1, 1),
    "_take_heads_kernel[KIND=1,SUMS=1]": (1, 1),
    "_take_heads_kernel[KIND=2,SUMS=0]": (1, 1),
}
"""How often each form acquires and releases at system scope: one of the releases, two where a kernel looks at
its credit and then waits for peers, or at placements after the copies, is the failure report; the others
publish."""

WAITS_IN = {"flags.py": 1}
"""The source files that have `while` loops, and how many: nothing else waits in a kernel."""

_ALL_ROWS = tuple(ANNOUNCED)
_PEER_ROWS = ("_scatter_kernel", "_gather_kernel")
_LOCAL_ROWS = ("_expand_kernel", "_expand_again_kernel", "_expand_grad_kernel", "_finish_kernel")
_EXPERTS = ("_expand_kernel", "_expand_again_kernel", "_gather_kernel", "_expand_grad_kernel")
_ORIGINS = ("_finish_kernel",)
_SEQUENCES = ("_send_heads_kernel", "_take_heads_kernel")
_STREAMS = _EXPERTS + _ORIGINS
_BUSY = ("olmoe", "dsv3", "qwen3", "kraken")
"""Shapes with work for a whole GPU; in "small", the grid is as small as the work."""


@dataclass(frozen=True)
class Rule:
    """One figure, and what it must be.

    Attributes:
        figure: an attribute of `Figures`. A kernel that `kernels` names must have it, another may not.
        relation: how the figure stands to the bound.
        bound: a number, or one for each form of a kernel.
        why: what is lost otherwise.
        kernels: names; all where empty.
        targets: names; all where empty.
        shapes: names; all where empty.
        warps: of a program; any where empty.
        aligned: ask only where the caller's rows all start at multiples of 16 bytes.
    """

    figure: str
    relation: Literal["at least", "at most", "exactly"]
    bound: Any
    why: str
    kernels: tuple[str, ...] = ()
    targets: tuple[str, ...] = tuple(GPUS)
    shapes: tuple[str, ...] = ()
    warps: tuple[int, ...] = ()
    aligned: bool = False

    def breach(self, figures: Figures) -> Breach | None:
        """Return what is wrong with a kernel, None if nothing is."""
        found = getattr(figures, self.figure)
        if not self._concerns(figures) or (found is None and not self.kernels):
            return None
        bound = self.bound
        if isinstance(bound, Mapping):
            if figures.kernel not in bound:
                return self._breach(
                    figures, "a form that FLAGS in bench/kernels/rules.py lists", "no such form"
                )
            bound = bound[figures.kernel]
        if found is not None:
            holds = {"at least": found >= bound, "at most": found <= bound, "exactly": found == bound}
            if holds[self.relation]:
                return None
        return self._breach(figures, f"{self.relation} {_text(bound)}", found)

    def _breach(self, figures: Figures, expected: str, found: Any) -> Breach:
        return Breach(
            figures.kernel, figures.target, figures.shape, f"{self.figure}: {self.why}", expected, found
        )

    def _concerns(self, figures: Figures) -> bool:
        return (
            (not self.kernels or figures.name in self.kernels)
            and (not self.targets or figures.target in self.targets)
            and (not self.shapes or figures.shape in self.shapes)
            and (not self.warps or figures.warps in self.warps)
            and (figures.aligned or not self.aligned)
        )


@dataclass(frozen=True)
class Breach:
    """A rule that is broken.

    Attributes:
        kernel: with its form; or a source file.
        target: it was compiled for, or "source".
        shape: it was compiled for, or "any".
        rule: the figure, and why it matters.
        expected: in words.
        found: the figure.
    """

    kernel: str
    target: str
    shape: str
    rule: str
    expected: str
    found: Any

    def __str__(self) -> str:
        return (
            f"{self.kernel} for {self.target}, shape {self.shape}: expected {self.expected}, "
            f"got {_text(self.found)} ({self.rule})"
        )


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "; ".join(value) or "nothing"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value or "none")


RULES = (
    Rule("store_bytes", "at least", 16, "narrow stores waste the link to a peer", kernels=_PEER_ROWS),
    Rule("store_bytes", "at least", 16, "aligned rows need none narrower", kernels=_LOCAL_ROWS, aligned=True),
    Rule("load_bytes", "at least", 16, "aligned rows need none narrower", kernels=_ALL_ROWS, aligned=True),
    Rule("store_bytes", "at least", 16, "aligned rows need none narrower", kernels=_SEQUENCES, aligned=True),
    Rule("load_bytes", "at least", 16, "aligned rows need none narrower", kernels=_SEQUENCES, aligned=True),
    Rule("loop_spills", "at most", 0, "a spill in the loop that moves rows is paid for every row"),
    Rule("stack", "at most", 16, "more is spills, or arrays that registers should hold"),
    Rule("program_registers", "at most", 32768, "two programs are to fit in", warps=(1, 2, 4, 8)),
    Rule("program_registers", "at most", 65536, "one program is to fit in", warps=(16,)),
    Rule("resident_warps", "at least", 16, "too few to hide memory latency", kernels=_STREAMS, shapes=_BUSY),
    # The tiles are what the source asks for at once, the flight is what the compiler made of it.
    Rule("tile_bytes", "at least", 16 << 10, "memory has too little to do", kernels=_EXPERTS, shapes=_BUSY),
    Rule("flight_bytes", "at least", 16 << 10, "memory has too little to do", kernels=_EXPERTS, shapes=_BUSY),
    Rule("tile_bytes", "at least", 24 << 10, "memory has too little to do", kernels=_ORIGINS, shapes=_BUSY),
    Rule("flight_bytes", "at least", 24 << 10, "memory has too little to do", kernels=_ORIGINS, shapes=_BUSY),
    Rule("acquires", "exactly", {form: acq for form, (acq, _) in FLAGS.items()}, "docs/protocol.md"),
    Rule("releases", "exactly", {form: rel for form, (_, rel) in FLAGS.items()}, "docs/protocol.md"),
    Rule("readonly_loads", "exactly", 0, "an acquire does not order them; docs/protocol.md"),
    Rule("order", "exactly", (), "docs/protocol.md, ordering on one device", targets=()),
)  # fmt: skip


def check(figures: Iterable[Figures], rules: Iterable[Rule] = RULES) -> list[Breach]:
    """Return every broken rule of every kernel, each once."""
    rules = tuple(rules)
    found = (rule.breach(kernel) for kernel in figures for rule in rules)
    return list(dict.fromkeys(breach for breach in found if breach))


def check_forms(figures: Iterable[Figures]) -> list[Breach]:
    """Return which forms of kernels were not launched, for each shape and target that any was."""
    forms: dict[tuple[str, str], set[str]] = {}
    for kernel in figures:
        forms.setdefault((kernel.target, kernel.shape), set()).add(kernel.kernel)
    rule = "a form that is no longer launched is no longer checked; take it out of FLAGS"
    return [
        Breach(form, target, shape, rule, "a launch", "none")
        for (target, shape), found in forms.items()
        for form in FLAGS
        if form not in found
    ]


def check_sources(folder: Path, waits_in: Mapping[str, int] = WAITS_IN) -> list[Breach]:
    """Return what is wrong with how the kernels of a folder wait."""
    rule = "what a loop waits for must be read by an atomic"
    breaches = [
        Breach(file.name, "source", "any", rule, "reads through tl.atomic_*", fault)
        for file in sorted(folder.glob("*.py"))
        for fault in poll_faults(file.read_text())
    ]
    loops = loops_by_file(folder)
    if loops != dict(waits_in):
        rule = "a loop that waits belongs where all are"
        breaches.append(Breach(str(folder), "source", "any", rule, f"while loops in {dict(waits_in)}", loops))
    return breaches
