"""How every launch begins and ends, and how every join does; the rules of docs/protocol.md."""

import triton
import triton.language as tl

from symm_a2a.kernels.channel import Cell, Kind
from symm_a2a.kernels.flags import (
    WAIT_COPIES,
    WAIT_CREDIT,
    acquire,
    agreed,
    detail_of,
    flag_words,
    healthy,
    last_program,
    publish,
    reached,
    report,
    wait,
)

_DISPATCH = tl.constexpr(int(Kind.DISPATCH))
_EXCHANGES = tl.constexpr(int(Cell.EXCHANGES))
_COPIES = tl.constexpr(int(Cell.COPIES))


@triton.jit
def may_launch(
    free_ptr, state_ptr, status_ptr, epoch, KIND: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr
):  # fmt: skip
    """Whether every peer has taken the exchange before `epoch`; reports the lane where not."""
    free = acquire(free_ptr, W, W_PAD)
    held = reached(free, epoch - 1, W, W_PAD)
    if held == 0:
        report(state_ptr, status_ptr, free, epoch - 1, 0, KIND, WAIT_CREDIT, W, W_PAD)
    return held & healthy(state_ptr)


@triton.jit
def announce(
    peers_ptr, ready_ptr, abort_ptr, state_ptr, status_ptr, rank, epoch, detail, copies, polls,
    READY: tl.constexpr, LAUNCHED: tl.constexpr, SPINS: tl.constexpr, KIND: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """End a launch, in its last program: publish, and with `SPINS` wait until every peer has."""
    publish(peers_ptr, READY, rank, flag_words(epoch, KIND, detail, W_PAD), W, W_PAD)
    tl.store(state_ptr + LAUNCHED, epoch)
    peer = tl.arange(0, W_PAD)
    sent_ptr = state_ptr + _COPIES + KIND * W + peer
    tl.store(sent_ptr, tl.load(sent_ptr, mask=peer < W, other=0) + copies, mask=peer < W)
    tl.store(state_ptr + _EXCHANGES + KIND, tl.load(state_ptr + _EXCHANGES + KIND) + 1)
    if SPINS:
        words = wait(ready_ptr, abort_ptr, state_ptr, epoch, polls, W, W_PAD)
        if reached(words, epoch, W, W_PAD) == 0:
            report(state_ptr, status_ptr, words, epoch, 0, KIND, WAIT_COPIES, W, W_PAD)


@triton.jit
def may_join(
    ready_ptr, state_ptr, status_ptr, epoch, follows,
    KIND: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """The ready words, and whether all are of this exchange; reports the lane where not.

    `follows` is the dispatch that the exchange belongs to, see `dispatch_in`; a dispatch follows none.
    """
    words = acquire(ready_ptr, W, W_PAD)
    here = agreed(words, epoch, KIND, W, W_PAD)
    if KIND != _DISPATCH:
        peer = tl.arange(0, W_PAD)
        other = (peer < W) & (detail_of(words) != follows)
        here = here & (tl.max(other.to(tl.int32), 0) == 0)
    if here == 0:
        report(state_ptr, status_ptr, words, epoch, follows, KIND, WAIT_COPIES, W, W_PAD)
    return words, here & healthy(state_ptr)


@triton.jit
def release_sections(
    peers_ptr, state_ptr, rank, epoch,
    DONE: tl.constexpr, JOINED: tl.constexpr, FREE: tl.constexpr, HOLDS: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """End a join, in its last program: count it, and let every peer overwrite its section.

    With `HOLDS` the host does the latter, when it has poisoned the section.
    """
    if last_program(state_ptr + DONE):
        if healthy(state_ptr):
            tl.store(state_ptr + JOINED, epoch)
            if not HOLDS:
                publish(peers_ptr, FREE, rank, flag_words(epoch, 0, 0, W_PAD), W, W_PAD)
