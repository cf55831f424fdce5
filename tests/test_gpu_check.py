"""The check for one GPU: here all of it but the device is run, with what it may need and nothing else."""

import doctest
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu_check import cases, clocks, journal, parts, rates, report, runner, times, workload
from bench.gpu_check.workload import FULL, Workload, shape_for
from bench.limits.load import expected
from bench.limits.traffic import backward, forward
from bench.shapes import SHAPES

ROOT = Path(__file__).parent.parent

# Python imports a module of this name when it starts.
WITHOUT_EXTRAS = """
import sys

ABSENT = ("tyro", "tabulate", "tqdm", "pandas", "matplotlib", "pytest", "hypothesis")

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""

# A combine that is off by a little, a part that hangs, and one that dies.
BROKEN = """
from bench.gpu_check import parts
from bench.gpu_check.parts import Part, Task

def of_device(device):
    world = Task("bench.gpu_check.worlds:run", ("column-fp64",))
    return (
        Part("wrong", (Task("bench.gpu_check.worlds:run", ("no such case",)), world), 60),
        Part("hangs", (Task("time:sleep_for_ever"), Task("sitecustomize:hang")), 15),
        Part("dies", (Task("sitecustomize:die"),), 60, alone=True),
    )

def hang(journal, device):
    import time
    time.sleep(600)

def die(journal, device):
    import os
    os.abort()

def break_finish():
    from symm_a2a import exchange
    finish = exchange.finish
    def broken(channel, kind, out, *rest):
        finish(channel, kind, out, *rest)
        out.mul_(1.001)
    exchange.finish = broken

