"""Timelines in the format of Chrome's trace viewer, which Perfetto opens too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from symm_a2a.timeline.exchanges import Exchange, Interval, Timeline


def save_trace(path: str | Path, timelines: Sequence[Timeline]) -> None:
    """Write timelines as JSON: a process for each, in it two threads for each lane.

    In a lane's first thread stand compute, launches and joins, in its second what was in flight, with
    bytes and epochs. https://ui.perfetto.dev opens the file, and so does chrome://tracing.

    Args:
        path: of the file.
        timelines: one for each rank, by one clock.
    """
    start = min((timeline.span.begin for timeline in timelines), default=0.0)
    events = [event for timeline in timelines for event in _events(timeline, start)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(timeline: Timeline, start: float) -> Iterator[dict[str, Any]]:
    rank = timeline.rank
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for lane in timeline.lanes():
        for thread, title in ((2 * lane, f"lane {lane}"), (2 * lane + 1, f"lane {lane}, in flight")):
            of_thread = {"ph": "M", "pid": rank, "tid": thread}
            yield of_thread | {"name": "thread_name", "args": {"name": title}}
            yield of_thread | {"name": "thread_sort_index", "args": {"sort_index": thread}}

    def span(name: str, interval: Interval, thread: int, **details: Any) -> dict[str, Any]:
        return {
            "ph": "X", "name": name, "pid": rank, "tid": thread, "args": details,
            "ts": round((interval.begin - start) * 1e6, 3), "dur": round(interval.seconds * 1e6, 3),
        }  # fmt: skip

    for stretch in timeline.compute():
        yield span("compute", Interval(stretch.begin, stretch.end), 2 * stretch.lane)
    for exchange in timeline.exchanges:
        title, thread, details = exchange.kind.title, 2 * exchange.lane, _details(exchange)
        yield span(f"launch {title}", exchange.launch, thread, **details)
        yield span(title, exchange.flight, thread + 1, **details)
        yield span(f"join {title}", exchange.join, thread, **details)
        if exchange.beside and exchange.wait.seconds > 0:
            yield span("wait", exchange.wait, thread, **details)


def _details(exchange: Exchange) -> dict[str, Any]:
    return {"epoch": exchange.epoch, "bytes": exchange.nbytes}
