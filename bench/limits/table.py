"""The limits as tables, for a terminal or for a page in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from bench.limits.budget import (
    Pass,
    budget_of,
    dispatch_overhead,
    rows_for_slots,
    whole_overhead,
)
from bench.limits.hardware import GB, HARDWARE, Hardware
from bench.limits.load import expected
from bench.limits.traffic import Bytes, backward, forward, gather, scatter
from bench.shapes import SHAPES, Shape

MB = 1e6
FORWARD = ("count", "scatter", "expand", "gather", "finish")
BACKWARD = tuple(f"{kernel} of gradients" for kernel in FORWARD[1:])


@dataclass(frozen=True)
class Table:
    """Cells as they are printed; the first `texts` columns are text, the others numbers."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    texts: int = 1

    def format(self, markdown: bool) -> str:
        """Return the table under its title; in Markdown without it, as the page has words of its own."""
        numbers = len(self.headers) - self.texts
        text = tabulate(
            self.rows,
            headers=self.headers,
            tablefmt="pipe" if markdown else "simple",
            colalign=("left",) * self.texts + ("right",) * numbers,
            disable_numparse=True,
        )
        return text if markdown else f"{self.title}\n\n{text}"


def tables_of(shapes: Sequence[str], hardware: Sequence[str], names: Sequence[str]) -> list[Table]:
    """Return the tables called `names`, for the shapes and the hardware of these names."""
    chosen = [SHAPES[name] for name in shapes]
    devices = [HARDWARE[name] for name in hardware]
    makers = {
        "shapes": lambda: [_shapes(chosen)],
        "bytes": lambda: [_bytes(shape) for shape in chosen],
        "forward": lambda: [_times(chosen, devices, "forward")],
        "backward": lambda: [_times(chosen, devices, "backward")],
        "peaks": lambda: [_peaks(devices)],
    }
    return [table for name in names for table in makers[name]()]


def _shapes(shapes: list[Shape]) -> Table:
    rows = []
    for shape in shapes:
        load = expected(shape)
        sent = scatter(load).sent
        zeros = load.row * load.rows
        rows.append(
            [
                shape.name,
                *(f"{n}" for n in (shape.tokens, shape.hidden, shape.experts, shape.top_k, shape.ranks)),
                f"{load.copies_out / load.tokens:.2f}",
                f"{load.sent / load.tokens:.2f}",
                f"{sent.total / MB:.1f}",
                f"{gather(load).sent.total / MB:.1f}",
                f"{rows_for_slots(load) / MB:.1f}",
                f"{dispatch_overhead(load):.2%}",
                f"{whole_overhead(load):.2%}",
                f"{shape.config().symmetric_bytes(shape.ranks) / 2**30:.2f}",
                f"{zeros / MB:.0f}",
            ]
        )
    headers = ["shape", *"TDEKW", "copies", "remote", "dispatch", "combine", "row a slot", "extra"]
    headers += ["extra, all", "GiB", "zero rows"]
    title = (
        "Sizes; copies of a token, and those to other ranks; MB that a rank sends in a dispatch, in a\n"
        "combine, and in rows alone with one row for each slot; bytes sent beside the payload, in the\n"
        "dispatch and in forward and backward; GiB of symmetric memory, two lanes; MB of zero rows with a\n"
        "static capacity of twice the mean."
    )
    return Table(title, headers, rows)


def _bytes(shape: Shape) -> Table:
    load = expected(shape)
    rows = [
        [
            traffic.kernel,
            *(_cell(moved) for moved in (traffic.reads, traffic.writes, traffic.sent, traffic.received)),
        ]
        for traffic in (*forward(load), *backward(load))
    ]
    title = f"{shape.title} ({shape.name}): MB at each rank, payload + the rest"
    return Table(title, ["kernel", "reads", "writes", "sends", "receives"], rows)


def _cell(moved: Bytes) -> str:
    payload, rest = moved.payload / MB, moved.rest / MB
    return f"{payload:.1f} + {rest:.2f}" if payload else f"{rest:.2f}"


def _times(shapes: list[Shape], devices: list[Hardware], which: str) -> Table:
    kernels = {"forward": FORWARD, "backward": BACKWARD}[which]
    rows = []
    for shape in shapes:
        for device in devices:
            times: Pass = getattr(budget_of(expected(shape), device), which)
            cells = [*(times.kernels.get(kernel) for kernel in kernels), times.sum, times.hidden]
            rows.append([shape.name, device.name, *(_microseconds(time) for time in cells)])
    title = f"Microseconds of the {which} at best; hidden: if copies within a rank ran under the link"
    headers = [kernel.removesuffix(" of gradients") for kernel in kernels]
    return Table(title, ["shape", "hardware", *headers, which, "hidden"], rows, texts=2)


def _microseconds(time: float | None) -> str:
    if time is None:
        return "-"
    return f"{time:.0f}" if time >= 10 else f"{time:.1f}"


def _peaks(devices: list[Hardware]) -> Table:
    rows = [
        [device.name, device.title, f"{device.memory / GB:.0f}", f"{device.link / GB:.0f}"]
        for device in devices
    ]
    title = "GB/s: memory; link to other ranks in one direction"
    return Table(title, ["hardware", "device", "memory", "link"], rows, texts=2)
