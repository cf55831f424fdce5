"""Count the slots of every expert and the copies for every peer; broadcast the counts."""

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell, Channel, Kind, Report
from symm_a2a.kernels.flags import (
    WAIT_CREDIT,
    flag_words,
    healthy,
    label_of,
    last_program,
    publish,
    reached,
    report,
    wait,
)

_DONE = tl.constexpr(int(Cell.DONE_COUNT))
_SCATTER_LAUNCHED = tl.constexpr(int(Cell.SCATTER_LAUNCHED))
_COUNTED = tl.constexpr(int(Cell.COUNTED))
_INVALID_IDS = tl.constexpr(int(Report.INVALID_IDS))
_KIND = tl.constexpr(int(Kind.DISPATCH))


@triton.jit(do_not_specialize=["rank", "T", "polls"])
def _count_kernel(
    ids_ptr, tally_ptr, expert_sums_ptr, peer_sums_ptr,
    peers_ptr, free_ptr, abort_ptr, state_ptr, status_ptr, rank, T, polls,
    COUNTS: tl.constexpr, COUNTS_READY: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program counts one block of tokens; the last one sums, and sends the sums.

    A token counts once for each peer that owns any of its experts, and once for each of
    its slots at the slot's expert. Ids outside `[0, E)` count nowhere; those that are not
    -1 either are reported.

    Example: `E = 4, W = 2`, ids `[[0, 1], [1, 3], [-1, 2]]`: expert counts `[1, 2, 1, 1]`,
    copies `[2, 2]` (tokens 0 and 1 to rank 0, tokens 1 and 2 to rank 1).
    """
    block = tl.program_id(0)
    L: tl.constexpr = E // W
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, K_PAD)
    e = tl.arange(0, E_PAD)
    w = tl.arange(0, W_PAD)
    ids = tl.load(ids_ptr + t[:, None] * K + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=-1)
    valid = (ids >= 0) & (ids < E)
    invalid = tl.sum(tl.sum(((ids < -1) | (ids >= E)).to(tl.int32), 1), 0)
    if invalid > 0:
        tl.atomic_add(status_ptr + _INVALID_IDS, invalid.to(tl.int64), sem="relaxed", scope="sys")
    expert = tl.where(valid, ids, 0).to(tl.int32)
    flat = tl.reshape(expert, [BLOCK_T * K_PAD])
    counts = tl.histogram(flat, E_PAD, mask=tl.reshape(valid, [BLOCK_T * K_PAD]))
    tl.store(expert_sums_ptr + block * E + e, counts, mask=e < E)
    owner = tl.where(valid, expert // L, -1)
    for first in tl.range(0, W, BLOCK_W):
        q = first + tl.arange(0, BLOCK_W)
        sent = tl.max((owner[:, None, :] == q[None, :, None]).to(tl.int32), 2)
        tl.store(peer_sums_ptr + block * W + q, tl.sum(sent, 0), mask=q < W)

    if last_program(state_ptr + _DONE):
        blocks = tl.num_programs(0)
        all_counts = tl.full((E_PAD,), 0, tl.int32)
        all_copies = tl.full((W_PAD,), 0, tl.int32)
        for first in tl.range(0, blocks, BLOCK_S):
            b = first + tl.arange(0, BLOCK_S)
            all_counts += tl.sum(
                tl.load(
                    expert_sums_ptr + b[:, None] * E + e[None, :],
                    mask=(b < blocks)[:, None] & (e < E)[None, :], other=0,
                ), 0,
            )  # fmt: skip
            all_copies += tl.sum(
                tl.load(
                    peer_sums_ptr + b[:, None] * W + w[None, :],
                    mask=(b < blocks)[:, None] & (w < W)[None, :], other=0,
                ), 0,
            )  # fmt: skip
        tl.store(tally_ptr + w, all_copies, mask=w < W)
        epoch = tl.load(state_ptr + _SCATTER_LAUNCHED) + 1
        # The credit comes before the counts, not only before the rows: this store overwrites
        # the counts that a peer may still read from its last use of the section.
        free = wait(free_ptr, abort_ptr, epoch - 1, polls, W, W_PAD)
        if reached(free, epoch - 1, W, W_PAD) & healthy(state_ptr):
            base = tl.load(peers_ptr + w, mask=w < W, other=0) + COUNTS
            section = base.to(tl.pointer_type(tl.int32)) + rank * E
            tl.store(
                section[:, None] + e[None, :],
                tl.broadcast_to(all_counts[None, :], (W_PAD, E_PAD)),
                mask=(w < W)[:, None] & (e < E)[None, :],
            )
            words = flag_words(epoch, label_of(epoch, _KIND), W_PAD)
            publish(peers_ptr, COUNTS_READY, rank, words, W, W_PAD)
            tl.store(state_ptr + _COUNTED, epoch)
        else:
            report(state_ptr, status_ptr, free, epoch - 1, 0, _KIND, WAIT_CREDIT, W, W_PAD)


def count(channel: Channel, ids_TK: torch.Tensor, tally: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count this rank's slots and copies, and send the counts to every peer.

    Needs nothing but the lane at rest. When the kernel has run, `tally[:W]` holds the copies
    for each peer and every peer has this rank's counts behind its `counts_ready` flag.

    Args:
        channel: the lane.
        ids_TK: int32 or int64, contiguous; -1 masks a slot.
        tally: int32 `(2 W + L + 1,)`, of which the first `W` are written.

    Returns:
        Slots per token block and expert, int32 `(blocks, E)`, and copies per token block and
        peer, int32 `(blocks, W)`; `scatter` places the slots by them.

    Example:
        >>> import symm_a2a
        >>> sizes = dict(num_experts=2, top_k=2, hidden_dim=2, max_tokens_per_rank=2)
        >>> world = symm_a2a.VirtualWorld(symm_a2a.EPConfig(**sizes, dtype=torch.float32), 2, "cpu")
        >>> channels = [d.arena.lanes[0].channel for d in world.dispatchers]
        >>> tally = torch.zeros(2 * 2 + 1 + 1, dtype=torch.int32)
        >>> expert_sums, peer_sums = count(channels[0], torch.tensor([[1, 1], [0, -1]]), tally)
        >>> expert_sums.tolist(), peer_sums.tolist()
        ([[1, 2]], [[1, 1]])
        >>> channels[1].local["counts"].tolist()
        [[1, 2], [0, 0]]
    """
    layout = channel.layout
    blocks = channel.blocks
    T = ids_TK.shape[0]
    num_blocks = max(1, triton.cdiv(T, blocks.tokens))
    expert_sums = ids_TK.new_empty((num_blocks, layout.num_experts), dtype=torch.int32)
    peer_sums = ids_TK.new_empty((num_blocks, layout.world_size), dtype=torch.int32)
    _count_kernel[(num_blocks,)](
        ids_TK, tally, expert_sums, peer_sums,
        channel.peers_W, channel.local["scatter_free"], channel.abort_W, channel.state, channel.status,
        channel.rank, T, channel.polls,
        COUNTS=channel.offset("counts"), COUNTS_READY=channel.offset("counts_ready"),
        K=layout.top_k, K_PAD=padded(layout.top_k),
        E=layout.num_experts, E_PAD=max(2, padded(layout.num_experts)),
        W=layout.world_size, W_PAD=padded(layout.world_size),
        BLOCK_T=blocks.tokens, BLOCK_W=blocks.peers, BLOCK_S=blocks.sums, num_warps=blocks.warps,
    )  # fmt: skip
    return expert_sums, peer_sums
