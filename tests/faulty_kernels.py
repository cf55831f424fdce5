"""A kernel that keeps all rules of bench/kernels/rules.py, and the ways in which it can break them."""

import torch
import triton
import triton.language as tl

from bench.compile import Launch
from bench.kernels.figures import Figures, measure
from bench.shapes import Shape

SHAPE = Shape("olmoe", "as the rules know it", tokens=64, hidden=2048, experts=64, top_k=8, ranks=8)
GOOD = dict(
    HINT=True, FENCE=True, BEHIND=True, AROUND=True, SEM="release", LATE=False, READONLY=False, ROWS=2, N=1024
)
# What each fault changes: constants of the kernel, options of the compiler, or the grid.
FAULTS = {
    "none": {},
    "no alignment hint": dict(HINT=False),
    "relaxed flag": dict(SEM="relaxed"),
    "no barrier": dict(FENCE=False),
    "no barrier behind a store": dict(BEHIND=False),
    "no barrier around a loop": dict(AROUND=False),
    "rows after the count": dict(LATE=True),
    "read-only loads": dict(READONLY=True),
    "spills": dict(ROWS=16, maxnreg=64),
    "too many registers": dict(ROWS=32, num_warps=8),
    "small grid": dict(grid=132),
}


@triton.jit
def _gather_kernel(
    x_ptr, peers_ptr, flags_ptr, count_ptr, kept_ptr, rows,
    WEIGHTED: tl.constexpr, HAS_SCORES: tl.constexpr, KIND: tl.constexpr,
    HINT: tl.constexpr, FENCE: tl.constexpr, BEHIND: tl.constexpr, AROUND: tl.constexpr,
    SEM: tl.constexpr, LATE: tl.constexpr, READONLY: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Sum rows as they come and send the sums so far; flags as often as the kernel of this name has them."""
    w = tl.arange(0, 8)
    zero = tl.full((8,), 0, tl.int64)
    for _ in tl.static_range(2):
        tl.atomic_add(flags_ptr + w, zero, sem="acquire", scope="sys")
        tl.debug_barrier()
    tl.store(kept_ptr + w, zero)
    if BEHIND:
        tl.debug_barrier()
    for _ in tl.range(rows):
        kept = tl.load(kept_ptr + 7 - w)
        tl.debug_barrier()
        tl.store(kept_ptr + w, kept + 1)
        if AROUND:
            tl.debug_barrier()
    if READONLY:
        where_ptr = peers_ptr.to(tl.int64, bitcast=True)
        base = tl.inline_asm_elementwise(
            "ld.global.nc.b64 $0, [$1];", "=l,l", [where_ptr], dtype=tl.int64, is_pure=True, pack=1
        )
    else:
        base = tl.load(peers_ptr)
    base = base.to(tl.pointer_type(tl.bfloat16))
    if HINT:
        base = tl.multiple_of(base, 16)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, N)
    total = tl.full((ROWS, N), 0, tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        where = (first + row)[:, None] * N + column[None, :]
        total += tl.load(x_ptr + where)
        tl.store(base + where, total.to(tl.bfloat16))
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    if LATE:
        tl.store(base + row[:, None] * N + column[None, :], total.to(tl.bfloat16))
    for _ in tl.static_range(3):
        if FENCE:
            tl.debug_barrier()
        tl.atomic_xchg(flags_ptr + w, zero + 1, sem=SEM, scope="sys")


def measure_fault(fault: str, target: str) -> Figures:
    """Compile the kernel with a fault; in a process that does not interpret kernels."""
    constants = GOOD | FAULTS[fault]
    grid = constants.pop("grid", 8 * 132)
    options = {name: constants.pop(name) for name in ("maxnreg", "num_warps") if name in constants}
    arguments = dict(
        x_ptr=torch.zeros(8, dtype=torch.bfloat16), peers_ptr=torch.zeros(2, dtype=torch.int64),
        flags_ptr=torch.zeros(8, dtype=torch.int64), count_ptr=torch.zeros(2, dtype=torch.int32),
        kept_ptr=torch.zeros(8, dtype=torch.int64), rows=4096, WEIGHTED=True, HAS_SCORES=True, KIND=1,
    )  # fmt: skip
    return measure(Launch(_gather_kernel, arguments | constants, options, grid), SHAPE, target)
