"""Hold the credit of a launch: wait until every peer has taken the last exchange."""

import triton
import triton.language as tl

from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell, Channel, Kind
from symm_a2a.kernels.flags import WAIT_CREDIT, reached, report, wait


@triton.jit(do_not_specialize=["polls"])
def _credit_kernel(
    free_ptr, abort_ptr, state_ptr, status_ptr, polls,
    LAUNCHED: tl.constexpr, KIND: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """Wait, in one program, until every peer's free flag has reached the last launch's epoch."""
    epoch = tl.load(state_ptr + LAUNCHED)
    free = wait(free_ptr, abort_ptr, state_ptr, epoch, polls, W, W_PAD)
    if reached(free, epoch, W, W_PAD) == 0:
        report(state_ptr, status_ptr, free, epoch, 0, KIND, WAIT_CREDIT, W, W_PAD)


def credit(channel: Channel, kind: Kind) -> None:
    """Make the next launch of `kind` in this lane safe, on the device.

    Only two launches in the same direction, with none in the other between them, need this:
    otherwise the exchange joined in between implies the credit (docs/protocol.md).

    Args:
        channel: the lane.
        kind: the operation that follows.
    """
    W = channel.layout.world_size
    channel.launch(_credit_kernel)(
        channel.local[f"{kind.direction}_free"], channel.abort_W, channel.state, channel.status,
        channel.polls,
        LAUNCHED=int(Cell.launched(scatters=kind.scatters)),
        KIND=int(kind), W=W, W_PAD=padded(W),
    )  # fmt: skip
