"""Debug mode: sections are looked at before they are read, and poisoned before they are freed.

With `SYMM_A2A_DEBUG=1` a join does not free its sections itself. Before its kernels run, this checks that
every peer has sent what its flags and counts say, all of it, and nothing beside; behind them it fills the
sections with poison, and frees them then. Whoever reads a section too late, or too early, reads NaN, or
is found out. The host waits for the device at every join.
"""

from __future__ import annotations

import torch

from symm_a2a.errors import EnvironmentUnsupportedError, ProtocolError
from symm_a2a.kernels.channel import (
    DETAIL_MASK,
    EPOCH_SHIFT,
    KIND_SHIFT,
    Cell,
    Channel,
    Kind,
)
from symm_a2a.kernels.free import free

POISON = 0xFF
"""Every byte of a section that holds nothing: NaN in each floating point format, -1 as an integer."""

_SECTIONS = {"scatter": ("counts", "headers", "scatter_rows"), "gather": ("gather_rows", "gather_scores")}


def require_no_capture(device: torch.device) -> None:
    """Raise where a graph is captured, which cannot look at anything."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise EnvironmentUnsupportedError(
            "expected no capture in debug mode, where the host waits at every join, got one; unset "
            "SYMM_A2A_DEBUG to capture a graph"
        )


class Inspector:
    """Looks at what a lane's peers have written here.

    Args:
        index: the lane's place in the arena.
        channel: the lane's device side.
    """

    def __init__(self, index: int, channel: Channel) -> None:
        self._index = index
        self._channel = channel
        self._poisoned = {"scatter": False, "gather": False}

    def inspect(self, kind: Kind, tally: torch.Tensor | None) -> None:
        """Look at what has arrived for an exchange, before it is read; waits for the device.

        Args:
            kind: what is joined.
            tally: of the dispatch that it follows, if it follows one.

        Raises:
            ProtocolError: the first thing that is not as the protocol has it.
            EnvironmentUnsupportedError: a graph is captured.
        """
        require_no_capture(self._channel.state.device)
        if not kind.moves_rows:
            return
        epoch = int(self._channel.state[Cell.joined(scatters=kind.scatters)]) + 1
        words_W = self._local(f"{kind.direction}_ready")
        if not (words_W >> KIND_SHIFT == (epoch << (EPOCH_SHIFT - KIND_SHIFT) | kind)).all():
            return  # The kernel says what came instead.
        W = self._channel.layout.world_size
        if tally is None:
            came_W = words_W & DETAIL_MASK
        else:
            came_W = tally.cpu()[W : 2 * W] if kind.scatters else tally.cpu()[:W]
        self._look_at_flags(kind, epoch)
        self._look_at_rows(kind, epoch, came_W)
        if kind == Kind.DISPATCH:
            self._look_at_headers(epoch, came_W)

    def poison(self, kind: Kind) -> None:
        """Make unreadable what a join has read, and free it."""
        if not kind.moves_rows:
            return
        for name in _SECTIONS[kind.direction]:
            self._channel.local[name].view(torch.uint8).fill_(POISON)
        self._poisoned[kind.direction] = True
        free(self._channel, kind)

    def _local(self, name: str) -> torch.Tensor:
        return self._channel.local[name].cpu()

    def _require(self, fine: torch.Tensor, kind: Kind, epoch: int, what: str) -> None:
        """Raise with the first place, a peer's number and what follows, where something is not fine."""
        if fine.all():
            return
        peer, *rest = (~fine).nonzero()[0].tolist()
        where = "".join(f", {name} {value}" for name, value in zip(("copy", "slot"), rest, strict=False))
        raise ProtocolError(
            f"rank {self._channel.rank} found in {kind.title}, lane {self._index}, epoch {epoch}: {what} "
            f"(peer {peer}{where})"
        )

    def _look_at_flags(self, kind: Kind, epoch: int) -> None:
        freed_W = self._local(f"{kind.direction}_free") >> EPOCH_SHIFT
        what = f"a free flag that is neither of this epoch nor of the one before, {freed_W.tolist()}"
        self._require((freed_W == epoch) | (freed_W == epoch - 1), kind, epoch, what)
        if kind.scatters:
            counted_W = self._local("counts_ready") >> EPOCH_SHIFT
            self._require(counted_W == epoch, kind, epoch, f"counts of another epoch, {counted_W.tolist()}")

    def _look_at_rows(self, kind: Kind, epoch: int, came_W: torch.Tensor) -> None:
        came_WC = self._places() < came_W[:, None]
        self._look_at(kind, epoch, f"{kind.direction}_rows", came_WC)
        if kind == Kind.DISPATCH_BACKWARD:
            self._look_at(kind, epoch, "gather_scores", came_WC)

    def _look_at(self, kind: Kind, epoch: int, name: str, came_WC: torch.Tensor) -> None:
        """Raise unless all that came was written, and nothing else."""
        what, empty_WC = name.replace("_", " "), self._is_poison(name)
        if self._poisoned[kind.direction]:
            self._require(empty_WC | came_WC, kind, epoch, f"{what} beyond the copies that were announced")
            self._require(~(empty_WC & came_WC), kind, epoch, f"{what} announced and not written")

    def _look_at_headers(self, epoch: int, came_W: torch.Tensor) -> None:
        layout, rank, kind = self._channel.layout, self._channel.rank, Kind.DISPATCH
        L, E = layout.num_local_experts, layout.num_experts
        counts = self._local("counts")
        announced_W = counts[:, E + rank]
        what = f"copies that are not as many as the counts say, {came_W.tolist()}"
        self._require(announced_W == came_W, kind, epoch, what)
        came_WC = self._places() < came_W[:, None]
        self._look_at(kind, epoch, "headers", came_WC)
        slots_WCK = self._local("headers")[..., 0].long()
        here_WCK = (slots_WCK >= 0) & came_WC[..., None]
        self._require(here_WCK.any(-1) | ~came_WC, kind, epoch, "a copy none of whose slots is for this rank")
        expert_WCK, position_WCK = slots_WCK % L, slots_WCK // L
        mine_WL = counts[:, rank * L : (rank + 1) * L].long()
        most_WCK = mine_WL.gather(1, expert_WCK.flatten(1)).view_as(expert_WCK)
        inside_WCK = (position_WCK < most_WCK) | ~here_WCK
        self._require(inside_WCK, kind, epoch, "a position that its expert's count does not reach")
        for peer in range(layout.world_size):
            slots = slots_WCK[peer][here_WCK[peer]]
            found_L = torch.bincount(slots % L, minlength=L)
            as_counted = torch.equal(found_L, mine_WL[peer]) and len(slots.unique()) == len(slots)
            fine_W = torch.arange(layout.world_size) != peer
            what = f"slots {found_L.tolist()} for the experts here, not each of {mine_WL[peer].tolist()} once"
            self._require(fine_W | as_counted, kind, epoch, what)

    def _places(self) -> torch.Tensor:
        return torch.arange(self._channel.layout.max_tokens)

    def _is_poison(self, name: str) -> torch.Tensor:
        """Return bool `(W, C)`: which copies of a region nobody has written."""
        region = self._local(name)
        return (region.flatten(2).view(torch.uint8) == POISON).all(-1)
