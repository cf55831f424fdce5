"""The exchange benchmark's figures, on numbers made by hand."""

from dataclasses import replace

import pytest

from bench.a2av.backends import Cost
from bench.a2av.figures import bandwidths, latencies, merge, remote_bytes
from bench.a2av.links import link_peak
from bench.a2av.ranks import RankReport
from tests.test_bench_a2av import CASE


def test_percentiles_are_of_the_slowest_rank():
    # The slowest of each run: 10, 20, ... 110 us, on either rank.
    fast, slow = [1e-6] * 11, [10e-6 * (n + 1) for n in range(11)]
    ranks = [[*slow[:5], *fast[5:]], [*fast[:5], *slow[5:]]]
    values = {m.name: (pytest.approx(m.value), m.unit) for m in latencies(ranks)}
    assert values == {"latency_p20": (30, "us"), "latency_p50": (60, "us"), "latency_p80": (90, "us")}


def cost(payload, metadata=(0, 0, 0)):
    return Cost(1, 0, [0] * len(payload), list(payload), list(metadata), 0)


def test_bandwidth_counts_what_crosses_a_link():
    costs = [cost([500, 10, 20], [7, 1, 2]), cost([30, 600, 0], [1, 7, 0]), cost([40, 0, 700], [2, 0, 7])]
    assert [remote_bytes(one, rank) for rank, one in enumerate(costs)] == [
        [0, 11, 22],
        [31, 0, 0],
        [42, 0, 0],
    ]
    values = {m.name: m.value for m in bandwidths(costs, seconds=1e-9, peak=146e9)}
    # Rank 0 receives most across links, 31 + 42, and rank 2 sends most of all, 40 + 700, itself included.
    assert values == pytest.approx(
        {"logical_bandwidth": 740, "remote_bandwidth": 73, "link_share": 0.5, "link_peak": 146}
    )
    assert [m.name for m in bandwidths(costs, 1.0, None)] == ["logical_bandwidth", "remote_bandwidth"]
    assert bandwidths([cost([0, 0, 0], [9, 9, 9])], 1.0, 1.0) == []


def test_merge_takes_the_rank_with_most():
    costs = [
        Cost(3, 2, [1, 2], [10, 20], [1, 1], 64),
        Cost(4, 1, [3, 4], [30, 40], [2, 2], 64),
    ]
    reports = [
        [RankReport(CASE, "symm", False, [], [seconds] * 3, one)]
        for seconds, one in zip((1e-6, 2e-6), costs, strict=True)
    ]
    (result,) = merge(reports, None)
    values = {metric.name: metric.value for metric in result.metrics}
    assert values == pytest.approx(
        {
            "latency_p20": 2, "latency_p50": 2, "latency_p80": 2, "launches": 4, "host_syncs": 2,
            "payload_bytes": 70, "metadata_bytes": 4, "remote_bytes": 32, "symmetric_bytes": 64,
            "copies[0,0]": 1, "copies[0,1]": 2, "copies[1,0]": 3, "copies[1,1]": 4,
            "logical_bandwidth": 70 / 2e-6 / 1e9, "remote_bandwidth": 32 / 2e-6 / 1e9,
        }
    )  # fmt: skip
    reports[1][0] = replace(reports[1][0], faults=["rank 1: bad"], seconds=[], cost=None)
    (wrong,) = merge(reports, None)
    assert [(m.name, m.value, m.note) for m in wrong.metrics] == [("error", None, "rank 1: bad")]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 450e9),
        ("NVIDIA H100 80GB HBM3", 450e9),
        ("NVIDIA GB200", 900e9),
        ("NVIDIA A100-SXM4-80GB", 300e9),
        ("AMD Instinct MI300X", 448e9),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA H20", None),
        ("CPU, 2 cores", None),
    ],
)
def test_link_peaks(name, peak):
    assert link_peak(name) == peak