parts.parts_for = of_device
break_finish()
"""


def start(folder, customize, *arguments):
    (folder / "sitecustomize.py").write_text(customize)
    environ = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}:{folder}"}
    command = ["bash", str(ROOT / "bench" / "gpu_check.sh"), "--device", "cpu", *arguments]
    command += ["--json", str(folder / "new" / "found.json")]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)


def found_in(folder):
    return json.loads((folder / "new" / "found.json").read_text())


@pytest.mark.parametrize("name", ["tqdm", "numpy"])
def test_what_is_made_absent_is(name, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EXTRAS)
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], env=environ, capture_output=True, text=True
    )
    assert ("No module named 'tqdm'" in done.stderr) == (name == "tqdm")


def test_all_parts_run_with_torch_triton_and_numpy_alone(tmp_path):
    done = start(tmp_path, WITHOUT_EXTRAS)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"Wrote {tmp_path / 'new' / 'found.json'}"
    found = found_in(tmp_path)
    assert found["passed"] is True
    assert found["device"] == "cpu"
    assert found["torch"] == torch.__version__
    assert {"date", "gpu", "driver", "triton", "seconds", "environment"} <= found.keys()
    assert {check["outcome"] for check in found["checks"]} == {"PASS"}
    for check in found["checks"]:
        assert f"PASS {check['name']}" in done.stdout
        assert {"part", "name", "seconds", "error", "notes"} <= check.keys()
    names = {"environment", *(part.name for part in parts.parts_for("cpu"))}
    assert {check["part"] for check in found["checks"]} == names
    kernels = [figure for figure in found["figures"] if figure["kind"] == "kernel"]
    assert {figure["shape"] for figure in kernels} == set(parts.TIMED)
    assert [figure["kernel"] for figure in kernels if figure["shape"] == "olmoe"] == list(rates.ORDER)
    for figure in kernels:
        assert figure["interpreted"]
        assert figure["us"] > 0 < figure["bytes"]
        assert (figure["gb_s"], figure["percent"], figure["verdict"]) == (None, None, "")
    assert len([figure for figure in found["figures"] if figure["kind"] == "overhead"]) == 5
    assert "below target" not in done.stdout


def test_what_is_wrong_hangs_or_dies_fails_and_the_rest_still_runs(tmp_path):
    done = start(tmp_path, BROKEN)
    assert done.returncode == 1, done.stdout + done.stderr
    found = found_in(tmp_path)
    assert found["passed"] is False
    outcomes = {check["name"]: (check["outcome"], check["error"]) for check in found["checks"]}
    first = outcomes.pop("column-fp64 step 0, any routing, 12 tokens")
    assert first[0] == "FAIL"
    assert "gradient of x" in first[1]
    # All zeros: nothing to be wrong about.
    assert outcomes.pop("column-fp64 step 1, masked routing, 19 tokens")[0] == "PASS"
    assert "expected a case" in outcomes.pop("worlds no such case")[1]
    assert "no attribute 'sleep_for_ever'" in outcomes.pop("time")[1]
    assert "longer than its limit" in outcomes.pop("hangs as a whole")[1]
    assert "exit code -6" in outcomes.pop("dies as a whole")[1]
    assert list(outcomes) == ["environment: python -m symm_a2a"]
    assert "2 checks passed, 5 failed" in done.stdout
    assert "\nFAIL column-fp64 step 0, any routing, 12 tokens\n" in done.stdout


def test_wrong_arguments_are_named(tmp_path):
    done = start(tmp_path, "", "--only", "elsewhere")
    assert done.returncode == 2
    assert "expected parts of worlds, ranks, times, got elsewhere" in done.stderr


def test_parts_that_find_no_time_fail(tmp_path):
    part = parts.parts_for("cpu")[0]
    entries = runner.Runner("cpu", tmp_path, 0.0).run([part], 1)
    assert [(entry["outcome"], entry["error"]) for entry in entries] == [("FAIL", "no time was left for it")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_are_functions_of_their_modules(device):
    planned = parts.parts_for(device)
    assert len({part.name for part in planned}) == len(planned)
    for task in (task for part in planned for task in part.tasks):
        module, name = task.target.split(":")
        assert callable(getattr(importlib.import_module(module), name))
    for name in parts.CASES:
        assert cases.planned_case(name, device).config().layout(cases.planned_case(name, device).world_size)
    assert sum(part.limit for part in planned if part.alone) + 170 <= parts.ALL_LIMIT


@pytest.mark.parametrize("module", [journal, rates, report])
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_bytes_are_those_of_the_formulas_and_add_up_over_ranks():
    """What a rank sends is written here, and what it receives is another rank's launch."""
    load = replace(expected(SHAPES["dsv3"]), gap_rows=5)
    moved = rates.bytes_of(load)
    assert list(moved) == list(rates.ORDER)
    for traffic in (*forward(load), *backward(load)):
        assert moved[traffic.kernel] > 0
        # Ranks are alike: what all receive is what all send.
        assert moved[traffic.kernel] == pytest.approx(traffic.in_memory)
    assert moved["expand"] - rates.bytes_of(replace(load, gap_rows=0))["expand"] == 5 * 7168 * 2


def test_loads_are_counted():
    cfg = SHAPES["small"].config(num_experts=4, top_k=2, hidden_dim=12, max_tokens_per_rank=3)
    ids = [torch.tensor([[0, 1], [1, 2], [3, 0]]), torch.tensor([[2, -1]])]
    first, second = rates.loads_of(cfg, ids, capacity=8, token_block=4)
    assert (first.kept, first.sent, first.received, first.slots, first.rows, first.gap_rows) == (
        3,
        2,
        0,
        6,
        4,
        4,
    )
    assert (second.kept, second.sent, second.received, second.slots, second.rows) == (1, 0, 2, 1, 3)
    assert (first.padded, first.capacity, first.tokens, second.tokens) == (16, 3, 3, 1)


