"""Every kernel compiles for every target; the machine code keeps what the protocol needs.

What it must keep stands in bench/kernels/rules.py; tests/test_bench_kernels.py breaks each rule.
"""

import pytest

from bench.kernels.command import SOURCES
from bench.kernels.measure import in_processes, measure_shape
from bench.kernels.rules import check, check_forms, check_sources
from bench.shapes import Shape

SHAPES = {
    "aligned": Shape("aligned", "rows of 4 KiB", tokens=64, hidden=2048, experts=64, top_k=8, ranks=8),
    "odd": Shape("odd", "no power of two, no alignment", tokens=64, hidden=70, experts=12, top_k=3, ranks=4),
}
CASES = [("aligned", target) for target in ("sm_80", "sm_90", "sm_100", "gfx942")] + [("odd", "sm_90")]
PAD_MULTIPLE = 4


@pytest.fixture(scope="module")
def measured():
    tasks = [(measure_shape, (SHAPES[shape], target, PAD_MULTIPLE)) for shape, target in CASES]
    return {CASES[number]: figures for number, figures in in_processes(tasks)}


@pytest.mark.parametrize(("shape", "target"), CASES)
def test_kernels_compile_and_keep_the_rules(measured, shape, target):
    figures = measured[shape, target]
    assert [str(breach) for breach in (*check(figures), *check_forms(figures))] == []
    assert {kernel.shape for kernel in figures} == {shape}
    assert {kernel.target for kernel in figures} == {target}


def test_rows_that_are_not_aligned_still_reach_peers_16_bytes_wide(measured):
    figures = measured["odd", "sm_90"]
    assert not any(kernel.aligned for kernel in figures)
    to_peers = [kernel for kernel in figures if kernel.name in ("_scatter_kernel", "_gather_kernel")]
    assert len(to_peers) >= 4
    assert {kernel.store_bytes for kernel in to_peers} == {16}
    # The caller's own rows cannot be read so: it is the loads that tell.
    assert min(kernel.load_bytes for kernel in to_peers) < 16


def test_kernels_wait_only_where_all_waits_are():
    assert [str(breach) for breach in check_sources(SOURCES)] == []
