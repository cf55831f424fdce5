"""Write each row of a sequence exchange to where it belongs in the result of the rank that it is for."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.addresses import peer_regions
from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.flags import healthy, last_program
from symm_a2a.kernels.phases import announce
from symm_a2a.kernels.ulysses import CARD_WORDS, Cell, Kind, SequenceChannel, Sizes
from symm_a2a.layout import ALIGNMENT, STORE_BYTES

_EPOCH = tl.constexpr(int(Cell.EPOCH))
_DONE = tl.constexpr(int(Cell.DONE))
_CARD_WORDS = tl.constexpr(CARD_WORDS)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_TO_HEADS = tl.constexpr(int(Kind.SEQ_TO_HEAD))


@triton.jit(
    do_not_specialize=[
        "rank", "rows", "tokens", "batch_stride", "token_stride", "part_stride", "head_stride",
        "payload_units", "card0", "card1", "polls",
    ]
)  # fmt: skip
def _send_heads_kernel(
    x_ptr, peers_ptr, ready_ptr, abort_ptr, state_ptr, status_ptr,
    rank, rows, tokens, batch_stride, token_stride, part_stride, head_stride,
    payload_units, card0, card1, polls,
    READY: tl.constexpr, CARDS: tl.constexpr, PAYLOAD: tl.constexpr,
    SPINS: tl.constexpr, KIND: tl.constexpr, STRIDED: tl.constexpr, ALIGN: tl.constexpr,
    REPLICAS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Send rows of `N` elements, a block of tokens to one peer at a time; publish them.

    In a sequence by heads, row `(batch, token, peer)` goes to the peer's `(batch, rank, token)`, in heads by
    sequence the other way round. Blocks take the peers in turn from this rank on, so that ranks in step
    write to different ones. With `STRIDED` heads are apart in memory, else a row is one run.

    Example: 2 ranks, 3 tokens each: rank 1's token 2 of batch 0, the heads of rank 0, is row 4 of its
    input, and becomes row 5 at rank 0.
    """
    program = tl.program_id(0)
    epoch = tl.load(state_ptr + _EPOCH) + 1
    turn = epoch & 1
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if healthy(state_ptr):
        for item in tl.range(program, (rows + BLOCK_R - 1) // BLOCK_R * W, tl.num_programs(0)):
            block = item // W
            q = tl.full((1,), 0, tl.int64) + (rank + block + item % W) % W
            i = block * BLOCK_R + tl.arange(0, BLOCK_R)
            batch = (i // tokens).to(tl.int64)
            token = (i % tokens).to(tl.int64)
            if KIND == _TO_HEADS:
                source = batch * batch_stride + token * token_stride + (q // REPLICAS) * part_stride
                target = (batch * W + rank) * tokens + token
            else:
                source = batch * batch_stride + (q * tokens + token) * token_stride
                target = i.to(tl.int64) * W + rank
            source = tl.multiple_of(source, [ALIGN])
            buffer = peer_regions(peers_ptr, q, q < W, PAYLOAD, dtype)
            buffer += turn * payload_units * (_ALIGNMENT // (dtype.primitive_bitwidth // 8))
            for c in tl.range(0, N, BLOCK_N):
                column = c + tl.arange(0, BLOCK_N)
                mask = (i < rows)[:, None] & (column < N)[None, :]
                if STRIDED:
                    head = tl.multiple_of((column // D).to(tl.int64) * head_stride, [ALIGN])
                    tile = tl.load(x_ptr + source[:, None] + (head + column % D)[None, :], mask=mask)
                else:
                    tile = tl.load(x_ptr + source[:, None] + column[None, :], mask=mask)
                tl.store(buffer[:, None] + target[:, None] * N + column[None, :], tile, mask=mask)
    if last_program(state_ptr + _DONE):
        if healthy(state_ptr):
            w = tl.arange(0, W_PAD)
            card = peer_regions(peers_ptr, w, w < W, CARDS, tl.int64) + (turn * W + rank) * _CARD_WORDS
            tl.store(card, tl.full((W_PAD,), 0, tl.int64) + card0, mask=w < W)
            tl.store(card + 1, tl.full((W_PAD,), 0, tl.int64) + card1, mask=w < W)
            announce(
                peers_ptr, ready_ptr + turn * W, abort_ptr, state_ptr, status_ptr, turn * W + rank,
                epoch, 0, rows.to(tl.int64), polls,
                READY, _EPOCH, SPINS, KIND, W, W_PAD,
            )  # fmt: skip


def send_heads(channel: SequenceChannel, kind: Kind, x: torch.Tensor, sizes: Sizes) -> None:
    """Send every rank its part of `x`, in the layout of its result, and publish it.

    Needs the last exchange to have been taken on this rank: every peer has then taken the one before, whose
    memory is written now (docs/ulysses.md). When the kernel has run, every peer can see its rows behind its
    ready word; where kernels wait, it has seen those of every peer.

    Args:
        channel: this rank's.
        kind: of the exchange; a `GROWTH` sends no rows.
        x: `(b, s, h, d)`, or `(b, W * s, H, d)` for `HEAD_TO_SEQ`; any strides but the last, which is 1.
        sizes: of the exchange.

    Example:
        >>> from symm_a2a.ulysses.lane import SequenceLane
        >>> lanes = SequenceLane.world(2, max_bytes=64, device=torch.device("cpu"))
        >>> x = torch.arange(6.0).view(1, 3, 2, 1)
        >>> sizes = Sizes(batch=1, tokens=3, heads=2, dim=1, dtype=torch.float32, replicas=1)
        >>> for lane in lanes:
        ...     send_heads(lane.channel, Kind.SEQ_TO_HEAD, x + 10 * lane.channel.rank, sizes)
        >>> [lane.channel.payload[1, :24].view(torch.float32).tolist() for lane in lanes]
        [[0.0, 2.0, 4.0, 10.0, 12.0, 14.0], [1.0, 3.0, 5.0, 11.0, 13.0, 15.0]]
    """
    layout, itemsize = channel.layout, x.dtype.itemsize
    W, H = layout.world_size, sizes.local_heads(layout.world_size)
    rows = 0 if kind == Kind.GROWTH else sizes.rows
    batch_stride, token_stride, head_stride, _ = x.stride()
    width = H * sizes.dim
    strided = rows > 0 and H > 1 and head_stride != sizes.dim
    steps = (batch_stride, token_stride, H * head_stride, head_stride if strided else 0)
    block_rows, block_columns = channel.tile(rows, width, itemsize)
    channel.launch(_send_heads_kernel, triton.cdiv(rows, block_rows) * W)(
        x, channel.peers_W, channel.ready, channel.abort_W, channel.state, channel.status,
        channel.rank, rows, sizes.tokens, *steps,
        layout.payload.shape[1] // ALIGNMENT, *sizes.card(kind), channel.polls,
        READY=layout.ready.offset, CARDS=layout.cards.offset, PAYLOAD=layout.payload.offset,
        SPINS=channel.spins, KIND=int(kind), STRIDED=strided,
        ALIGN=math.gcd(STORE_BYTES // itemsize, *steps), REPLICAS=sizes.replicas,
        N=width, D=sizes.dim, W=W, W_PAD=padded(W), BLOCK_R=block_rows, BLOCK_N=block_columns,
    )  # fmt: skip
