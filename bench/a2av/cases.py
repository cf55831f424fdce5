"""What is measured: the cases that the options ask for, the same list on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

import symm_a2a
from bench.a2av.options import ROUTED, Op, Options, PlacementName
from bench.shapes import SHAPES, Shape
from bench.trace import Trace

Mode = Literal["gpu", "interpreted"]

HOST_TOKENS, HOST_HIDDEN = 64, 128
"""What tokens and hidden are scaled down to without GPUs."""

SIZES: dict[Mode, tuple[int, ...]] = {
    "gpu": tuple(4096 * 4**power for power in range(8)),
    "interpreted": (1024, 8192, 65536),
}
"""Bytes to each peer, of an even exchange."""

EVEN_HIDDEN = 2048
"""Elements of a row of an even exchange, where that many fit."""


@dataclass(frozen=True)
class Case:
    """One operation on one shape and routing; every backend runs it.

    Attributes:
        op: the operation.
        shape: the shape's name; "scaled" or "changed" added where its sizes are not as published.
        routing: how ids are drawn; "even" and "none" for operations that have no choice.
        ranks: W.
        tokens: T of each rank.
        hidden: D.
        experts: E.
        top_k: K.
        dtype: of rows, its name.
        capacity: of symm's dispatcher.
        bytes_per_peer: of an even exchange, what each rank sends to each.
        placement: which rank has which experts.
    """

    op: Op
    shape: str
    routing: str
    ranks: int
    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: str
    capacity: Literal["exact", "static"] = "exact"
    bytes_per_peer: int | None = None
    placement: PlacementName = "contiguous"

    @property
    def row_dtype(self) -> torch.dtype:
        """Of rows."""
        return getattr(torch, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.hidden * self.row_dtype.itemsize

    @property
    def title(self) -> str:
        """The case in a few words."""
        if self.bytes_per_peer is not None:
            return f"{self.op} {self.bytes_per_peer} B"
        if self.routing == "none":
            return self.op
        placed = "" if self.placement == "contiguous" else f" {self.placement}"
        return f"{self.op} {self.shape} {self.routing}{placed}"

    def config(
        self, capacity: int | Literal["exact"], placement: symm_a2a.Placement | None = None
    ) -> symm_a2a.EPConfig:
        """Return a dispatcher's configuration."""
        return symm_a2a.EPConfig(
            num_experts=self.experts,
            top_k=self.top_k,
            hidden_dim=self.hidden,
            max_tokens_per_rank=self.tokens,
            dtype=self.row_dtype,
            num_lanes=1,
            capacity=capacity,
            placement=placement,
        )


def plan(options: Options, ranks: int, mode: Mode, trace: Trace | None = None) -> list[Case]:
    """Return the cases, in the order in which they run.

    Args:
        options: which.
        ranks: W.
        mode: where; without GPUs shapes are scaled down.
        trace: of `options.trace`.

    Raises:
        ValueError: the sizes do not fit the ranks or the trace.
    """
    cases = []
    for op in options.op:
        if op == "even":
            cases += _even(options, ranks, mode)
        elif op == "flags":
            cases.append(Case(op, "none", "none", ranks, 1, 8, ranks, 1, "float32", options.capacity))
        else:
            cases += _routed(op, options, ranks, mode, trace)
    return list(dict.fromkeys(cases))


def _even(options: Options, ranks: int, mode: Mode) -> Iterator[Case]:
    dtype = options.dtype or "bfloat16"
    itemsize = getattr(torch, dtype).itemsize
    for size in options.sizes or SIZES[mode]:
        hidden = min(EVEN_HIDDEN, size // itemsize)
        rows = size // (hidden * itemsize)
        yield Case(
            "even", "even", "even", ranks, rows * ranks, hidden, ranks, 1, dtype, options.capacity,
            rows * hidden * itemsize,
        )  # fmt: skip


def _routed(op: Op, options: Options, ranks: int, mode: Mode, trace: Trace | None) -> Iterator[Case]:
    for name in options.shape:
        shape, label = sizes_of(SHAPES[name], options, mode)
        for routing in options.routing:
            case = Case(
                op, label, routing, ranks, shape.tokens, shape.hidden, shape.experts, shape.top_k,
                str(shape.dtype).removeprefix("torch."), options.capacity,
            )  # fmt: skip
            if routing == "trace":
                assert trace is not None
                case = _traced(case, options, trace)
            if case.experts % ranks:
                raise ValueError(
                    f"expected experts that divide among {ranks} ranks, got {case.experts} of {label}; "
                    "use another number of ranks, or --experts"
                )
            if case.top_k > case.experts:
                raise ValueError(f"expected a top-k of at most {case.experts} experts, got {case.top_k}")
            if "replicas" in options.placement and case.experts == case.experts // ranks:
                raise ValueError("expected more than one rank for --placement replicas, got 1")
            placements = options.placement if op in ROUTED else ("contiguous",)
            yield from (replace(case, placement=placement) for placement in placements)


def sizes_of(shape: Shape, options: Options, mode: Mode) -> tuple[Shape, str]:
    """Return a shape with the options' sizes in place of its own, and a name that says so.

    Example:
        >>> shape, name = sizes_of(SHAPES["dsv3"], Options(hidden=64), "interpreted")
        >>> shape.tokens, shape.hidden, shape.experts, name
        (64, 64, 256, 'dsv3 scaled')
        >>> sizes_of(SHAPES["dsv3"], Options(top_k=4), "gpu")[1]
        'dsv3 changed'
    """
    tokens, hidden = shape.tokens, shape.hidden
    if mode == "interpreted":
        tokens, hidden = min(tokens, HOST_TOKENS), min(hidden, HOST_HIDDEN)
    sized = replace(
        shape,
        tokens=options.tokens or tokens,
        hidden=options.hidden or hidden,
        experts=options.experts or shape.experts,
        top_k=options.top_k or shape.top_k,
        dtype=getattr(torch, options.dtype) if options.dtype else shape.dtype,
    )
    if sized == shape:
        return sized, shape.name
    return sized, f"{shape.name} {'scaled' if mode == 'interpreted' else 'changed'}"


def _traced(case: Case, options: Options, trace: Trace) -> Case:
    """Return the case with the sizes of the trace."""
    ranks, tokens, top_k = trace.ids.shape[2:]
    asked = {
        "ranks": case.ranks,
        "tokens": options.tokens,
        "experts": options.experts,
        "top_k": options.top_k,
    }
    there = {"ranks": ranks, "tokens": tokens, "experts": trace.num_experts, "top_k": top_k}
    for name, value in asked.items():
        if value is not None and value != there[name]:
            raise ValueError(f"expected {there[name]} {name}, as in {options.trace}, got {value}")
    trace.layer(options.trace_step, options.trace_layer)
    return replace(case, shape="trace", tokens=tokens, experts=trace.num_experts, top_k=top_k)
