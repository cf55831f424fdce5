"""Counting the slots and copies of tokens, sending the counts to every peer, and trusting what came."""

import triton
import triton.language as tl

from symm_a2a.kernels.channel import Cell, Report
from symm_a2a.kernels.flags import WAIT_PLACEMENT, flag_words, publish, report

_COUNTED = tl.constexpr(int(Cell.COUNTED))
_INVALID_IDS = tl.constexpr(int(Report.INVALID_IDS))


@triton.jit
def count_tokens(
    ids_ptr, status_ptr, first, end, REPORT: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Slots of each expert, and copies for each peer, of up to `BLOCK_T` tokens from `first` on.

    A token counts once for each peer that owns any of its experts, and once for each of its slots at
    the slot's expert. Ids outside `[0, E)` count nowhere; with `REPORT` those that are not -1 either
    are reported. Zeros past `E` and `W`.

    Example: `E = 4, W = 2`, ids `[[0, 1], [1, 3], [-1, 2]]`: expert counts `[1, 2, 1, 1]`,
    copies `[2, 2]` (tokens 0 and 1 to rank 0, tokens 1 and 2 to rank 1).
    """
    L: tl.constexpr = E // W
    t = first + tl.arange(0, BLOCK_T)
    k = tl.arange(0, K_PAD)
    w = tl.arange(0, W_PAD)
    ids = tl.load(ids_ptr + t[:, None] * K + k[None, :], mask=(t < end)[:, None] & (k < K)[None, :], other=-1)
    valid = (ids >= 0) & (ids < E)
    if REPORT:
        invalid = tl.sum(tl.sum(((ids < -1) | (ids >= E)).to(tl.int32), 1), 0)
        if invalid > 0:
            tl.atomic_add(status_ptr + _INVALID_IDS, invalid.to(tl.int64), sem="relaxed", scope="sys")
    expert = tl.where(valid, ids, 0).to(tl.int32)
    slots = tl.histogram(
        tl.reshape(expert, [BLOCK_T * K_PAD]), E_PAD, mask=tl.reshape(valid, [BLOCK_T * K_PAD])
    )
    owner = tl.where(valid, expert // L, -1)
    copies = tl.full((W_PAD,), 0, tl.int32)
    for q0 in tl.range(0, W, BLOCK_W):
        q = q0 + tl.arange(0, BLOCK_W)
        sent = tl.sum(tl.max((owner[:, None, :] == q[None, :, None]).to(tl.int32), 2), 0)
        # A sum over matches puts each strip's numbers at their peers' places.
        copies += tl.sum(tl.where(w[:, None] == q[None, :], sent[None, :], 0), 1)
    return slots, copies


@triton.jit
def send_counts(
    slots, copies, ledger_ptr, peers_ptr, state_ptr, rank, epoch, KIND: tl.constexpr,
    COUNTS: tl.constexpr, COUNTS_READY: tl.constexpr,
    E: tl.constexpr, E_PAD: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """Store this rank's slots for every expert, its copies for every rank, and the mark of its placement.

    To every peer; then publish them.
    """
    e = tl.arange(0, E_PAD)
    w = tl.arange(0, W_PAD)
    base = tl.load(peers_ptr + w, mask=w < W, other=0) + COUNTS
    section = base.to(tl.pointer_type(tl.int32)) + rank * (E + W + 1)
    tl.store(
        section[:, None] + e[None, :],
        tl.broadcast_to(slots[None, :], (W_PAD, E_PAD)),
        mask=(w < W)[:, None] & (e < E)[None, :],
    )
    tl.store(
        section[:, None] + E + w[None, :],
        tl.broadcast_to(copies[None, :], (W_PAD, W_PAD)),
        mask=(w < W)[:, None] & (w < W)[None, :],
    )
    mark = tl.load(ledger_ptr + 1).to(tl.int32)
    tl.store(section + E + W, tl.broadcast_to(mark, (W_PAD,)), mask=w < W)
    publish(peers_ptr, COUNTS_READY, rank, flag_words(epoch, KIND, 0, W_PAD), W, W_PAD)
    tl.store(state_ptr + _COUNTED, epoch)


@triton.jit
def placed_alike(
    ledger_ptr, counts_ptr, state_ptr, status_ptr, epoch,
    KIND: tl.constexpr, E: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """Whether all ranks have put the experts where this one has; reports the lane where not."""
    w = tl.arange(0, W_PAD)
    mark = tl.load(ledger_ptr + 1)
    marks = tl.load(counts_ptr + w * (E + W + 1) + E + W, mask=w < W, other=0).to(tl.int64)
    alike = tl.min(tl.where(w < W, marks == mark, True).to(tl.int32), 0) != 0
    if alike == 0:
        report(state_ptr, status_ptr, marks, epoch, mark, KIND, WAIT_PLACEMENT, W, W_PAD)
    return alike
