"""What one kernel compiled to, in figures that rules can be about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.kernels.flow import hottest_loop, innermost_loops, instructions_per_chunk, loads_in_flight
from bench.kernels.gpus import GPUS, Gpu
from bench.kernels.ir import Tile, order_faults, places_of, read_tiles
from bench.kernels.loops import find_loops
from bench.kernels.sass import Instruction, disassemble
from bench.kernels.traffic import valid_share

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from bench.compile import Launch
    from bench.shapes import Shape

SYS_SCOPE = re.compile(r"\.sys\.(acquire|release)|\.(acquire|release)\.sys")
"""Of a flag, in PTX: the order of the words changed between versions of Triton."""

ANNOUNCED = {
    "_scatter_kernel": "store",
    "_gather_kernel": "store",
    "_expand_kernel": "load",
    "_expand_again_kernel": "load",
    "_expand_grad_kernel": "load",
    "_finish_kernel": "load",
    "_send_heads_kernel": "store",
}
"""The accesses of rows that a kernel's flag announces, or ends."""

FLAGS_AHEAD = {"_scatter_kernel[PLACE=1,COUNTS_TOO=1,KIND=0]": 1}
"""Flags that a form publishes before its rows are out, as they are about something else: the counts."""


@dataclass(frozen=True)
class Figures:
    """One kernel, compiled for one target with what one shape gives it.

    A figure is None where it does not apply: a kernel that moves no rows, a target whose code is not read.

    Attributes:
        shape: name of the shape.
        target: name of the target.
        kernel: with the constants that choose a form of it.
        warps: of a program.
        grid: programs.
        aligned: whether every row starts at a multiple of 16 bytes in the caller's tensors.
        registers: of a thread.
        stack: bytes of a thread.
        spills: instructions that move a register to the stack or back.
        loop_spills: of these, in a loop that loads or stores rows, loops around that loop included.
        inner_spills: of these, in the innermost loop around a load or store of rows.
        shared: bytes of a program.
        load_bytes: the narrowest load of rows, bytes of a thread.
        store_bytes: the narrowest store of rows.
        instructions: of a thread, for every 16 bytes of rows that it loads or stores; masked ones count as
            instructions, and not as bytes. Of the innermost loop that loads rows.
        acquires: of flags, at sys scope.
        releases: of flags, at sys scope.
        readonly_loads: loads through the cache for data that nobody writes, which no acquire orders.
        order: what is out of order around flags.
        resident_warps: of a multiprocessor.
        tile_bytes: that a multiprocessor's programs load at once as the tiles say, what is masked left out.
        flight_bytes: the same as the machine code has it: loads of a thread ahead of the first use of one.
    """

    shape: str
    target: str
    kernel: str
    warps: int
    grid: int
    aligned: bool
    registers: int | None = None
    stack: int | None = None
    spills: int | None = None
    loop_spills: int | None = None
    inner_spills: int | None = None
    shared: int | None = None
    load_bytes: int | None = None
    store_bytes: int | None = None
    instructions: float | None = None
    acquires: int | None = None
    releases: int | None = None
    readonly_loads: int | None = None
    order: tuple[str, ...] = ()
    resident_warps: float | None = None
    tile_bytes: float | None = None
    flight_bytes: float | None = None

    @property
    def name(self) -> str:
        """The kernel's name alone."""
        return self.kernel.split("[")[0]

    @property
    def program_registers(self) -> int | None:
        """Registers of a whole program."""
        return None if self.registers is None else self.registers * self.warps * 32


