"""What a dispatcher keeps on the device: where its load adds up, and the mark of its placement."""

from __future__ import annotations

import torch

from symm_a2a.layout import ArenaLayout
from symm_a2a.load import Load, load_of
from symm_a2a.placement import Placement


class Ledger:
    """The totals of a dispatcher's exchanges, and what its kernels need to know of its placement.

    Operators get the card, which they do not change, and with it an address: what kernels add there is
    no compiler's business, as little as the lane.

    Args:
        layout: of the arena.
        device: where kernels run.
        placement: of the dispatcher; None where experts are places.
        rank: this rank.

    Attributes:
        totals: int64 `(W * L + W * W,)`: slots for every place, then copies from each rank to each.
        card: int64 `(2,)`: the address of the totals, and the mark of the placement.
        table: the placement's, int32, on the device; None where nothing has to be looked up.
    """

    def __init__(
        self, layout: ArenaLayout, device: torch.device, placement: Placement | None = None, rank: int = 0
    ) -> None:
        self._world_size = layout.world_size
        self._placement = placement
        translates = placement is not None and not placement.is_contiguous
        # Trainers build models under a meta device or in inference mode; neither may reach these.
        with torch.inference_mode(False):
            cells = layout.num_experts + layout.world_size**2
            self.totals = torch.zeros(cells, dtype=torch.int64, device=device)
            mark = placement.mark if placement is not None and translates else 0
            self.card = torch.tensor([self.totals.data_ptr(), mark], dtype=torch.int64, device=device)
            self.table = placement.table(rank).to(device) if placement is not None and translates else None

    def load(self) -> Load:
        """Return the load so far; waits for the device."""
        return load_of(self.totals.tolist(), self._world_size, self._placement)
