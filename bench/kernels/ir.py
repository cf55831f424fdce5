"""Read a kernel between its source and its machine code: which accesses move rows, the order around flags.

Triton's own representation has types, and places in the source; PTX has places, and its own lines are what
machine code is traced back to.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from bench.kernels.reuse import loads_without_barrier

Place = tuple[str, int, int]
"""A source file, a line and a column of it."""

_LOCATION = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_FILE = re.compile(r'"([^"]*)":(\d+):(\d+)')
_NEXT = re.compile(r"#loc\d*")
_PTX_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"(.*?)"(?:\s+"(.*?)")?')
_PTX_PLACE = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")


@dataclass(frozen=True)
class Tile:
    """One access of a tile of rows.

    Attributes:
        access: "load" or "store".
        shape: elements; of three dimensions the middle one runs over slots or peers, and what a copy has none
            of is masked.
        place: in the source.
    """

    access: str
    shape: tuple[int, ...]
    place: Place | None

    @property
    def elements(self) -> int:
        """Elements of the tile, masked ones included."""
        return math.prod(self.shape)


def read_tiles(ttir: str, element: str) -> list[Tile]:
    """Return the accesses of tiles whose elements are rows'.

    Args:
        ttir: of a kernel.
        element: the dtype of rows, as in "bf16"; nothing else that the kernels access may have it.

    Example:
        >>> ttir = '''%y = tt.load %a, %b : tensor<1x4x1024x!tt.ptr<bf16>> loc(#loc2)
        ... #loc1 = loc("gather.py":57:24)
        ... #loc2 = loc("y"(#loc1))'''
        >>> read_tiles(ttir, "bf16")
        [Tile(access='load', shape=(1, 4, 1024), place=('gather.py', 57, 24))]
    """
    access = re.compile(rf"tt\.(load|store) .*tensor<([\dx]+)x!tt\.ptr<{element}>.*?loc\((#loc\d*)\)")
    locations = {found[1]: found[2] for row in ttir.splitlines() if (found := _LOCATION.match(row))}
    return [
        Tile(found[1], tuple(map(int, found[2].split("x"))), _place(found[3], locations))
        for row in ttir.splitlines()
        if (found := access.search(row))
    ]


def _place(name: str, locations: dict[str, str]) -> Place | None:
    """Follow a location to the place where the operation itself stands, in the innermost function."""
    text = locations.get(name, "")
    # A name or a call site holds its location first, the caller's comes second.
    while not (found := _FILE.search(text)):
        following = _NEXT.search(text)
        if following is None:
            return None
        text = locations.get(following[0], "")
    return found[1], int(found[2]), int(found[3])


def places_of(ptx: str) -> dict[int, Place]:
    """Return where in the source each line of PTX comes from; lines are counted from 1.

    The compiler counts on through the lines of an inline assembly, as Triton's loads and stores are, and so
    past the line where it stands: all of one has the place of its first line.

    Example:
        >>> ptx = '''.file 1 "/kernels" "expand.py"
        ... .loc 1 115 28
        ... // begin inline asm
        ... mov.u32 %r1, 0x0;
        ... .loc 1 116 28
        ... ld.global.b32 { %r1 }, [ %rd1 + 0 ];
        ... // end inline asm'''
        >>> places_of(ptx)[6]
        ('/kernels/expand.py', 115, 28)
    """
    rows = ptx.splitlines()
    files = {
        found[1]: "/".join(part for part in found.groups()[1:] if part)
        for row in rows
        if (found := _PTX_FILE.match(row))
    }
    places: dict[int, Place] = {}
    here: Place | None = None
    inline = begun = False
    for number, row in enumerate(rows, 1):
        if "inline asm" in row:
            inline, begun = "begin" in row, False
        elif (found := _PTX_PLACE.match(row)) and not begun:
            here = files[found[1]], int(found[2]), int(found[3])
        begun = begun or (inline and "inline asm" not in row)
        if here is not None:
            places[number] = here
    return places


def order_faults(
    ttir: str, element: str, access: str | None, ahead: int = 0, announces: bool = True
) -> tuple[str, ...]:
    """Return what of docs/protocol.md is out of order; nothing where all is well.

    All accesses that a flag announces, or ends, come first, then the count of programs, then the flags: in
    program order. Triton puts no barrier ahead of an atomic, so one must stand beside each: without it
    the count or the flag of one thread would overtake the accesses of the others, or they would overtake
    its acquire. Nor does it put one between the store of a buffer and a load of what was stored.

    Args:
        ttir: of a kernel.
        element: the dtype of rows, as in "bf16".
        access: "load" or "store", what the flag is about; None for a kernel that moves no rows.
        ahead: flags that are not about it, and are published before the count of programs.
        announces: whether flags follow; debug mode leaves them to a kernel of its own.
    """
    lines = ttir.splitlines()
    counts = [n for n, line in enumerate(lines) if "tt.atomic_rmw add, acq_rel, gpu" in line]
    # A report of a failure releases too, to one word; flags go to a tensor of addresses.
    flags = [
        n for n, line in enumerate(lines) if "atomic_rmw exch, release, sys" in line and "tensor<" in line
    ]
    faults = []
    if access is not None:
        moves = [
            n for n, line in enumerate(lines) if f"tt.{access} " in line and f"x!tt.ptr<{element}>" in line
        ]
        if not moves or len(counts) != 1 or (len(flags) > ahead) != announces:
            faults.append(
                f"{len(moves)} {access}s of rows, {len(counts)} counts of programs, {len(flags)} flags"
            )
        elif not max(moves) < counts[0] or sum(flag < counts[0] for flag in flags) != ahead:
            faults.append(f"a {access} of rows, the count of programs, the flags: not in this order")
    for n, line in enumerate(lines):
        if ("acq_rel, gpu" in line or "release, sys" in line) and "barrier" not in lines[n - 1]:
            faults.append(f"no barrier ahead of: {line.split(' loc(')[0].strip()}")
        if "acquire, sys" in line and "barrier" not in lines[n + 1]:
            faults.append(f"no barrier after: {line.split(' loc(')[0].strip()}")
    return (*faults, *loads_without_barrier(ttir))
