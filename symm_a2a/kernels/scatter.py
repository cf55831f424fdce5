"""Send one copy of a token's row to every rank that owns one of its experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.addresses import peer_regions
from symm_a2a.kernels.blocks import SMALL_TOKENS, padded
from symm_a2a.kernels.channel import Cell, Channel, Kind
from symm_a2a.kernels.counting import count_tokens, send_counts
from symm_a2a.kernels.flags import dispatch_in, flag_words, healthy, last_program, publish
from symm_a2a.kernels.phases import announce, may_launch

_DONE = tl.constexpr(int(Cell.DONE_SCATTER))
_LAUNCHED = tl.constexpr(int(Cell.SCATTER_LAUNCHED))


@triton.jit
def _sums_before(sums_ptr, block, column, N: tl.constexpr, BLOCK_S: tl.constexpr):
    """Column sums over the blocks ahead of `block`; columns past `N` are zeros."""
    total = tl.full(column.shape, 0, tl.int32)
    for first in tl.range(0, block, BLOCK_S):
        b = first + tl.arange(0, BLOCK_S)
        mask = (b < block)[:, None] & (column < N)[None, :]
        total += tl.sum(tl.load(sums_ptr + b[:, None] * N + column[None, :], mask=mask, other=0), 0)
    return total


@triton.jit
def _place_block(
    ids_ptr, scores_ptr, copy_of_peer_ptr, copy_of_slot_ptr, peers_ptr, expert_base, peer_base,
    block, rank, T, C, HEADERS: tl.constexpr, HEADER: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, E: tl.constexpr, W: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Give every slot of a block its position and every copy its place; send the headers.

    A slot's position is its rank among this rank's slots for the same expert: those of
    earlier blocks (`expert_base`) and, compared in pairs, those ahead of it in this block. A
    copy's place at a peer is its token's rank among the tokens sent there.
    """
    L: tl.constexpr = E // W
    SLOTS: tl.constexpr = BLOCK_T * K_PAD
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, K_PAD)
    mask = (t < T)[:, None] & (k < K)[None, :]
    ids = tl.load(ids_ptr + t[:, None] * K + k[None, :], mask=mask, other=-1)
    scores = tl.load(scores_ptr + t[:, None] * K + k[None, :], mask=mask, other=0.0)
    valid = (ids >= 0) & (ids < E)
    expert = tl.where(valid, ids, -1).to(tl.int32)
    flat = tl.reshape(expert, [SLOTS])
    slot = tl.arange(0, SLOTS)
    ahead = tl.full((SLOTS,), 0, tl.int32)
    for first in tl.range(0, SLOTS, BLOCK_J):
        j = first + tl.arange(0, BLOCK_J)
        tj = block * BLOCK_T + j // K_PAD
        kj = j % K_PAD
        other = tl.load(ids_ptr + tj * K + kj, mask=(tj < T) & (kj < K), other=-1)
        same = (flat[:, None] == other[None, :]) & (j[None, :] < slot[:, None])
        ahead += tl.sum(same.to(tl.int32), 1)
    position = tl.reshape(tl.gather(expert_base, tl.maximum(flat, 0), 0) + ahead, [BLOCK_T, K_PAD])
    record = (position * L + tl.where(valid, expert % L, 0)).to(HEADER)
    score_bits = scores.to(HEADER, bitcast=True)
    owner = tl.where(valid, expert // L, -1)
    half = tl.arange(0, 2 * K_PAD)
    copy_of_slot = tl.full((BLOCK_T, K_PAD), -1, tl.int32)
    for first in tl.range(0, W, BLOCK_W):
        q = first + tl.arange(0, BLOCK_W)
        mine = owner[:, None, :] == q[None, :, None]
        sent = tl.max(mine.to(tl.int32), 2)
        place = tl.gather(peer_base, q, 0)[None, :] + tl.cumsum(sent, 0) - sent
        tl.store(
            copy_of_peer_ptr + t[:, None] * W + q[None, :], tl.where(sent != 0, place, -1),
            mask=(t < T)[:, None] & (q < W)[None, :],
        )  # fmt: skip
        copy = q[None, :] * C + place
        copy_of_slot = tl.maximum(copy_of_slot, tl.max(tl.where(mine, copy[:, :, None], -1), 1))
        header = tl.join(
            tl.where(mine, record[:, None, :], -1),
            tl.broadcast_to(score_bits[:, None, :], [BLOCK_T, BLOCK_W, K_PAD]),
        )
        header = tl.reshape(header, [BLOCK_T, BLOCK_W, 2 * K_PAD])
        section = peer_regions(peers_ptr, q, q < W, HEADERS, HEADER)
        place = (rank * C + place).to(tl.int64) * (2 * K)
        tl.store(
            section[None, :, None] + place[:, :, None] + half[None, None, :], header,
            mask=(sent != 0)[:, :, None] & (half < 2 * K)[None, None, :],
        )  # fmt: skip
    tl.store(copy_of_slot_ptr + t[:, None] * K + k[None, :], copy_of_slot, mask=mask)


@triton.jit
def _send_block(
    x_ptr, copy_of_peer_ptr, peers_ptr, block, rank, T, C,
    ROWS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, W: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load each row of a block once and store it to each peer that a copy goes to.

    Peers are visited from this rank on, so that ranks in step write to different peers. The
    columns that pad a row to 16 bytes are stored too: every store stays 16 bytes wide.
    """
    for r in tl.range(0, BLOCK_T, BLOCK_R):
        t = block * BLOCK_T + r + tl.arange(0, BLOCK_R)
        for first in tl.range(0, W, BLOCK_W):
            i = first + tl.arange(0, BLOCK_W)
            q = (rank + i) % W
            place = tl.load(
                copy_of_peer_ptr + t[:, None] * W + q[None, :],
                mask=(t < T)[:, None] & (i < W)[None, :], other=-1,
            )  # fmt: skip
            section = peer_regions(peers_ptr, q, i < W, ROWS, x_ptr.dtype.element_ty)
            target = section[None, :] + (rank * C + place).to(tl.int64) * P
            for c in tl.range(0, P, BLOCK_N):
                column = c + tl.arange(0, BLOCK_N)
                tile = tl.load(
                    x_ptr + t[:, None].to(tl.int64) * D + column[None, :],
                    mask=(t < T)[:, None] & (column < D)[None, :], other=0.0,
                )  # fmt: skip
                tl.store(
                    target[:, :, None] + column[None, None, :],
                    tl.broadcast_to(tile[:, None, :], [BLOCK_R, BLOCK_W, BLOCK_N]),
                    mask=(place >= 0)[:, :, None] & (column < P)[None, None, :],
                )


@triton.jit(do_not_specialize=["rank", "T", "C", "num_blocks", "polls"])
def _scatter_kernel(
    x_ptr, ids_ptr, scores_ptr, expert_sums_ptr, peer_sums_ptr,
    copy_of_peer_ptr, copy_of_slot_ptr, tally_ptr, ledger_ptr,
    peers_ptr, ready_ptr, free_ptr, abort_ptr, state_ptr, status_ptr, rank, T, C, num_blocks, polls,
    HEADERS: tl.constexpr, ROWS: tl.constexpr, READY: tl.constexpr, COUNTS_READY: tl.constexpr,
    COUNTS: tl.constexpr, PLACE: tl.constexpr, COUNTS_TOO: tl.constexpr, SPINS: tl.constexpr,
    KIND: tl.constexpr, HEADER: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr, EPOCH: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scatter rows, each program a run of token blocks; with `PLACE` the headers too.

    With `COUNTS_TOO`, for at most `BLOCK_A` tokens, every program counts the tokens ahead of its own,
    and the first one counts all and sends the counts: no count kernel runs. Without `PLACE` (a
    combine's backward, a second dispatch) the copies go where the dispatch put them. The last program
    publishes, and with `SPINS` waits until every peer has.

    Example: rank 1 sends token 5 as its third copy to rank 0: the row goes to
    `scatter_rows[1, 2]` at rank 0.
    """
    program = tl.program_id(0)
    per_program = (num_blocks + tl.num_programs(0) - 1) // tl.num_programs(0)
    # Behind the last block there are no sums to read.
    begin = tl.minimum(program * per_program, num_blocks)
    end = tl.minimum(begin + per_program, num_blocks)
    e = tl.arange(0, E_PAD)
    w = tl.arange(0, W_PAD)
    epoch = tl.load(state_ptr + _LAUNCHED) + 1
    if PLACE:
        if COUNTS_TOO:
            ok = may_launch(free_ptr, state_ptr, status_ptr, epoch, KIND, W, W_PAD)
            ahead = tl.minimum(begin * BLOCK_T, T)
            expert_base, peer_base = count_tokens(
                ids_ptr, status_ptr, 0, ahead, False, K, K_PAD, E, E_PAD, W, W_PAD, BLOCK_A, BLOCK_W
            )
            if ok & (program == 0):
                slots, copies = count_tokens(
                    ids_ptr, status_ptr, 0, T, True, K, K_PAD, E, E_PAD, W, W_PAD, BLOCK_A, BLOCK_W
                )
                tl.store(tally_ptr + w, copies, mask=w < W)
                send_counts(
                    slots, copies, ledger_ptr, peers_ptr, state_ptr, rank, epoch, KIND, COUNTS, COUNTS_READY,
                    E, E_PAD, W, W_PAD,
                )  # fmt: skip
        else:
            # The count kernel holds the credit already.
            ok = healthy(state_ptr)
            expert_base = _sums_before(expert_sums_ptr, begin, e, E, BLOCK_S)
            peer_base = _sums_before(peer_sums_ptr, begin, w, W, BLOCK_S)
    else:
        ok = may_launch(free_ptr, state_ptr, status_ptr, epoch, KIND, W, W_PAD)
    if ok:
        for block in tl.range(begin, end):
            if PLACE:
                _place_block(
                    ids_ptr, scores_ptr, copy_of_peer_ptr, copy_of_slot_ptr, peers_ptr,
                    expert_base, peer_base, block, rank, T, C, HEADERS, HEADER,
                    K, K_PAD, E, W, BLOCK_T, BLOCK_J, BLOCK_W,
                )  # fmt: skip
                if COUNTS_TOO:
                    # Small messages mostly have a block a program: nothing is behind it.
                    if block + 1 < end:
                        slots, copies = count_tokens(
                            ids_ptr, status_ptr, block * BLOCK_T, T, False,
                            K, K_PAD, E, E_PAD, W, W_PAD, BLOCK_T, BLOCK_W,
                        )  # fmt: skip
                        expert_base += slots
                        peer_base += copies
                else:
                    expert_base += tl.load(expert_sums_ptr + block * E + e, mask=e < E, other=0)
                    peer_base += tl.load(peer_sums_ptr + block * W + w, mask=w < W, other=0)
                tl.debug_barrier()
            _send_block(
                x_ptr, copy_of_peer_ptr, peers_ptr, block, rank, T, C,
                ROWS, D, P, W, BLOCK_T, BLOCK_R, BLOCK_W, BLOCK_N,
            )  # fmt: skip
    if last_program(state_ptr + _DONE):
        if healthy(state_ptr):
            copies = tl.load(tally_ptr + w, mask=w < W, other=0).to(tl.int64)
            detail = copies
            if not PLACE:
                detail = copies * 0 + dispatch_in(tally_ptr, EPOCH)
                # A peer that dispatches, and waits for counts, must find another kind there.
                publish(peers_ptr, COUNTS_READY, rank, flag_words(epoch, KIND, detail, W_PAD), W, W_PAD)
            announce(
                peers_ptr, ready_ptr, abort_ptr, state_ptr, status_ptr, rank, epoch, detail, copies, polls,
                READY, _LAUNCHED, SPINS, KIND, W, W_PAD,
            )  # fmt: skip


def scatter(
    channel: Channel,
    kind: Kind,
    x_TD: torch.Tensor,
    copy_of_peer_TW: torch.Tensor,
    copy_of_slot_TK: torch.Tensor,
    tally: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor] | None = None,
    sums: tuple[torch.Tensor, torch.Tensor] | None = None,
    ledger: torch.Tensor | None = None,
) -> None:
    """Send the rows of `x_TD` to the ranks of their experts, and publish them.

    Needs the copies of the last scatter in this lane to have been taken by every peer: `count`
    has waited for that, or the host has, or a gather joined since implies it. When the kernel has
    run, every peer can see rows and headers behind its `scatter_ready` flag.

    Args:
        channel: the lane.
        kind: `DISPATCH`, `DISPATCH_AGAIN` or `COMBINE_BACKWARD`.
        x_TD: rows, contiguous, of the layout's dtype.
        copy_of_peer_TW: int32, each token's copy at each peer, or -1; written by a dispatch.
        copy_of_slot_TK: int32, `peer * C + copy` of each slot, or -1; written by a dispatch.
        tally: int32 `(2 W + L + 1,)`; the first `W` are the copies for each peer.
        slots: for a dispatch `(ids_TK, scores_TK)`, contiguous, the scores of the layout's score dtype.
        sums: as `count` wrote them; None to count here, at most `SMALL_TOKENS` tokens, and write
            the first `W` of the tally.
        ledger: of the dispatcher, see `expand`; None for the lane's.

    Example:
        >>> import symm_a2a
        >>> from symm_a2a.kernels.count import count, new_sums
        >>> sizes = dict(num_experts=2, top_k=2, hidden_dim=2, max_tokens_per_rank=2)
        >>> world = symm_a2a.VirtualWorld(symm_a2a.EPConfig(**sizes, dtype=torch.float32), 2, "cpu")
        >>> lanes = [dispatcher.arena.lanes[0] for dispatcher in world.dispatchers]
        >>> x, scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 0.25], [1.0, 1.0]])
        >>> ids = torch.tensor([[1, 1], [0, -1]])
        >>> tally = torch.zeros(2 * 2 + 1 + 1, dtype=torch.int32)
        >>> of_peer, of_slot = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
        >>> channel, theirs = lanes[0].channel, lanes[1].channel.local
        >>> sums = new_sums(channel, ids)
        >>> count(channel, ids, tally, sums)
        >>> scatter(channel, Kind.DISPATCH, x, of_peer, of_slot, tally, (ids, scores), sums)
        >>> of_peer.tolist(), of_slot.tolist()
        ([[-1, 0], [0, -1]], [[2, 2], [0, -1]])
        >>> theirs["scatter_rows"][0, 0, :2].tolist(), theirs["headers"][0, 0, :, 0].tolist()
        ([1.0, 2.0], [0, 1])
    """
    layout = channel.layout
    blocks = channel.blocks
    T = x_TD.shape[0]
    counts_too = slots is not None and sums is None
    tokens = blocks.small_tokens if counts_too else blocks.tokens
    num_blocks = max(1, triton.cdiv(T, tokens))
    ids, scores = slots or (copy_of_slot_TK, x_TD)
    expert_sums, peer_sums = sums or (tally, tally)
    W, L = layout.world_size, layout.num_local_experts
    channel.launch(_scatter_kernel, num_blocks, blocks.residency.scatter)(
        x_TD, ids, scores, expert_sums, peer_sums, copy_of_peer_TW, copy_of_slot_TK, tally,
        channel.ledger if ledger is None else ledger, channel.peers_W,
        channel.local["scatter_ready"], channel.local["scatter_free"],
        channel.abort_W, channel.state, channel.status,
        channel.rank, T, layout.max_tokens, num_blocks, channel.polls,
        HEADERS=channel.offset("headers"), ROWS=channel.offset("scatter_rows"),
        READY=channel.offset("scatter_ready"), COUNTS_READY=channel.offset("counts_ready"),
        COUNTS=channel.offset("counts"), PLACE=slots is not None, COUNTS_TOO=counts_too,
        SPINS=channel.spins, KIND=int(kind),
        HEADER=tl.int64 if layout.header_dtype == torch.int64 else tl.int32,
        D=layout.hidden_dim, P=layout.padded_hidden, K=layout.top_k, K_PAD=padded(layout.top_k),
        E=layout.num_experts, E_PAD=max(2, padded(layout.num_experts)), W=W, W_PAD=padded(W),
        EPOCH=2 * W + L,
        BLOCK_A=padded(min(SMALL_TOKENS, layout.max_tokens)), BLOCK_T=tokens,
        BLOCK_J=min(blocks.strip, tokens * padded(layout.top_k)), BLOCK_S=blocks.sums,
        BLOCK_R=min(blocks.send_rows, tokens), BLOCK_W=blocks.peers, BLOCK_N=blocks.columns,
    )  # fmt: skip