def measure(launch: Launch, shape: Shape, target: str) -> Figures:
    """Compile a launch and read what came out.

    Args:
        launch: as recorded.
        shape: sizes of the exchange.
        target: one of `bench.compile.TARGETS`.

    Raises:
        RuntimeError: the kernel does not compile.
    """
    from bench.compile import TARGETS, element_of

    try:
        compiled = launch.compile(TARGETS[target])
    except Exception as error:
        raise RuntimeError(
            f"{launch.variant} for {target}, shape {shape.name}: expected it to compile, got {error}"
        ) from error
    code, element = compiled.asm, element_of(shape.dtype)
    warps = compiled.metadata.num_warps
    fields: dict[str, Any] = dict(
        shape=shape.name,
        target=target,
        kernel=launch.variant,
        warps=warps,
        grid=launch.grid,
        aligned=shape.hidden * shape.dtype.itemsize % 16 == 0,
        order=order_faults(
            code["ttir"],
            element,
            ANNOUNCED.get(launch.name),
            FLAGS_AHEAD.get(launch.variant, 0),
            announces=not launch.arguments.get("HOLDS", False),
        ),
    )
    if target not in GPUS:
        return Figures(**fields, shared=compiled.metadata.shared, **_amd(code.get("amdgcn", "")))
    orders = [first or second for first, second in SYS_SCOPE.findall(code["ptx"])]
    return Figures(
        **fields,
        acquires=orders.count("acquire"),
        releases=orders.count("release"),
        **_nvidia(compiled, launch, shape, element, GPUS[target]),
    )


def _nvidia(compiled: CompiledKernel, launch: Launch, shape: Shape, element: str, gpu: Gpu) -> dict[str, Any]:
    """Return the figures of machine code."""
    code = disassemble(compiled.asm["cubin"])
    of = code.instructions
    tiles = _tiles_of(compiled, of, element)
    moves = {place: valid_share(shape, launch.name, tile.shape, tile.access) for place, tile in tiles.items()}
    spills = {place for place, instruction in enumerate(of) if instruction.spills}
    loops = [loop for loop in find_loops(of) if loop & moves.keys()]
    warps = compiled.metadata.num_warps
    # Under a budget some multiprocessors have no program; what counts is one that has.
    grid = max(launch.grid, gpu.multiprocessors) if warps == 16 else launch.grid
    programs = gpu.resident(code.registers, code.shared, warps, grid)
    figures = dict(
        registers=code.registers,
        stack=code.stack,
        spills=len(spills),
        loop_spills=len(spills.intersection(frozenset().union(*loops))),
        inner_spills=len(spills.intersection(frozenset().union(*innermost_loops(loops, moves)))),
        shared=code.shared,
        readonly_loads=sum(instruction.readonly for instruction in of),
        load_bytes=min((of[place].width for place in moves if of[place].loads), default=None),
        store_bytes=min((of[place].width for place in moves if of[place].stores), default=None),
        resident_warps=programs * warps,
    )
    hot = hottest_loop(of, loops, moves)
    if hot:
        loaded = {tiles[place] for place in hot & moves.keys() if of[place].loads}
        valid = sum(
            tile.elements * valid_share(shape, launch.name, tile.shape, tile.access) for tile in loaded
        )
        figures |= dict(
            instructions=instructions_per_chunk(of, hot, moves),
            tile_bytes=programs * valid * shape.dtype.itemsize,
            flight_bytes=programs * warps * 32 * loads_in_flight(of, hot, moves),
        )
    return figures


def _tiles_of(compiled: CompiledKernel, code: Sequence[Instruction], element: str) -> dict[int, Tile]:
    """Return, by the places of the instructions that move rows, the tile that each moves a part of."""
    tiles = {(tile.access, tile.place): tile for tile in read_tiles(compiled.asm["ttir"], element)}
    places = places_of(compiled.asm["ptx"])
    found = {}
    for place, instruction in enumerate(code):
        if instruction.line in places and (instruction.loads or instruction.stores):
            tile = tiles.get(("load" if instruction.loads else "store", places[instruction.line]))
            if tile is not None:
                found[place] = tile
    return found


def _amd(text: str) -> dict[str, Any]:
    """Return what the metadata of AMD code says."""

    def read(key: str) -> int | None:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        return int(found[1]) if found else None

    return dict(
        registers=read("vgpr_count"),
        stack=read("private_segment_fixed_size"),
        spills=read("vgpr_spill_count"),
    )
