"""Read a compiled kernel's machine code: its instructions, and what each of them accesses.

Instructions carry the line of PTX that they were compiled from, by which the accesses of rows are told from
all others: the machine code itself has no types.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x?_?\w+):")
_TARGET = re.compile(r"`\((\.L_x?_?\w+)\)")
_LINE = re.compile(r'//## File ".nv_debug_ptx_txt", line (\d+)')
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_REGISTER = re.compile(r"(?<![\w.])R(\d+)\b")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with its modifiers, as in `LDG.E.128`.
        operands: the text after it.
        predicate: what it depends on, as in `!P0`; empty if on nothing.
        target: place of the instruction that it may branch to, in the kernel's list of instructions.
        line: of PTX, counted from 1.
    """

    opcode: str
    operands: str
    predicate: str = ""
    target: int | None = None
    line: int | None = None

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def loads(self) -> bool:
        """Whether it reads global memory."""
        return self.name in ("LDG", "LD", "LDGSTS")

    @property
    def stores(self) -> bool:
        """Whether it writes global memory."""
        return self.name in ("STG", "ST")

    @property
    def readonly(self) -> bool:
        """Whether it reads global memory through the cache that is not coherent with writes."""
        return self.loads and "CONSTANT" in self.opcode.split(".")

    @property
    def spills(self) -> bool:
        """Whether it moves a register to the stack or back."""
        return self.name in ("LDL", "STL")

    @property
    def width(self) -> int:
        """Bytes that one thread accesses."""
        return next((_WIDTHS[part] for part in self.opcode.split(".") if part in _WIDTHS), 4)

    @property
    def written(self) -> int | None:
        """The first register that a load writes."""
        found = _REGISTER.match(self.operands)
        return int(found[1]) if found and self.loads else None

    @property
    def registers(self) -> set[int]:
        """All registers that its text names."""
        return {int(number) for number in _REGISTER.findall(self.operands)}


@dataclass(frozen=True)
class Code:
    """A kernel's machine code, and what one of its threads and programs takes.

    Attributes:
        instructions: in order of address.
        registers: of a thread.
        stack: bytes of a thread.
        shared: bytes of a program, what the hardware reserves included.
    """

    instructions: tuple[Instruction, ...]
    registers: int
    stack: int
    shared: int


def disassemble(cubin: bytes) -> Code:
    """Read a compiled kernel with the tools that Triton brings."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        text = _run(knobs.nvidia.nvdisasm.path, "-c", "-gp", file)
        usage = _USAGE.search(_run(knobs.nvidia.cuobjdump.path, "-res-usage", file))
    if usage is None:
        raise RuntimeError("expected `cuobjdump -res-usage` to print REG, STACK and SHARED, got none of them")
    registers, stack, shared = map(int, usage.groups())
    return Code(tuple(parse(text)), registers, stack, shared)


def parse(text: str) -> list[Instruction]:
    r"""Return the instructions of a listing by `nvdisasm -c -gp`.

    Example:
        >>> listing = '''
        ... .L_x_1:
        ...         //## File ".nv_debug_ptx_txt", line 57
        ...         /*0010*/          @P2 LDG.E.128 R20, desc[UR8][R30.64] ;
        ...         /*0020*/         @!P0 BRA `(.L_x_1) ;
        ... '''
        >>> load, branch = parse(listing)
        >>> load.line, load.width, load.written, branch.predicate, branch.target
        (57, 16, 20, '!P0', 0)
    """
    labels: dict[str, int] = {}
    found: list[tuple[tuple[str, str, str], int | None]] = []
    line: int | None = None
    for row in text.splitlines():
        if origin := _LINE.search(row):
            line = int(origin[1])
        elif label := _LABEL.match(row):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.match(row):
            _, predicate, opcode, operands = instruction.groups()
            found.append(((opcode, operands, predicate or ""), line))
    instructions = []
    for (opcode, operands, predicate), line in found:
        label = _TARGET.search(operands)
        # Other instructions name places too, where threads meet again. Some loops are left by a "call" that
        # never returns.
        goes = opcode.split(".")[0] in ("BRA", "CALL")
        target = labels.get(label[1]) if label and goes else None
        instructions.append(Instruction(opcode, operands, predicate, target, line))
    return instructions


def _run(tool: str, *arguments: str | Path) -> str:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"expected {tool} to read a compiled kernel, got: {done.stderr.strip()}")
    return done.stdout
