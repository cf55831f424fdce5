"""The figures as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from bench.kernels.figures import Figures

HEADERS = (
    "shape", "target", "kernel", "registers", "stack\nbytes", "spills (loops,\ninnermost)", "shared\nbytes",
    "row load\nbytes", "row store\nbytes", "acquires\nreleases", "instr.\nper 16 B", "warps\nper SM",
    "tiles\nKB per SM", "in flight\nKB per SM",
)  # fmt: skip

NOTES = """\
spills: LDL and STL instructions; how many are in a loop that moves rows, and in the innermost such loop
row load, row store: the narrowest access of rows, bytes of a thread
instr. per 16 B: of the innermost loop that loads rows, per thread and 16 bytes moved, masked ones left out
warps per SM: resident on a multiprocessor, with the grid that the shape has
tiles, in flight: rows that a multiprocessor asks for at once, masked ones left out: of one round of that loop
as the source has it; and as the machine code has it, up to the first use of what was loaded"""


def format_table(figures: Sequence[Figures]) -> str:
    """Return a row per kernel, and what the columns are."""
    table = tabulate([_row(kernel) for kernel in figures], headers=HEADERS, disable_numparse=True)
    return f"{table}\n\n{NOTES}"


def _row(kernel: Figures) -> list[str]:
    inside = "" if kernel.loop_spills is None else f" ({kernel.loop_spills}, {kernel.inner_spills})"
    flags = "" if kernel.acquires is None else f"{kernel.acquires} {kernel.releases}"
    return [
        kernel.shape,
        kernel.target,
        kernel.kernel.removeprefix("_").replace("_kernel", ""),
        _text(kernel.registers),
        _text(kernel.stack),
        _text(kernel.spills) + inside,
        _text(kernel.shared),
        _text(kernel.load_bytes),
        _text(kernel.store_bytes),
        flags,
        _text(kernel.instructions),
        _text(kernel.resident_warps),
        _text(kernel.tile_bytes, 1024),
        _text(kernel.flight_bytes, 1024),
    ]


def _text(figure: float | None, unit: int = 1) -> str:
    if figure is None:
        return ""
    return f"{figure:,}" if isinstance(figure, int) and unit == 1 else f"{figure / unit:.1f}"
