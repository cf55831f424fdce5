"""Debug mode of sequence exchanges: what has arrived is looked at before it is read, and poisoned behind.

As `symm_a2a.inspection` does it for dispatch and combine, with `SYMM_A2A_DEBUG=1`. No word frees a turn's
memory: a peer writes it again in the exchange after the next, which it launches only once this rank has
launched the next one, behind its join and the poison.
"""

from __future__ import annotations

import torch

from symm_a2a.errors import ProtocolError
from symm_a2a.inspection import POISON, require_no_capture
from symm_a2a.kernels.channel import EPOCH_SHIFT, KIND_SHIFT
from symm_a2a.kernels.ulysses import Cell, Kind, SequenceChannel, Sizes


class Inspector:
    """Looks at what the peers have written here.

    Args:
        channel: this rank's.
    """

    def __init__(self, channel: SequenceChannel) -> None:
        self._channel = channel
        # Not filled here: peers may write already.
        self._poisoned = [False, False]

    def inspect(self, kind: Kind, sizes: Sizes) -> None:
        """Look at what has arrived for an exchange, before it is read; waits for the device.

        Raises:
            ProtocolError: a row that did not come, or more than there should be; names the peer.
            EnvironmentUnsupportedError: a graph is captured.
        """
        require_no_capture(self._channel.state.device)
        epoch = int(self._channel.state[Cell.EPOCH])
        turn, card = epoch & 1, torch.tensor(sizes.card(kind))
        words_W, cards_W = self._channel.ready[turn].cpu(), self._channel.cards[turn].cpu()
        came_W = words_W >> KIND_SHIFT == (epoch << (EPOCH_SHIFT - KIND_SHIFT) | kind)
        if not came_W.all() or not (cards_W == card).all():
            return  # The kernel says what came instead.
        if kind == Kind.GROWTH or not self._poisoned[turn]:
            return
        W, payload = self._channel.layout.world_size, self._channel.payload[turn].cpu()
        nbytes = sizes.nbytes(W)
        where = f"rank {self._channel.rank} found in {kind.title}, exchange number {epoch}:"
        if (payload[nbytes:] != POISON).any():
            raise ProtocolError(f"{where} bytes beyond the {nbytes} that were to come")
        rows = payload[:nbytes].view(W * sizes.rows, -1) if nbytes else payload[:0].view(0, 1)
        lost = (rows == POISON).all(1).nonzero().flatten()
        if len(lost):
            row = int(lost[0])
            peer = row // sizes.tokens % W if kind == Kind.SEQ_TO_HEAD else row % W
            raise ProtocolError(f"{where} rows that were not written (peer {peer}, row {row})")

    def poison(self) -> None:
        """Make unreadable what a join has read."""
        turn = int(self._channel.state[Cell.EPOCH]) & 1
        self._channel.payload[turn].fill_(POISON)
        self._poisoned[turn] = True
