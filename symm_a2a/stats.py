"""What the exchanges of a rank have moved, launched and waited for so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from symm_a2a.kernels.channel import Cell, Kind
from symm_a2a.lane import Lane
from symm_a2a.layout import ArenaLayout
from symm_a2a.load import Load
from symm_a2a.wire import copy_metadata_bytes, exchange_metadata_bytes

_OF_ROWS = [kind for kind in Kind if kind.moves_rows]


@dataclass(frozen=True)
class Stats:
    """Counts since a dispatcher's arena was made, of all of its lanes; `W` is the number of ranks.

    What the device counts is counted there, so that replays of a captured graph are included. The
    difference of two is what came between them.

    Attributes:
        launches: kernels that the host has launched.
        host_syncs: times that the host waited for a number of the device's; one for each dispatch with
            `capacity="exact"`.
        blocked_seconds: the host's time waiting for peers, or for such a number. On GPUs the kernels wait
            for the peers, and their time is not in it.
        exchanges: launched, by operation: `dispatch`, `combine`, `dispatch_again`, with `_backward` those of
            the backward, `barrier`, and `counts` for a broadcast of counts.
        copies: rows sent, by operation, to each rank, this one included: `W` numbers.
        rows: that dispatches brought here, before padding and drops.
        payload_bytes_W: row contents stored at each rank, this one included.
        metadata_bytes_W: all else stored there: headers, counts, score gradients, flags (that of a join from
            the launch on), and what pads rows to 16 bytes.
        load: how the slots of all ranks fell on experts and ranks, in the dispatches of this dispatcher
            alone; equal on every rank that has joined as many of them.
        dropped_rows: past a static capacity, and not raised as an error.
        symmetric_bytes: symmetric memory of this rank.
    """

    launches: int
    host_syncs: int
    blocked_seconds: float
    exchanges: dict[str, int]
    copies: dict[str, list[int]]
    rows: int
    payload_bytes_W: list[int]
    metadata_bytes_W: list[int]
    load: Load
    dropped_rows: int
    symmetric_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return numbers, lists and dicts alone, as JSON has them."""
        return asdict(self) | {"load": self.load.as_dict()}

    def __sub__(self, earlier: Stats) -> Stats:
        return Stats(
            **{
                field.name: _minus(getattr(self, field.name), getattr(earlier, field.name))
                for field in fields(self)
                if field.name != "symmetric_bytes"
            },
            symmetric_bytes=self.symmetric_bytes,
        )


def stats_of(lanes: Iterable[Lane], layout: ArenaLayout, load: Load) -> Stats:
    """Add up what the lanes of an arena have done; waits for the device to read its counts.

    Raises:
        ExchangeError: what the device was waited for has failed.
    """
    W = layout.world_size
    launches = syncs = rows = dropped = 0
    blocked = 0.0
    exchanges, copies = dict.fromkeys(Kind, 0), {kind: [0] * W for kind in _OF_ROWS}
    payload_W, metadata_W = [0] * W, [0] * W
    for lane in lanes:
        counts, state = lane.channel.counts, lane.channel.state.tolist()
        lane.raise_reports()
        launches, syncs, blocked = launches + counts.launches, syncs + counts.syncs, blocked + counts.blocked
        rows, dropped = rows + state[Cell.ROWS], dropped + lane.dropped_rows
        for kind in Kind:
            times = state[Cell.EXCHANGES + kind]
            exchanges[kind] += times
            for peer in range(W):
                metadata_W[peer] += times * exchange_metadata_bytes(layout, kind)
        for kind in _OF_ROWS:
            for peer, sent in enumerate(state[Cell.COPIES + kind * W :][:W]):
                copies[kind][peer] += sent
                payload_W[peer] += sent * layout.hidden_dim * layout.dtype.itemsize
                metadata_W[peer] += sent * copy_metadata_bytes(layout, kind)
    return Stats(
        launches=launches, host_syncs=syncs, blocked_seconds=blocked,
        exchanges={kind.name.lower(): times for kind, times in exchanges.items()},
        copies={kind.name.lower(): sent_W for kind, sent_W in copies.items()},
        rows=rows, payload_bytes_W=payload_W, metadata_bytes_W=metadata_W,
        load=load, dropped_rows=dropped, symmetric_bytes=layout.nbytes,
    )  # fmt: skip


def _minus(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, dict):
        return {name: _minus(mine[name], theirs[name]) for name in mine}
    if isinstance(mine, list):
        return [_minus(a, b) for a, b in zip(mine, theirs, strict=True)]
    return mine - theirs
