"""Flags between ranks: waiting, checking, publishing, and finding the last program.

Everything that orders memory across ranks is here. Flags are read and written through
`tl.atomic_*` with `scope="sys"` only: a plain load may be served from a cache, and each
warp would read for itself. docs/protocol.md has the argument.
"""

import triton
import triton.language as tl

from symm_a2a.kernels.channel import (
    DETAIL_MASK,
    EPOCH_SHIFT,
    KIND_SHIFT,
    Cell,
    Report,
    Wait,
)

_EPOCH_SHIFT = tl.constexpr(EPOCH_SHIFT)
_KIND_SHIFT = tl.constexpr(KIND_SHIFT)
_DETAIL_MASK = tl.constexpr(DETAIL_MASK)
_FAILED = tl.constexpr(int(Cell.FAILED))
_FAILURE = tl.constexpr(int(Report.FAILURE))
_EPOCH = tl.constexpr(int(Report.EPOCH))
_OWN = tl.constexpr(int(Report.OWN))
_WORDS = tl.constexpr(int(Report.WORDS))
WAIT_COPIES = tl.constexpr(int(Wait.COPIES))
WAIT_CREDIT = tl.constexpr(int(Wait.CREDIT))
WAIT_COUNTS = tl.constexpr(int(Wait.COUNTS))
WAIT_PLACEMENT = tl.constexpr(int(Wait.PLACEMENT))


@triton.jit
def dispatch_in(tally_ptr, EPOCH: tl.constexpr):
    """The dispatch that a tally is of, for the words of what follows it: its epoch modulo 2**23, int64."""
    return tl.load(tally_ptr + EPOCH).to(tl.int64) & _DETAIL_MASK


@triton.jit
def flag_words(epoch, KIND: tl.constexpr, detail, W_PAD: tl.constexpr):
    """Words for all peers: `epoch << 26 | kind << 23 | detail`, int64.

    Example: epoch 2, kind 1 (combine), of the dispatch of epoch 3: `2 << 26 | 1 << 23 | 3`.
    """
    zero = tl.full((W_PAD,), 0, tl.int64)
    return ((zero + epoch) << _EPOCH_SHIFT) | ((zero + KIND) << _KIND_SHIFT) | detail


@triton.jit
def detail_of(words):
    """What words end in, int64."""
    return words & _DETAIL_MASK


@triton.jit
def acquire(flags_ptr, W: tl.constexpr, W_PAD: tl.constexpr):
    """Read all flags once, acquiring what their writers released; zeros past `W`."""
    peer = tl.arange(0, W_PAD)
    words = tl.atomic_add(
        flags_ptr + peer, tl.full((W_PAD,), 0, tl.int64), mask=peer < W, sem="acquire", scope="sys"
    )
    tl.debug_barrier()
    return tl.where(peer < W, words, 0)


@triton.jit
def healthy(state_ptr):
    """Whether no kernel of this lane has failed so far.

    An atomic, which one thread executes for all: programs branch around barriers by it, while another
    program may be reporting.
    """
    return tl.atomic_add(state_ptr + _FAILED, 0, sem="relaxed", scope="gpu") == 0


@triton.jit
def wait(flags_ptr, abort_ptr, state_ptr, epoch, polls, W: tl.constexpr, W_PAD: tl.constexpr):
    """Poll until every flag has reached `epoch`, a peer aborts, or `polls` looks are spent.

    In a lane that has failed it looks once. One program of a grid may call this, never more:
    programs that spin could keep from running what they wait for. Returns the words, acquired.
    """
    peer = tl.arange(0, W_PAD)
    mask = peer < W
    zero = tl.full((W_PAD,), 0, tl.int64)
    words = tl.atomic_add(flags_ptr + peer, zero, mask=mask, sem="relaxed", scope="sys")
    left = tl.where(healthy(state_ptr), polls, 0)
    while (tl.min(tl.where(mask, words >> _EPOCH_SHIFT, epoch), 0) < epoch) & (left > 0):
        words = tl.atomic_add(flags_ptr + peer, zero, mask=mask, sem="relaxed", scope="sys")
        abort = tl.atomic_add(abort_ptr + peer, zero, mask=mask, sem="relaxed", scope="sys")
        left = tl.where(tl.max(tl.where(mask, abort, 0), 0) != 0, 0, left - 1)
    return acquire(flags_ptr, W, W_PAD)


@triton.jit
def reached(words, epoch, W: tl.constexpr, W_PAD: tl.constexpr):
    """Whether every word has reached `epoch`."""
    peer = tl.arange(0, W_PAD)
    return tl.min(tl.where(peer < W, words >> _EPOCH_SHIFT, epoch), 0) >= epoch


@triton.jit
def agreed(words, epoch, KIND: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr):
    """Whether every word is of this epoch and this kind."""
    peer = tl.arange(0, W_PAD)
    same = (words >> _KIND_SHIFT) == ((epoch << (_EPOCH_SHIFT - _KIND_SHIFT)) | KIND)
    return tl.min(tl.where(peer < W, same, True).to(tl.int32), 0) != 0


@triton.jit
def report(
    state_ptr, status_ptr, words, epoch, own,
    KIND: tl.constexpr, WAIT: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """Fail the lane: later kernels do nothing, and the host learns what was seen.

    Several programs, and the row count beside them, may find failures; the first one is reported.
    """
    if tl.atomic_xchg(state_ptr + _FAILED, 1, sem="relaxed", scope="gpu") == 0:
        peer = tl.arange(0, W_PAD)
        tl.store(status_ptr + _EPOCH, epoch)
        tl.store(status_ptr + _OWN, own)
        tl.store(status_ptr + _WORDS + peer, words, mask=peer < W)
        tl.debug_barrier()
        tl.atomic_xchg(status_ptr + _FAILURE, KIND * 16 + WAIT, sem="release", scope="sys")


@triton.jit
def last_program(done_ptr):
    """True in exactly one program of the grid, after all accesses of all programs.

    The barrier is mandatory: Triton puts none ahead of an atomic, and the count would
    overtake the stores of this program's other threads.
    """
    tl.debug_barrier()
    last = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    if last:
        tl.store(done_ptr, 0)
    return last


@triton.jit
def publish(peers_ptr, OFFSET: tl.constexpr, rank, words, W: tl.constexpr, W_PAD: tl.constexpr):
    """Release `words[q]` into this rank's flag at peer `q`, for every peer."""
    peer = tl.arange(0, W_PAD)
    base = tl.load(peers_ptr + peer, mask=peer < W, other=0) + OFFSET
    flag = base.to(tl.pointer_type(tl.int64)) + rank
    tl.debug_barrier()
    tl.atomic_xchg(flag, words, mask=peer < W, sem="release", scope="sys")
