"""Follow rows through the loop that moves most of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.kernels.sass import Instruction

CHUNK = 16
"""Bytes of the widest access of one thread that all targets have."""


def innermost_loops(loops: Sequence[frozenset[int]], moves: Iterable[int]) -> set[frozenset[int]]:
    """Return, of the loops around each instruction that moves rows, the innermost.

    Example:
        >>> outer, inner = frozenset(range(9)), frozenset({3, 4})
        >>> innermost_loops([outer, inner], [4]) == {inner}
        True
        >>> innermost_loops([outer, inner], [1, 4]) == {outer, inner}
        True
    """
    around = ([loop for loop in loops if place in loop] for place in moves)
    return {min(found, key=len) for found in around if found}


def hottest_loop(
    code: Sequence[Instruction], loops: Sequence[frozenset[int]], moves: Mapping[int, float]
) -> frozenset[int]:
    """Return the innermost loop that loads rows, the one that moves most; empty if none moves rows.

    Where no loop loads any, it is the innermost that stores some. A loop of stores within one that loads is
    part of it.

    Args:
        code: all instructions.
        loops: those that move rows, as places in `code`.
        moves: of the instructions that move rows, by place, the share of their bytes that is not masked.
    """
    loading = [loop for loop in loops if any(code[place].loads for place in loop & moves.keys())]
    chosen = loading or loops
    innermost = [loop for loop in chosen if not any(other < loop for other in chosen)]
    return max(innermost, key=lambda loop: _moved(code, loop, moves), default=frozenset())


def instructions_per_chunk(
    code: Sequence[Instruction], loop: frozenset[int], moves: Mapping[int, float]
) -> float:
    """Return the instructions of a loop for every 16 bytes that it loads or stores.

    Example: a load and a store of 16 bytes, of which half are masked, and two more instructions.
        >>> load, store, add = (Instruction(name, "R4") for name in ("LDG.128", "STG.128", "IADD3"))
        >>> instructions_per_chunk([load, add, add, store], frozenset(range(4)), {0: 0.5, 3: 0.5})
        4.0
    """
    return len(loop) * CHUNK / _moved(code, loop, moves)


def _moved(code: Sequence[Instruction], loop: frozenset[int], moves: Mapping[int, float]) -> float:
    return sum(code[place].width * moves[place] for place in loop if place in moves)


def loads_in_flight(code: Sequence[Instruction], loop: frozenset[int], moves: Mapping[int, float]) -> float:
    """Return the most bytes of rows that one thread has asked for and not yet used.

    A thread goes on after a load until it needs what it loaded. The loop is followed twice round, in order
    of address, for loads that are used only in its next round.

    Example: two loads of 16 bytes, a use of the first, a third load.
        >>> first, use = Instruction("LDG.E.128", "R4, [R2.64]"), Instruction("FADD", "R8, R8, R5")
        >>> second, third = Instruction("LDG.E.128", "R12, [R2.64]"), Instruction("LDG.E.128", "R4, [R2.64]")
        >>> loads_in_flight([first, second, use, third], frozenset(range(4)), dict.fromkeys((0, 1, 3), 1.0))
        32.0
    """
    waiting: dict[int, tuple[set[int], float]] = {}
    most = 0.0
    for place in sorted(loop) * 2:
        instruction = code[place]
        used = instruction.registers
        if instruction.written is not None:
            used |= set(range(instruction.written, instruction.written + max(1, instruction.width // 4)))
        waiting = {p: (regs, size) for p, (regs, size) in waiting.items() if not regs & used}
        if place in moves and instruction.written is not None:
            first, width = instruction.written, instruction.width
            waiting[place] = (set(range(first, first + max(1, width // 4))), width * moves[place])
        most = max(most, sum(size for _, size in waiting.values()))
    return most
