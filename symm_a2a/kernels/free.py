"""Free the sections of a join that has not done it itself; in debug mode, once they are poisoned."""

import triton
import triton.language as tl

from symm_a2a.kernels.blocks import padded
from symm_a2a.kernels.channel import Cell, Channel, Kind
from symm_a2a.kernels.flags import flag_words, healthy, publish


@triton.jit(do_not_specialize=["rank"])
def _free_kernel(
    peers_ptr, state_ptr, rank,
    JOINED: tl.constexpr, FREE: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """Let every peer overwrite its section, in one program."""
    if healthy(state_ptr):
        epoch = tl.load(state_ptr + JOINED)
        publish(peers_ptr, FREE, rank, flag_words(epoch, 0, 0, W_PAD), W, W_PAD)


def free(channel: Channel, kind: Kind) -> None:
    """Free the sections that the last join of a kind has read.

    Args:
        channel: a lane whose joins hold their sections, `Channel.holds`.
        kind: what was joined.

    Example:
        >>> import symm_a2a, torch
        >>> sizes = dict(num_experts=2, top_k=2, hidden_dim=2, max_tokens_per_rank=2)
        >>> world = symm_a2a.VirtualWorld(symm_a2a.EPConfig(**sizes, dtype=torch.float32), 2, "cpu")
        >>> channels = [d.arena.lanes[0].channel for d in world.dispatchers]
        >>> channels[1].state[Cell.SCATTER_JOINED] = 3
        >>> free(channels[1], Kind.DISPATCH)
        >>> [int(word) >> 26 for word in channels[0].local["scatter_free"]]
        [0, 3]
    """
    layout = channel.layout
    channel.launch(_free_kernel)(
        channel.peers_W, channel.state, channel.rank,
        JOINED=int(Cell.joined(scatters=kind.scatters)), FREE=channel.offset(f"{kind.direction}_free"),
        W=layout.world_size, W_PAD=padded(layout.world_size),
    )  # fmt: skip