def test_rates_and_targets_of_numbers_made_by_hand(monkeypatch):
    shape = replace(SHAPES["olmoe"], tokens=2, experts=2, top_k=1, ranks=1)
    work = Workload(shape, FULL, "cpu")
    monkeypatch.setattr(times, "bytes_of", lambda load: {"expand": 3e6, "scatter": 2e6})
    samples = {"scatter": [(0, 2e-3)], "expand": [(0, 1e-3), (0, 2e-3), (0, 1e-3)]}
    scatter, expand = times.figures(work, samples, copy=4.0, variant=FULL)
    assert (expand["us"], expand["gb_s"], expand["percent"]) == pytest.approx((1000.0, 3.0, 75.0))
    assert (expand["target"], expand["verdict"], expand["local"]) == (75.0, "reached", False)
    assert (scatter["gb_s"], scatter["target"], scatter["verdict"]) == (1.0, None, "")
    assert scatter["local"]
    slower = times.figures(work, {"expand": [(0, 1.001e-3)]}, copy=4.0, variant=FULL)[0]
    assert slower["verdict"] == "below target"
    kernels = [{"kind": "kernel", **figure} for figure in (scatter, expand, slower)]
    figures = [{"kind": "copy", "shape": "olmoe", "gb_s": 4.0, "empty_us": 1.5}, *kernels]
    text = report.text_of({"checks": [], "figures": figures, "device": "cuda", "seconds": 1.0})
    assert "a plain copy: 4 GB/s" in text
    assert "no kernel at all: 1.5 us" in text
    assert "kernels below target: 1" in text
    assert any(line.split()[5:] == ["3", "75", "%", "75", "%", "reached"] for line in text.splitlines())


def test_a_wrong_row_or_sum_is_never_timed(monkeypatch):
    work = Workload(shape_for("dsv3", "cpu"), FULL, "cpu")
    work.check()
    forward_of = Workload.forward

    def swapped(self):
        rows, handles, outs = forward_of(self)
        return [torch.cat([each[1:2], each[:1], each[2:]]) for each in rows], handles, outs

    monkeypatch.setattr(Workload, "forward", swapped)
    with pytest.raises(AssertionError, match="rank 0: rows 0 to"):
        work.check()
    monkeypatch.setattr(
        Workload, "forward", lambda self: (*forward_of(self)[:2], [1.02 * o for o in forward_of(self)[2]])
    )
    with pytest.raises(AssertionError, match="rank 0: out: "):
        work.check()


def test_compiling_launches_nothing(tmp_path):
    times.compile_only(journal.Journal(tmp_path / "journal", "compile"), "cpu", "dsv3")
    assert {entry["outcome"] for entry in journal.read(tmp_path / "journal")} == {"PASS"}


def test_shapes_shrink_to_the_memory_there_is(monkeypatch):
    class Properties:
        total_memory = 20 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    dsv3 = shape_for("dsv3", "cuda")
    assert 256 <= dsv3.tokens < 4096
    assert workload.memory_of(dsv3) <= 0.75 * Properties.total_memory < workload.memory_of(SHAPES["dsv3"])
    Properties.total_memory = 2**20
    with pytest.raises(MemoryError, match="MiB"):
        shape_for("dsv3", "cuda")


def test_a_clock_gives_its_times_in_order():
    clock = clocks.clock_for("cpu")
    clock.hold(1.0)
    assert clock.timed(lambda: 5) == 5
    assert clock.timed(lambda: sum(range(100_000))) > 0
    first, second = clock.seconds()
    assert 0 < first < second
    assert clock.seconds() == []


class Event:
    """A CUDA event; the n-th that is recorded comes at n squared milliseconds."""

    recorded = 0

    def __init__(self, *, enable_timing=False):
        assert enable_timing

    def record(self):
        Event.recorded += 1
        self.at = Event.recorded**2

    def elapsed_time(self, later):
        return later.at - self.at


def test_a_gpu_clock_takes_the_time_between_the_events_around_each_launch(monkeypatch):
    slept = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    clock = clocks.clock_for("cuda")
    clock.hold(0.5)
    assert [clock.timed(lambda: "first"), clock.timed(lambda: "second")] == ["first", "second"]
    assert clock.seconds() == pytest.approx([3e-3, 7e-3])
    assert clock.seconds() == []
    assert slept == [1_000_000_000]
