"""Whether what a program stores in memory is there for its own threads when they load it.

Triton lays out each access by itself, so the thread that loads an element is not the one that stored it, and
the compiler puts no barrier between the two. All is read from Triton's own representation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_ARGUMENT = re.compile(r"(%[\w$.-]+): !tt\.ptr")
_RESULT = re.compile(r"(%[\w$.-]+)(?::\d+)? = ")
_OPERATION = re.compile(r'(?:%\S+ = )?"?(\w+(?:\.\w+)+)')
_OPERAND = re.compile(r"%[\w$.-]+")
_CONSTANT = re.compile(r"arith\.constant (-?\d+) : i\d+")
_RANGE = re.compile(r"tt\.make_range \{end = (\d+) : i32, start = (\d+) : i32\}")
_SAME_PLACES = ("tt.splat", "tt.broadcast", "tt.expand_dims")


@dataclass(frozen=True)
class _Address:
    """Where an access goes.

    Attributes:
        buffer: the kernel's argument that the pointer is derived from.
        elements: of the buffer that it may reach; None where that is not known.
    """

    buffer: str
    elements: range | None = range(1)

    def meets(self, other: _Address) -> bool:
        """Whether the two may reach the same memory."""
        if self.buffer != other.buffer or self.elements is None or other.elements is None:
            return self.buffer == other.buffer
        return max(self.elements.start, other.elements.start) < min(self.elements.stop, other.elements.stop)


@dataclass(frozen=True)
class _Step:
    """One operation that matters, or that has others inside; `regions` are as they stand in the text."""

    operation: str
    text: str
    address: _Address | None = None
    regions: list[list[_Step]] = field(default_factory=list)


def loads_without_barrier(ttir: str) -> list[str]:
    """Return the loads of what the program may have stored with no barrier since.

    Paths are those of the text: a load at the start of a loop comes after a store at its end, a loop may run
    not at all, and of a condition's branches either may run. Not looked at are atomics, pointers that a loop
    carries, and those that came out of memory, as those to peers did.

    Args:
        ttir: of a kernel.

    Example:
        >>> ttir = '''tt.func public @_kernel(%a_ptr: !tt.ptr<i32>, %i: i32) {
        ...   %0 = tt.addptr %a_ptr, %i : !tt.ptr<i32>, i32
        ...   tt.store %0, %i : !tt.ptr<i32>
        ...   {}
        ...   %1 = tt.load %a_ptr : !tt.ptr<i32>
        ... }'''
        >>> loads_without_barrier(ttir.replace("{}", "ttg.barrier all"))
        []
        >>> loads_without_barrier(ttir.replace("{}", ""))
        ['no barrier between a store to %a_ptr and: %1 = tt.load %a_ptr : !tt.ptr<i32>']
    """
    faults: dict[str, None] = {}
    steps, _ = _region(iter(ttir.splitlines()), {}, {})
    _follow(steps, frozenset(), faults)
    return list(faults)


def _region(
    rows: Iterator[str], addresses: dict[str, _Address], offsets: dict[str, range]
) -> tuple[list[_Step], str]:
    """Read up to the brace that closes a region; return its steps and the line of the brace.

    Args:
        rows: that follow.
        addresses: what the names outside the region point to.
        offsets: the numbers that the names outside may be.
    """
    # Regions side by side may give one name to different values.
    addresses, offsets = dict(addresses), dict(offsets)
    steps = []
    for row in rows:
        text = row.split(" loc(")[0].strip() if "tt.func" not in row else row.strip()
        if text.startswith("}"):
            return steps, text
        found = _OPERATION.match(text)
        operation = found[1] if found else ""
        if operation == "tt.func":
            addresses |= {name: _Address(name) for name in _ARGUMENT.findall(text)}
        elif operation in ("tt.load", "tt.store"):
            pointer = _OPERAND.search(text, text.index(operation))
            address = addresses.get(pointer[0]) if pointer else None
            if address is not None:
                steps.append(_Step(operation, text, address))
        elif operation.endswith("barrier"):
            steps.append(_Step("barrier", text))
        _define(text, operation, addresses, offsets)
        regions, line = [], text
        while line.endswith("{"):
            region, line = _region(rows, addresses, offsets)
            regions.append(region)
        if regions:
            steps.append(_Step(operation, text, regions=regions))
    return steps, ""


def _define(text: str, operation: str, addresses: dict[str, _Address], offsets: dict[str, range]) -> None:
    """Note what an operation's result points to, or which numbers it may be."""
    result = _RESULT.match(text)
    if result is None:
        return
    name, operands = result[1], _OPERAND.findall(text, result.end())
    address = next((addresses[operand] for operand in operands if operand in addresses), None)
    offset = offsets.get(operands[-1]) if operands else None
    addresses.pop(name, None)
    offsets.pop(name, None)
    if found := _CONSTANT.search(text):
        offsets[name] = range(int(found[1]), int(found[1]) + 1)
    elif found := _RANGE.search(text):
        offsets[name] = range(int(found[2]), int(found[1]))
    elif address is not None and "!tt.ptr" in text.split("->")[-1] and operation != "tt.load":
        elements = address.elements if operation in _SAME_PLACES else None
        if operation == "tt.addptr" and offset is not None and address.elements is not None:
            elements = range(address.elements.start + offset.start, address.elements.stop + offset.stop - 1)
        addresses[name] = _Address(address.buffer, elements)


def _follow(steps: list[_Step], stored: frozenset[_Address], faults: dict[str, None]) -> frozenset[_Address]:
    """Go through steps with what has been stored since the last barrier; return what has been behind them."""
    for step in steps:
        if step.operation == "barrier":
            stored = frozenset()
        elif step.operation == "tt.store" and step.address:
            stored |= {step.address}
        elif step.operation == "tt.load" and step.address:
            if any(step.address.meets(address) for address in stored):
                faults[f"no barrier between a store to {step.address.buffer} and: {step.text}"] = None
        elif step.operation == "scf.if":
            branches = step.regions if len(step.regions) == 2 else [*step.regions, []]
            stored = frozenset().union(*(_follow(branch, stored, faults) for branch in branches))
        elif step.operation in ("scf.for", "scf.while"):
            # A while is left from its condition, which is a region ahead of its body.
            condition, body = ([], *step.regions)[-2:]
            for _ in range(2):
                stored |= _follow(body, _follow(condition, stored, faults), faults)
            stored = _follow(condition, stored, faults)
        else:
            for region in step.regions:
                stored = _follow(region, stored, faults)
    return stored
