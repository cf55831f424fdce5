"""Wait until every peer is here; the flags of a scatter, without rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell, Channel, Kind
from symm_a2a.kernels.counting import placed_alike
from symm_a2a.kernels.flags import (
    WAIT_COPIES,
    WAIT_CREDIT,
    agreed,
    flag_words,
    healthy,
    publish,
    reached,
    report,
    wait,
)

_LAUNCHED = tl.constexpr(int(Cell.SCATTER_LAUNCHED))
_JOINED = tl.constexpr(int(Cell.SCATTER_JOINED))
_EXCHANGES = tl.constexpr(int(Cell.EXCHANGES))


@triton.jit(do_not_specialize=["rank", "polls"])
def _barrier_kernel(
    counts_out_ptr, counts_ptr, ledger_ptr,
    peers_ptr, ready_ptr, free_ptr, abort_ptr, state_ptr, status_ptr, rank, polls,
    READY: tl.constexpr, COUNTS_READY: tl.constexpr, FREE: tl.constexpr,
    ARRIVE: tl.constexpr, LEAVE: tl.constexpr, HAS_COUNTS: tl.constexpr, KIND: tl.constexpr,
    E: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Arrive: tell every peer. Leave: wait for every peer, take the counts, free the sections.

    One program does both, where kernels may wait.
    """
    if ARRIVE:
        epoch = tl.load(state_ptr + _LAUNCHED) + 1
        free = wait(free_ptr, abort_ptr, state_ptr, epoch - 1, polls, W, W_PAD)
        if reached(free, epoch - 1, W, W_PAD) & healthy(state_ptr):
            words = flag_words(epoch, KIND, 0, W_PAD)
            if not HAS_COUNTS:
                # A peer that dispatches, and waits for counts, must find another kind there.
                publish(peers_ptr, COUNTS_READY, rank, words, W, W_PAD)
            publish(peers_ptr, READY, rank, words, W, W_PAD)
            tl.store(state_ptr + _LAUNCHED, epoch)
            tl.store(state_ptr + _EXCHANGES + KIND, tl.load(state_ptr + _EXCHANGES + KIND) + 1)
        else:
            report(state_ptr, status_ptr, free, epoch - 1, 0, KIND, WAIT_CREDIT, W, W_PAD)
    if LEAVE:
        here = tl.load(state_ptr + _JOINED) + 1
        ready = wait(ready_ptr, abort_ptr, state_ptr, here, polls, W, W_PAD)
        if agreed(ready, here, KIND, W, W_PAD) == 0:
            report(state_ptr, status_ptr, ready, here, 0, KIND, WAIT_COPIES, W, W_PAD)
        if HAS_COUNTS:
            placed_alike(ledger_ptr, counts_ptr, state_ptr, status_ptr, here, KIND, E, W, W_PAD)
        if healthy(state_ptr):
            if HAS_COUNTS:
                for first in tl.range(0, W * E, BLOCK):
                    i = first + tl.arange(0, BLOCK)
                    counts = tl.load(counts_ptr + i + i // E * (W + 1), mask=i < W * E, other=0)
                    tl.store(counts_out_ptr + i, counts, mask=i < W * E)
            tl.store(state_ptr + _JOINED, here)
            publish(peers_ptr, FREE, rank, flag_words(here, 0, 0, W_PAD), W, W_PAD)


def barrier(
    channel: Channel,
    counts_WE: torch.Tensor | None,
    ledger: torch.Tensor | None = None,
    *,
    arrive: bool,
    leave: bool,
) -> None:
    """Meet every peer, in one launch where kernels may wait, else in two.

    Args:
        channel: the lane.
        counts_WE: int32, written when leaving: the counts of all ranks, which `count` has sent before.
            None where no counts were sent.
        ledger: of the dispatcher, see `expand`; None for the lane's.
        arrive: tell every peer that this rank is here.
        leave: take note that every peer is; where kernels do not wait, the host has made sure.

    Example:
        >>> import symm_a2a
        >>> sizes = dict(num_experts=2, top_k=2, hidden_dim=2, max_tokens_per_rank=2)
        >>> world = symm_a2a.VirtualWorld(symm_a2a.EPConfig(**sizes, dtype=torch.float32), 2, "cpu")
        >>> channels = [d.arena.lanes[0].channel for d in world.dispatchers]
        >>> for channel in channels:
        ...     barrier(channel, None, arrive=True, leave=False)
        >>> [int(word) >> 26 for word in channels[0].local["scatter_ready"]]
        [1, 1]
        >>> for channel in channels:
        ...     barrier(channel, None, arrive=False, leave=True)
        >>> [int(word) >> 26 for word in channels[0].local["scatter_free"]]
        [1, 1]
    """
    layout = channel.layout
    counts = channel.local["counts"]
    channel.launch(_barrier_kernel)(
        counts if counts_WE is None else counts_WE, counts,
        channel.ledger if ledger is None else ledger, channel.peers_W,
        channel.local["scatter_ready"], channel.local["scatter_free"], channel.abort_W,
        channel.state, channel.status, channel.rank, channel.polls,
        READY=channel.offset("scatter_ready"), COUNTS_READY=channel.offset("counts_ready"),
        FREE=channel.offset("scatter_free"), ARRIVE=arrive, LEAVE=leave, HAS_COUNTS=counts_WE is not None,
        KIND=int(Kind.BARRIER if counts_WE is None else Kind.COUNTS),
        E=layout.num_experts, W=layout.world_size, W_PAD=padded(layout.world_size), BLOCK=1024,
    )  # fmt: skip
