"""Find the loops of machine code.

A branch backwards alone makes no loop: the compiler moves rarely used blocks to the end, from where they
jump back. A loop is what its head dominates and what leads back to the head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from bench.kernels.sass import Instruction

_ENDS = ("EXIT", "RET", "BRX", "JMP")


def find_loops(instructions: Sequence[Instruction]) -> list[frozenset[int]]:
    """Return each loop as the places of its instructions; loops with one head are one.

    Example: at 0 a head, at 1 a branch back to 0, at 2 the exit.
        >>> code = [Instruction("MOV", ""), Instruction("BRA", "", "P0", target=0), Instruction("EXIT", "")]
        >>> find_loops(code)
        [frozenset({0, 1})]
    """
    blocks = _blocks(instructions)
    follow = _successors(instructions, blocks)
    before: list[list[int]] = [[] for _ in blocks]
    for block, successors in enumerate(follow):
        for successor in successors:
            before[successor].append(block)
    dominators = _dominators(follow, before)
    bodies: dict[int, set[int]] = {}
    for block, successors in enumerate(follow):
        for head in successors:
            if head in dominators[block]:
                bodies.setdefault(head, {head}).update(_leading_to(block, head, before, dominators))
    return [frozenset(place for block in body for place in blocks[block]) for body in bodies.values()]


def _blocks(instructions: Sequence[Instruction]) -> list[range]:
    """Cut where a branch goes, and after every branch and exit."""
    starts = {0, len(instructions)}
    for place, instruction in enumerate(instructions):
        if instruction.target is not None:
            starts.add(instruction.target)
        if instruction.target is not None or instruction.name in _ENDS:
            starts.add(place + 1)
    ordered = sorted(starts)
    return [range(*pair) for pair in itertools.pairwise(ordered)]


def _successors(instructions: Sequence[Instruction], blocks: list[range]) -> list[list[int]]:
    block_at = {block.start: number for number, block in enumerate(blocks)}
    follow = []
    for block in blocks:
        last = instructions[block[-1]]
        # `BRA.U !UP0, target` and `BRA.DIV UR4, target` carry their condition among the operands.
        certain = not last.predicate and (
            last.name in _ENDS or (last.name == "BRA" and "," not in last.operands)
        )
        places = ([] if certain else [block.stop]) + ([] if last.target is None else [last.target])
        follow.append([block_at[place] for place in places if place in block_at])
    return follow


def _dominators(follow: list[list[int]], before: list[list[int]]) -> list[set[int]]:
    """Return, of every block, those on all ways to it; nothing of those that no way leads to."""
    order, seen, stack = [], {0}, [0]
    while stack:
        block = stack.pop()
        order.append(block)
        new = [successor for successor in follow[block] if successor not in seen]
        seen.update(new)
        stack.extend(new)
    dominators: list[set[int]] = [set(order) if block in seen else set() for block in range(len(follow))]
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            ways = [dominators[way] for way in before[block] if way in seen]
            new = set.intersection(*ways) | {block}
            changed |= new != dominators[block]
            dominators[block] = new
    return dominators


def _leading_to(block: int, head: int, before: list[list[int]], dominators: list[set[int]]) -> set[int]:
    body, stack = {head}, [block]
    while stack:
        block = stack.pop()
        if block not in body:
            body.add(block)
            stack.extend(way for way in before[block] if dominators[way])
    return body
