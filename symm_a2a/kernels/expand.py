"""Copy each received row to the rows of its local experts, in expert-major order."""

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.addresses import copies_in_turn
from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell, Channel, Kind, Report
from symm_a2a.kernels.counting import placed_alike
from symm_a2a.kernels.flags import detail_of
from symm_a2a.kernels.gaps import expert_starts, zero_gaps
from symm_a2a.kernels.phases import may_join, release_sections
from symm_a2a.kernels.unpack import unpack_copies

_DONE = tl.constexpr(int(Cell.DONE_EXPAND))
_JOINED = tl.constexpr(int(Cell.SCATTER_JOINED))
_ROWS = tl.constexpr(int(Cell.ROWS))
_OVERFLOW = tl.constexpr(int(Report.OVERFLOW_ROWS))
_KIND = tl.constexpr(int(Kind.DISPATCH))


@triton.jit
def _read_headers(
    headers_ptr, row_of_copy_ptr, score_of_copy_ptr, row_starts, received, first, rank, capacity, C,
    K: tl.constexpr, K_PAD: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Turn a block of headers into rows and scores, kept for the combine and the backward.

    A header's word is `position * L + local expert`, or -1 for a slot that another rank has;
    the row is the position plus where the rows of (origin, expert) start. The slots that are
    here come first, in their order: of K slots few are, and who reads them can stop at the last.
    Copies that did not come have no rows, and scores of zero.

    Example: words `[-1, 6, -1, 3]` of a copy, rows 12 and 7: `[12, 7, -1, -1]` is stored.
    """
    source, place = copies_in_turn(first, rank, W, BLOCK_C)
    came = place < tl.gather(received, source, 0)
    k = tl.arange(0, K_PAD)
    half = tl.arange(0, 2 * K_PAD)
    copy = source * C + place
    header = tl.load(
        headers_ptr + copy[:, None].to(tl.int64) * (2 * K) + half[None, :],
        mask=came[:, None] & (half < 2 * K)[None, :], other=0,
    )  # fmt: skip
    word, score_bits = tl.split(tl.reshape(header, [BLOCK_C, K_PAD, 2]))
    word = word.to(tl.int32)
    slot = tl.maximum(word, 0)
    start = tl.gather(row_starts, tl.reshape(source[:, None] * L_PAD + slot % L, [BLOCK_C * K_PAD]), 0)
    row = tl.reshape(start, [BLOCK_C, K_PAD]) + slot // L
    mine = (word >= 0) & came[:, None] & (k < K)[None, :]
    row = tl.where(mine & (row < capacity), row, -1)
    ahead = tl.cumsum(mine.to(tl.int32), 1) - mine.to(tl.int32)
    others = tl.sum(mine.to(tl.int32), 1)[:, None] + k[None, :] - ahead
    target = copy[:, None] * K + tl.where(mine, ahead, others)
    mask = (place < C)[:, None] & (k < K)[None, :]
    tl.store(row_of_copy_ptr + target, row, mask=mask)
    scores = score_bits.to(score_of_copy_ptr.dtype.element_ty, bitcast=True)
    tl.store(score_of_copy_ptr + target, scores, mask=mask)


@triton.jit
def _record_load(
    ledger_ptr, counts_ptr, program, programs,
    E: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add all ranks' counts to the dispatcher's totals: slots of every expert, then copies `(W, W)`.

    Example: ranks 0 and 1 sent `[3, 1]` and `[2, 0]` slots to two experts, `[3, 1]` and `[2, 0]` copies to
    two ranks: `[5, 1]` and `[[3, 1], [2, 0]]` are added.
    """
    w = tl.arange(0, W_PAD)
    totals = tl.load(ledger_ptr).to(tl.pointer_type(tl.int64))
    for first in tl.range(program * BLOCK, E + W, programs * BLOCK):
        i = first + tl.arange(0, BLOCK)
        mask = (w < W)[:, None] & (i < E + W)[None, :]
        counts = tl.load(counts_ptr + w[:, None] * (E + W + 1) + i[None, :], mask=mask, other=0).to(tl.int64)
        tl.atomic_add(totals + i, tl.sum(counts, 0), mask=i < E, sem="relaxed", scope="gpu")
        # Column E + q has the copies for rank q.
        cell = w[:, None] * W + i[None, :]
        tl.atomic_add(totals + cell, counts, mask=mask & (i >= E)[None, :], sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["rank", "C", "capacity"])
def _expand_kernel(
    rows_ptr, tokens_per_expert_ptr, row_of_copy_ptr, score_of_copy_ptr, tally_ptr, token_ptr,
    ledger_ptr, counts_ptr, headers_ptr, payload_ptr, peers_ptr, ready_ptr, state_ptr, status_ptr,
    rank, C, capacity,
    FREE: tl.constexpr, HOLDS: tl.constexpr,
    PAD: tl.constexpr, GAPS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, E: tl.constexpr, L_PAD: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Expand the copies of all sections, and free the sections.

    The counts of all ranks say where the rows of each (expert, origin) start, so nothing is
    scanned: order is (expert, origin rank, origin slot).

    Example: rank 0 owns experts 0 and 1; origins 0 and 1 send it `[2, 1]` and `[1, 1]` slots.
    Expert 0 has rows 0, 1 (origin 0) and 2 (origin 1), expert 1 has 3 and 4.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    L: tl.constexpr = E // W
    w = tl.arange(0, W_PAD)
    e = tl.arange(0, L_PAD)
    epoch = tl.load(state_ptr + _JOINED) + 1
    words, here = may_join(ready_ptr, state_ptr, status_ptr, epoch, 0, _KIND, W, W_PAD)
    if here:
        here = placed_alike(ledger_ptr, counts_ptr, state_ptr, status_ptr, epoch, _KIND, E, W, W_PAD)
    if here:
        received = detail_of(words).to(tl.int32)
        counts = tl.load(
            counts_ptr + w[:, None] * (E + W + 1) + rank * L + e[None, :],
            mask=(w < W)[:, None] & (e < L)[None, :], other=0,
        )  # fmt: skip
        expert_rows = tl.sum(counts, 0)
        start, size = expert_starts(expert_rows, PAD)
        row_starts = tl.reshape(tl.cumsum(counts, 0) - counts + start[None, :], [W_PAD * L_PAD])
        if program == 0:
            tl.store(tally_ptr + W + w, received, mask=w < W)
            tl.store(tally_ptr + 2 * W + e, expert_rows, mask=e < L)
            tl.store(tally_ptr + 2 * W + L, (epoch & 0x7FFFFFFF).to(tl.int32))
            tl.store(token_ptr, 0.0)
            rows = tl.sum(expert_rows, 0).to(tl.int64)
            tl.store(state_ptr + _ROWS, tl.load(state_ptr + _ROWS) + rows)
            # A grouped GEMM that follows must not read past the capacity.
            within = tl.maximum(tl.minimum(size, capacity - start), 0)
            tl.store(tokens_per_expert_ptr + e, within, mask=e < L)
            dropped = tl.sum(tl.maximum(expert_rows - tl.maximum(capacity - start, 0), 0), 0)
            if dropped > 0:
                tl.atomic_add(status_ptr + _OVERFLOW, dropped.to(tl.int64), sem="relaxed", scope="sys")
        _record_load(ledger_ptr, counts_ptr, program, programs, E, W, W_PAD, BLOCK_E)
        for first in tl.range(program * BLOCK_C, C * W, programs * BLOCK_C):
            _read_headers(
                headers_ptr, row_of_copy_ptr, score_of_copy_ptr, row_starts, received, first, rank,
                capacity, C, K, K_PAD, L, L_PAD, W, BLOCK_C,
            )  # fmt: skip
            tl.debug_barrier()
            for r in tl.range(first, tl.minimum(first + BLOCK_C, tl.max(received, 0) * W), BLOCK_R):
                source, place = copies_in_turn(r, rank, W, BLOCK_R)
                unpack_copies(
                    rows_ptr, payload_ptr, row_of_copy_ptr, source * C + place, place < C,
                    D, P, K, K_PAD, BLOCK_R, BLOCK_K, BLOCK_N,
                )  # fmt: skip
        if GAPS:
            zero_gaps(rows_ptr, expert_rows, capacity, program, programs, PAD, D, L, L_PAD, BLOCK_R, BLOCK_N)
    release_sections(peers_ptr, state_ptr, rank, epoch, _DONE, _JOINED, FREE, HOLDS, W, W_PAD)


def expand(
    channel: Channel,
    rows_RD: torch.Tensor,
    tokens_per_expert_L: torch.Tensor,
    row_of_copy: torch.Tensor,
    score_of_copy: torch.Tensor,
    tally: torch.Tensor,
    token: torch.Tensor,
    ledger: torch.Tensor | None = None,
    *,
    pad_multiple: int,
    exact: bool,
) -> None:
    """Take a dispatch's copies out of symmetric memory, into expert-major rows.

    Needs every peer's copies to have arrived; reports the lane as failed where they have not,
    or where they are another operation's. When the kernel has run, every peer may overwrite
    its section here.

    Args:
        channel: the lane.
        rows_RD: written whole; rows past its end are dropped and counted.
        tokens_per_expert_L: int32, written: padded counts that stay within `rows_RD`.
        row_of_copy: int32 `(W, C, K)`, written whole: each received copy's rows, then -1.
        score_of_copy: `(W, C, K)` of the score dtype, written whole: their scores, or 0.
        tally: int32 `(2 W + L + 1,)`; from `W` on written: copies received from each peer,
            rows of each local expert before padding and drops, the dispatch's epoch.
        token: float32 `(1,)`, set to zero.
        ledger: int64 `(2,)`, of the dispatcher: the address of its totals, int64 `(E + W * W,)`, to which all
            ranks' slots for every expert and copies for every rank are added; and the mark of its placement,
            which every rank must have. None for the lane's.
        pad_multiple: each expert's rows are padded to a multiple of it.
        exact: whether `rows_RD` has exactly as many rows as arrive.

    Example:
        >>> import symm_a2a
        >>> from symm_a2a import exchange
        >>> sizes = dict(num_experts=2, top_k=2, hidden_dim=2, max_tokens_per_rank=2)
        >>> world = symm_a2a.VirtualWorld(symm_a2a.EPConfig(**sizes, dtype=torch.float32), 2, "cpu")
        >>> lanes = [dispatcher.arena.lanes[0] for dispatcher in world.dispatchers]
        >>> x, scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 0.25], [1.0, 1.0]])
        >>> ids = torch.tensor([[1, 1], [0, -1]])
        >>> flights = [exchange.launch_dispatch(lane, x, scores, ids, 6, 1) for lane in lanes]
        >>> rows, counts, route = torch.ones(6, 2), torch.zeros(1, dtype=torch.int32), flights[1].routing
        >>> where = route.row_of_copy, route.score_of_copy, route.tally
        >>> expand(lanes[1].channel, rows, counts, *where, torch.ones(1), pad_multiple=1, exact=False)
        >>> rows.tolist(), counts.tolist()
        ([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [0.0, 0.0], [0.0, 0.0]], [4])
        >>> route.row_of_copy.tolist()
        [[[0, 1], [-1, -1]], [[2, 3], [-1, -1]]]
    """
    layout = channel.layout
    blocks = channel.blocks
    W, L = layout.world_size, layout.num_local_experts
    work = triton.cdiv(W * layout.max_tokens, blocks.copies)
    channel.launch(_expand_kernel, work, blocks.residency.expand)(
        rows_RD, tokens_per_expert_L, row_of_copy, score_of_copy, tally, token,
        channel.ledger if ledger is None else ledger,
        channel.local["counts"], channel.local["headers"], channel.local["scatter_rows"],
        channel.peers_W, channel.local["scatter_ready"], channel.state, channel.status,
        channel.rank, layout.max_tokens, rows_RD.shape[0],
        FREE=channel.offset("scatter_free"), HOLDS=channel.holds,
        PAD=pad_multiple, GAPS=not exact or pad_multiple > 1,
        D=layout.hidden_dim, P=layout.padded_hidden, K=layout.top_k, K_PAD=padded(layout.top_k),
        E=layout.num_experts, L_PAD=padded(L), W=W, W_PAD=padded(W),
        BLOCK_C=blocks.copies, BLOCK_R=blocks.copy_rows, BLOCK_K=blocks.slots, BLOCK_N=blocks.columns,
        BLOCK_E=blocks.counts,
    )  # fmt: skip
