"""Count the rows that a rank will receive, as soon as every peer's counts are here."""

import torch
import triton
import triton.language as tl

from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell, Channel, Kind
from symm_a2a.kernels.flags import WAIT_COUNTS, agreed, report, wait
from symm_a2a.kernels.gaps import expert_starts

_COUNTED = tl.constexpr(int(Cell.COUNTED))
_KIND = tl.constexpr(int(Kind.DISPATCH))


@triton.jit(do_not_specialize=["rank", "polls"])
def _row_count_kernel(
    rows_ptr, counts_ptr, ready_ptr, abort_ptr, state_ptr, status_ptr, rank, polls,
    PAD: tl.constexpr, E: tl.constexpr, L_PAD: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """Sum, over this rank's experts, the counts of all ranks padded to `PAD`; -1 on failure.

    Reads the epoch that `count` has written, not the scatter's own: it may run on another
    stream, beside the scatter.

    Example: two ranks send `[3, 1]` and `[2, 0]` to the two experts here, `PAD = 4`:
    `8 + 4 = 12` rows.
    """
    L: tl.constexpr = E // W
    w = tl.arange(0, W_PAD)
    e = tl.arange(0, L_PAD)
    epoch = tl.load(state_ptr + _COUNTED)
    words = wait(ready_ptr, abort_ptr, state_ptr, epoch, polls, W, W_PAD)
    if agreed(words, epoch, _KIND, W, W_PAD):
        counts = tl.load(
            counts_ptr + w[:, None] * (E + W + 1) + rank * L + e[None, :],
            mask=(w < W)[:, None] & (e < L)[None, :], other=0,
        )  # fmt: skip
        _, sizes = expert_starts(tl.sum(counts, 0), PAD)
        tl.store(rows_ptr, tl.sum(sizes, 0).to(tl.int64))
    else:
        tl.store(rows_ptr, -1)
        report(state_ptr, status_ptr, words, epoch, 0, _KIND, WAIT_COUNTS, W, W_PAD)


def row_count(channel: Channel, rows: torch.Tensor, pad_multiple: int) -> None:
    """Write the number of rows of the dispatch whose counts were sent last.

    Needs `count` to have run. Waits for the peers' counts, not for their rows.

    Args:
        channel: the lane.
        rows: int64 `(1,)`, written; -1 where a peer's counts did not come.
        pad_multiple: each expert's rows are padded to a multiple of it.

    Example:
        >>> import symm_a2a
        >>> from symm_a2a import exchange
        >>> sizes = dict(num_experts=2, top_k=2, hidden_dim=2, max_tokens_per_rank=2)
        >>> world = symm_a2a.VirtualWorld(symm_a2a.EPConfig(**sizes, dtype=torch.float32), 2, "cpu")
        >>> lanes = [dispatcher.arena.lanes[0] for dispatcher in world.dispatchers]
        >>> x, scores = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 0.25], [1.0, 1.0]])
        >>> ids = torch.tensor([[1, 1], [0, -1]])
        >>> _ = [exchange.launch_dispatch(lane, x, scores, ids, 4, 1) for lane in lanes]
        >>> rows = torch.zeros(1, dtype=torch.int64)
        >>> for multiple in (1, 8):
        ...     row_count(lanes[1].channel, rows, multiple)
        ...     print(rows.item())
        4
        8
    """
    layout = channel.layout
    channel.launch(_row_count_kernel)(
        rows, channel.local["counts"], channel.local["counts_ready"], channel.abort_W,
        channel.state, channel.status, channel.rank, channel.polls,
        PAD=pad_multiple, E=layout.num_experts, L_PAD=padded(layout.num_local_experts),
        W=layout.world_size, W_PAD=padded(layout.world_size),
    )  # fmt: skip
