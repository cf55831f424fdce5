"""Count the slots of every expert and the copies for every peer; broadcast the counts."""

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell, Channel, Kind
from symm_a2a.kernels.counting import count_tokens, send_counts
from symm_a2a.kernels.flags import WAIT_CREDIT, healthy, last_program, reached, report, wait

_DONE = tl.constexpr(int(Cell.DONE_COUNT))
_SCATTER_LAUNCHED = tl.constexpr(int(Cell.SCATTER_LAUNCHED))


@triton.jit(do_not_specialize=["rank", "T", "num_blocks", "polls"])
def _count_kernel(
    ids_ptr, tally_ptr, expert_sums_ptr, peer_sums_ptr, ledger_ptr,
    peers_ptr, free_ptr, abort_ptr, state_ptr, status_ptr, rank, T, num_blocks, polls,
    KIND: tl.constexpr, COUNTS: tl.constexpr, COUNTS_READY: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Each program counts some blocks of tokens; the last one sums, and sends the sums."""
    e = tl.arange(0, E_PAD)
    w = tl.arange(0, W_PAD)
    for block in tl.range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        slots, copies = count_tokens(
            ids_ptr, status_ptr, block * BLOCK_T, T, True, K, K_PAD, E, E_PAD, W, W_PAD, BLOCK_T, BLOCK_W
        )
        tl.store(expert_sums_ptr + block * E + e, slots, mask=e < E)
        tl.store(peer_sums_ptr + block * W + w, copies, mask=w < W)

    if last_program(state_ptr + _DONE):
        all_slots = tl.full((E_PAD,), 0, tl.int32)
        all_copies = tl.full((W_PAD,), 0, tl.int32)
        for first in tl.range(0, num_blocks, BLOCK_S):
            b = first + tl.arange(0, BLOCK_S)
            all_slots += tl.sum(
                tl.load(
                    expert_sums_ptr + b[:, None] * E + e[None, :],
                    mask=(b < num_blocks)[:, None] & (e < E)[None, :], other=0,
                ), 0,
            )  # fmt: skip
            all_copies += tl.sum(
                tl.load(
                    peer_sums_ptr + b[:, None] * W + w[None, :],
                    mask=(b < num_blocks)[:, None] & (w < W)[None, :], other=0,
                ), 0,
            )  # fmt: skip
        tl.store(tally_ptr + w, all_copies, mask=w < W)
        epoch = tl.load(state_ptr + _SCATTER_LAUNCHED) + 1
        # The credit comes before the counts, not only before the rows: this store overwrites
        # the counts that a peer may still read from its last use of the section.
        free = wait(free_ptr, abort_ptr, state_ptr, epoch - 1, polls, W, W_PAD)
        if reached(free, epoch - 1, W, W_PAD) & healthy(state_ptr):
            send_counts(
                all_slots, all_copies, ledger_ptr, peers_ptr, state_ptr, rank, epoch,
                KIND, COUNTS, COUNTS_READY, E, E_PAD, W, W_PAD,
            )  # fmt: skip
        else:
            report(state_ptr, status_ptr, free, epoch - 1, 0, KIND, WAIT_CREDIT, W, W_PAD)


Sums = tuple[torch.Tensor, torch.Tensor]
"""Int32: slots per token block and expert `(blocks, E)`, copies per token block and peer `(blocks, W)`."""


def new_sums(channel: Channel, ids_TK: torch.Tensor) -> Sums:
    """Return memory for what `count` makes of `ids_TK`, unwritten."""
    num_blocks = max(1, triton.cdiv(ids_TK.shape[0], channel.blocks.tokens))
    W, E = channel.layout.world_size, channel.layout.num_experts
    return (
        ids_TK.new_empty((num_blocks, E), dtype=torch.int32),
        ids_TK.new_empty((num_blocks, W), dtype=torch.int32),
    )


def count(
    channel: Channel,
    ids_TK: torch.Tensor,
    tally: torch.Tensor,
    sums: Sums,
    kind: Kind = Kind.DISPATCH,
    ledger: torch.Tensor | None = None,
) -> None:
    """Count this rank's slots and copies, and send the counts to every peer.

    Needs nothing but the lane at rest. When the kernel has run, `tally[:W]` holds the copies
    for each peer and every peer has this rank's counts behind its `counts_ready` flag.

    Args:
        channel: the lane.
        ids_TK: int32 or int64, contiguous; -1 masks a slot.
        tally: int32 `(2 W + L + 1,)`, of which the first `W` are written.
        sums: written; `scatter` places the slots by them.
        kind: `DISPATCH`, or `COUNTS` where no rows follow.
        ledger: of the dispatcher, see `expand`; None for the lane's.

    Example:
        >>> import symm_a2a
        >>> sizes = dict(num_experts=2, top_k=2, hidden_dim=2, max_tokens_per_rank=2)
        >>> world = symm_a2a.VirtualWorld(symm_a2a.EPConfig(**sizes, dtype=torch.float32), 2, "cpu")
        >>> channels = [d.arena.lanes[0].channel for d in world.dispatchers]
        >>> tally = torch.zeros(2 * 2 + 1 + 1, dtype=torch.int32)
        >>> ids = torch.tensor([[1, 1], [0, -1]])
        >>> expert_sums, peer_sums = sums = new_sums(channels[0], ids)
        >>> count(channels[0], ids, tally, sums)
        >>> expert_sums.tolist(), peer_sums.tolist()
        ([[1, 2]], [[1, 1]])
        >>> channels[1].local["counts"].tolist()
        [[1, 2, 1, 1, 0], [0, 0, 0, 0, 0]]
    """
    layout = channel.layout
    blocks = channel.blocks
    expert_sums, peer_sums = sums
    T, num_blocks = ids_TK.shape[0], expert_sums.shape[0]
    channel.launch(_count_kernel, num_blocks, blocks.residency.count)(
        ids_TK, tally, expert_sums, peer_sums, channel.ledger if ledger is None else ledger,
        channel.peers_W, channel.local["scatter_free"], channel.abort_W, channel.state, channel.status,
        channel.rank, T, num_blocks, channel.polls,
        KIND=int(kind), COUNTS=channel.offset("counts"), COUNTS_READY=channel.offset("counts_ready"),
        K=layout.top_k, K_PAD=padded(layout.top_k),
        E=layout.num_experts, E_PAD=max(2, padded(layout.num_experts)),
        W=layout.world_size, W_PAD=padded(layout.world_size),
        BLOCK_T=blocks.tokens, BLOCK_W=blocks.peers, BLOCK_S=blocks.sums,
    )  # fmt: skip
