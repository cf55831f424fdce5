"""Copy what a sequence exchange has brought out of symmetric memory; add up the gradients of replicas."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.blocks import INTERPRETED, padded
from symm_a2a.kernels.flags import acquire, agreed, healthy, report
from symm_a2a.kernels.rounding import narrow, widen
from symm_a2a.kernels.ulysses import CARD_WORDS, Cell, Kind, SequenceChannel, Sizes, Wait
from symm_a2a.layout import ALIGNMENT

_EPOCH = tl.constexpr(int(Cell.EPOCH))
_CARD_WORDS = tl.constexpr(CARD_WORDS)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_WAIT_CARDS = tl.constexpr(int(Wait.CARDS))


@triton.jit
def _same_card(cards_ptr, card0, card1, W: tl.constexpr, W_PAD: tl.constexpr):
    """Whether every peer exchanges what this rank does."""
    w = tl.arange(0, W_PAD)
    first = tl.load(cards_ptr + w * _CARD_WORDS, mask=w < W, other=card0)
    second = tl.load(cards_ptr + w * _CARD_WORDS + 1, mask=w < W, other=card1)
    return tl.min(((first == card0) & (second == card1)).to(tl.int32), 0) != 0


@triton.jit(do_not_specialize=["rows", "payload_units", "card0", "card1"])
def _take_heads_kernel(
    out_ptr, token_ptr, payload_ptr, ready_ptr, cards_ptr, state_ptr, status_ptr,
    rows, payload_units, card0, card1,
    KIND: tl.constexpr, SUMS: tl.constexpr, REPLICAS: tl.constexpr, N: tl.constexpr, SUM: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the result, which arrives in its own layout; with `SUMS` each `REPLICAS` rows become their sum.

    What did not arrive, or is not what this rank exchanges, is NaN and not what memory held.

    Example: two ranks sent 1 and 2 for one element of a head that both have: 3.
    """
    program = tl.program_id(0)
    epoch = tl.load(state_ptr + _EPOCH)
    turn = epoch & 1
    words = acquire(ready_ptr + turn * W, W, W_PAD)
    here = agreed(words, epoch, KIND, W, W_PAD)
    here = here & _same_card(cards_ptr + turn * W * _CARD_WORDS, card0, card1, W, W_PAD)
    if here == 0:
        report(state_ptr, status_ptr, words, epoch, KIND, KIND, _WAIT_CARDS, W, W_PAD)
    here = here & healthy(state_ptr)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    payload_ptr += turn * payload_units * (_ALIGNMENT // (dtype.primitive_bitwidth // 8))
    # The compiler sees that this is a multiple of N: accesses stay wide though they are masked.
    elements = rows.to(tl.int64) * N
    arrived = tl.where(here, elements, 0)
    for block in tl.range(program, (elements + BLOCK - 1) // BLOCK, tl.num_programs(0)):
        i = (tl.full((BLOCK,), 0, tl.int64) + block) * BLOCK + tl.arange(0, BLOCK)
        if SUMS:
            first = i // N * (REPLICAS * N) + i % N
            total = tl.full((BLOCK,), 0, SUM)
            for replica in tl.range(0, REPLICAS):
                part = tl.load(payload_ptr + first + replica * N, mask=i < arrived, other=float("nan"))
                total += widen(part, SUM)
            tl.store(out_ptr + i, narrow(total, dtype), mask=i < elements)
        else:
            part = tl.load(payload_ptr + i, mask=i < arrived, other=float("nan"))
            tl.store(out_ptr + i, part, mask=i < elements)
    if program == 0:
        tl.store(token_ptr, 0.0)


def take_heads(
    channel: SequenceChannel, kind: Kind, out: torch.Tensor, token: torch.Tensor, sizes: Sizes
) -> None:
    """Take the result of an exchange out of symmetric memory.

    Needs every peer's rows to have arrived, else it reports that they have not. The memory is written again
    by the exchange after the next, which no rank launches before this kernel has run here.

    Args:
        channel: this rank's.
        kind: of the exchange.
        out: contiguous, written whole; of the shape of the result.
        token: float32 `(1,)`, set to zero.
        sizes: of the exchange.

    Example:
        >>> from symm_a2a.kernels.ulysses_send import send_heads
        >>> from symm_a2a.ulysses.lane import SequenceLane
        >>> lanes = SequenceLane.world(2, max_bytes=64, device=torch.device("cpu"))
        >>> sizes = Sizes(batch=1, tokens=2, heads=1, dim=2, dtype=torch.float32, replicas=2)
        >>> grad = torch.arange(8.0).view(1, 4, 1, 2)
        >>> for lane in lanes:
        ...     send_heads(lane.channel, Kind.HEAD_TO_SEQ, grad * 10**lane.channel.rank, sizes)
        >>> out, token = torch.empty(1, 2, 1, 2), torch.ones(1)
        >>> take_heads(lanes[1].channel, Kind.HEAD_TO_SEQ, out, token, sizes)
        >>> out.flatten().tolist()
        [44.0, 55.0, 66.0, 77.0]
    """
    layout, itemsize = channel.layout, out.dtype.itemsize
    W, width = layout.world_size, sizes.local_heads(layout.world_size) * sizes.dim
    _, block = channel.tile(1, out.numel() if INTERPRETED else channel.tile_bytes, itemsize)
    channel.launch(_take_heads_kernel, triton.cdiv(out.numel(), block))(
        out, token, channel.payload.view(out.dtype), channel.ready, channel.cards,
        channel.state, channel.status, out.numel() // width, layout.payload.shape[1] // ALIGNMENT,
        *sizes.card(kind),
        KIND=int(kind), SUMS=kind == Kind.HEAD_TO_SEQ and sizes.replicas > 1, REPLICAS=sizes.replicas,
        N=width, SUM=tl.float64 if out.dtype == torch.float64 else tl.float32,
        W=W, W_PAD=padded(W), BLOCK=block,
    )  # fmt: skip
