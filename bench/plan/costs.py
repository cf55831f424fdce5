"""How long each operation takes on each rank: what a replay needs to know, computed or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bench.plan.operations import Stage
from symm_a2a.kernels.channel import Kind

Position = tuple[bool, Stage, int]
"""Whether in a forward, the stage, the layer."""


@dataclass(frozen=True)
class ExchangeCost:
    """One kind of exchange, of one micro-batch. Arrays have an element for each rank.

    Attributes:
        launch_W: seconds that the caller's stream is busy with the launch; none where it runs beside it.
        send_W: seconds that a rank's launch keeps its way out busy: link or memory, whichever is slower.
        receive_W: seconds that what is sent to a rank keeps its way in busy.
        join_W: seconds in which a rank takes what has arrived, on the caller's stream.
        nbytes_W: that leave a rank.
        counted_W: seconds from the launch's begin until the counts have left; the host waits for them
            where a dispatch has an exact capacity.
        launch_host: seconds of the host for the launch.
        join_host: seconds of the host for the join.
    """

    launch_W: np.ndarray
    send_W: np.ndarray
    receive_W: np.ndarray
    join_W: np.ndarray
    nbytes_W: np.ndarray
    counted_W: np.ndarray | None = None
    launch_host: float = 0.0
    join_host: float = 0.0


@dataclass(frozen=True)
class Costs:
    """One micro-batch.

    Attributes:
        compute: seconds of each stage of each layer, `(W,)`.
        exchanges: by kind.
        host: seconds of the host for each stage of each layer; what is not in it takes none.
    """

    compute: Mapping[Position, np.ndarray]
    exchanges: Mapping[Kind, ExchangeCost]
    host: Mapping[Position, float] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """W."""
        return len(self.exchanges[Kind.DISPATCH].send_W)


@dataclass(frozen=True)
class Machine:
    """What all exchanges share.

    Attributes:
        latency: seconds from a message's last byte leaving until its reader may go on.
        contention: the share of its speed that compute loses while a launch of its rank sends.
    """

    latency: float = 0.0
    contention: float = 0.0
