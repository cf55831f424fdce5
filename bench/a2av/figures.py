"""What the ranks' reports amount to: the figures of a case.

Times are those of the slowest rank: of each run the longest of all ranks' times, of these the percentiles.
Bandwidths are of the median time, and of the busiest rank in its busier direction, sending or receiving:
that is the link that the others wait for, and no more than its peak can cross it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.a2av.backends import Cost
from bench.a2av.cases import Case
from bench.a2av.options import BackendName
from bench.a2av.ranks import RankReport

PERCENTILES = (20, 50, 80)


@dataclass(frozen=True)
class Metric:
    """One figure.

    Attributes:
        name: of the figure; "copies[i,j]" for the rows that rank i sent to rank j.
        value: None for an error.
        unit: of the value.
        note: what is wrong, for an error.
    """

    name: str
    value: float | None
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Result:
    """A case with a backend, all ranks together.

    Attributes:
        case: the case.
        backend: the backend's name.
        graph: whether a captured graph was timed.
        metrics: the figures; of a case whose results were wrong, one "error".
    """

    case: Case
    backend: BackendName
    graph: bool
    metrics: list[Metric]

    @property
    def error(self) -> str | None:
        """What is wrong, or None."""
        return next((metric.note for metric in self.metrics if metric.name == "error"), None)

    def value(self, name: str) -> float | None:
        """Return a figure; None if there is none of that name."""
        return next((metric.value for metric in self.metrics if metric.name == name), None)


def merge(reports: list[list[RankReport]], peak: float | None) -> list[Result]:
    """Return the result of each case and backend.

    Args:
        reports: of each rank, in rank order.
        peak: bytes per second of a rank's link in one direction, if known.
    """
    return [_merge(list(ranks), peak) for ranks in zip(*reports, strict=True)]


def _merge(ranks: list[RankReport], peak: float | None) -> Result:
    first = ranks[0]
    faults = list(dict.fromkeys(fault for rank in ranks for fault in rank.faults))
    if faults:
        metrics = [Metric("error", None, "", "; ".join(faults))]
    else:
        costs = [rank.cost for rank in ranks if rank.cost is not None]
        metrics = [*latencies([rank.seconds for rank in ranks]), *_counts(costs)]
        seconds = metrics[PERCENTILES.index(50)].value
        assert seconds is not None
        metrics += bandwidths(costs, seconds * 1e-6, peak)
        metrics += loads([rank.expert_rows for rank in ranks if rank.expert_rows is not None])
    return Result(first.case, first.backend, first.graph, metrics)


def latencies(seconds: list[list[float]]) -> list[Metric]:
    """Return the percentiles of the slowest rank's times, in microseconds.

    Args:
        seconds: of each rank, of each run.

    Example:
        >>> [(m.name, round(m.value)) for m in latencies([[1e-6, 9e-6, 1e-6], [5e-6, 1e-6, 7e-6]])]
        [('latency_p20', 6), ('latency_p50', 7), ('latency_p80', 8)]
    """
    slowest = np.max(np.array(seconds), axis=0) * 1e6
    return [Metric(f"latency_p{p}", float(np.percentile(slowest, p)), "us") for p in PERCENTILES]


def _counts(costs: list[Cost]) -> list[Metric]:
    """Return what is no rate: of the rank with most of it, but for the matrix of rows."""
    remote = [remote_bytes(cost, rank) for rank, cost in enumerate(costs)]
    return [
        Metric("launches", max(cost.launches for cost in costs), ""),
        Metric("host_syncs", max(cost.host_syncs for cost in costs), ""),
        Metric("payload_bytes", max(sum(cost.payload_bytes_W) for cost in costs), "B"),
        Metric("metadata_bytes", max(sum(cost.metadata_bytes_W) for cost in costs), "B"),
        Metric("remote_bytes", max(map(sum, remote)), "B"),
        Metric("symmetric_bytes", max(cost.symmetric_bytes for cost in costs), "B"),
        *(
            Metric(f"copies[{sender},{receiver}]", rows, "rows")
            for sender, cost in enumerate(costs)
            if any(map(sum, (each.rows_W for each in costs)))
            for receiver, rows in enumerate(cost.rows_W)
        ),
    ]


def remote_bytes(cost: Cost, rank: int) -> list[int]:
    """Return the bytes that crossed a link to each rank: not those that a rank sent to itself."""
    pairs = zip(cost.payload_bytes_W, cost.metadata_bytes_W, strict=True)
    return [0 if peer == rank else sum(pair) for peer, pair in enumerate(pairs)]


def bandwidths(costs: list[Cost], seconds: float, peak: float | None) -> list[Metric]:
    """Return rates of the busiest rank: of all its rows, and of all that crossed a link; in GB/s.

    Args:
        costs: of each rank.
        seconds: of the operation.
        peak: bytes per second of the link, if known.
    """
    if not any(sum(cost.payload_bytes_W) for cost in costs):
        return []
    logical = busiest([cost.payload_bytes_W for cost in costs]) / seconds
    remote = busiest([remote_bytes(cost, rank) for rank, cost in enumerate(costs)]) / seconds
    metrics = [
        Metric("logical_bandwidth", logical / 1e9, "GB/s"),
        Metric("remote_bandwidth", remote / 1e9, "GB/s"),
    ]
    if peak is not None:
        metrics += [Metric("link_share", remote / peak, ""), Metric("link_peak", peak / 1e9, "GB/s")]
    return metrics


def loads(rows_W: list[int]) -> list[Metric]:
    """Return the rows of each rank's experts, and those of the busiest over the mean: all wait for it.

    Example:
        >>> [(metric.name, metric.value) for metric in loads([3, 1])]
        [('expert_rows[0]', 3), ('expert_rows[1]', 1), ('rows_max_over_mean', 1.5)]
    """
    if not sum(rows_W):
        return []
    most = max(rows_W) * len(rows_W) / sum(rows_W)
    each = [Metric(f"expert_rows[{rank}]", rows, "rows") for rank, rows in enumerate(rows_W)]
    return [*each, Metric("rows_max_over_mean", most, "")]


def busiest(bytes_WW: list[list[int]]) -> int:
    """Return the most bytes that any rank sends, or receives.

    Example:
        >>> busiest([[1, 2], [4, 0]])
        5
    """
    matrix = np.array(bytes_WW, dtype=np.int64)
    return int(max(matrix.sum(0).max(), matrix.sum(1).max()))
