"""The check and the report that come with the package: right where all is well, and loud where not."""

import json
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch

from symm_a2a import SymmTokenDispatcher, check, environment, reference
from symm_a2a.__main__ import main
from symm_a2a.check.compare import mismatch
from symm_a2a.check.inputs import draw_inputs, lay_out
from symm_a2a.check.journal import Journal
from symm_a2a.testing import RankError, RankFailure

RANKS = 2


def a_case_that_shows_it(rank):
    """Return the seed of a case with few steps, one of which shows what goes wrong on a rank."""
    for seed in range(10_000):
        case = check.draw_case(seed, RANKS)
        shown = [
            step.routing == "distinct" and step.tokens[rank] > 3 and not step.special
            for one in case.rounds
            for step in one.steps
            if one.form == "sync" and one.backward != "none" and case.layers[step.layer][0] == "exact"
        ]
        if any(shown) and len(case.steps) == 1:
            return seed
    raise AssertionError("no such case")


def run_main(capsys, *arguments):
    code = main(arguments)
    return code, capsys.readouterr().out


def run_check(capsys, *arguments):
    code, out = run_main(capsys, "check", "--ranks", str(RANKS), "--json", *arguments)
    return code, json.loads(out)


def test_cases_are_right_and_counted(capsys):
    code, found = run_check(capsys, "--seconds", "5", "--seed", "11")
    assert code == 0
    assert found["cases"] > 0
    assert found["steps"] >= found["cases"]
    assert found["mismatches"] == 0
    assert found["details"] == found["failures"] == []
    assert found["passed"]
    assert not found["interrupted"]
    assert (found["seed"], found["ranks"]) == (11, RANKS)


def swapped_rows(rank, group, *arguments):
    combine = SymmTokenDispatcher.combine

    def faulty(self, *given):
        out = combine(self, *given)
        return out[[1, 0, *range(2, len(out))]] if rank == 1 and len(out) > 1 else out

    with mock.patch.object(SymmTokenDispatcher, "combine", faulty):
        check.run_cases(rank, group, *arguments)


def dropped_score(rank, group, *arguments):
    dispatch = SymmTokenDispatcher.dispatch

    def faulty(self, x, scores, *given, **lane):
        kept = torch.ones_like(scores)
        kept[2:3, :1] = 0
        return dispatch(self, x, scores * kept if rank == 1 else scores, *given, **lane)

    with mock.patch.object(SymmTokenDispatcher, "dispatch", faulty):
        check.run_cases(rank, group, *arguments)


def rows_written_late(rank, group, *arguments):
    """What an implementation does that gives out its receive buffer."""
    dispatch, combine = SymmTokenDispatcher.dispatch, SymmTokenDispatcher.combine
    rows = []

    def overwrite(grad):
        # Beneath autograd's version counters, as a peer writes.
        rows[-1].data.fill_(1.0)

    def keeping(self, *given, **lane):
        result = dispatch(self, *given, **lane)
        rows.append(result[0])
        return result

    def overwriting(self, *given):
        out = combine(self, *given)
        if out.requires_grad:
            out.register_hook(overwrite)
        return out

    with (
        mock.patch.object(SymmTokenDispatcher, "dispatch", keeping),
        mock.patch.object(SymmTokenDispatcher, "combine", overwriting),
    ):
        check.run_cases(rank, group, *arguments)


def raising(rank, group, *arguments):
    def faulty(self, *given):
        raise ValueError("expected nothing, got a fault")

    with mock.patch.object(
        SymmTokenDispatcher, "combine", faulty if rank == 1 else SymmTokenDispatcher.combine
    ):
        check.run_cases(rank, group, *arguments)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (swapped_rows, {"out"}),
        (dropped_score, {"out", "gradient of x"}),
        (rows_written_late, {"rows", "gradient of weight"}),
        (raising, {"case failed"}),
    ],
)
def test_a_fault_is_found_and_described(capsys, monkeypatch, fault, what):
    seed = a_case_that_shows_it(rank=1)
    monkeypatch.setattr("symm_a2a.check.run.run_cases", fault)
    code, found = run_check(capsys, "--seconds", "0", "--seed", str(seed))
    assert code == 1
    assert not found["passed"]
    assert (found["cases"], found["mismatches"]) == (1, 1)
    assert what <= {detail["what"] for detail in found["details"]}
    assert {detail["seed"] for detail in found["details"]} == {seed}
    assert bool(found["failures"]) == (fault is raising)


def test_a_failure_is_told_to_a_reader_with_the_command_that_repeats_it(capsys, monkeypatch):
    monkeypatch.setattr("symm_a2a.check.run.run_cases", raising)
    seed = a_case_that_shows_it(rank=1)
    code, out = run_main(capsys, "check", "--ranks", "2", "--seconds", "0", "--seed", str(seed))
    assert code == 1
    assert f"seed {seed}, rank 1: case failed: got ValueError: expected nothing, got a fault" in out
    assert f"check --ranks 2 --seed {seed} --seconds 0" in out
    assert "mismatches  1" in out


def test_the_journal_is_read_as_it_is_written_and_blames_the_case_of_the_rank_that_failed(tmp_path):
    result = check.Result(2, "host", "", "interpreted", seed=7)
    journal = Journal(str(tmp_path), result)

    def write(rank, text):
        with open(tmp_path / f"{rank}.jsonl", "a") as file:
            file.write(text)
        journal.read()
        return result.cases, result.steps, result.mismatches

    begin, end = '{"seed": 7}\n', '{"steps": 3, "found": [{"what": "rows"}]}\n'
    assert write(0, begin) == write(1, begin) == write(0, end[:9]) == (0, 0, 0)
    assert write(0, end[9:] + '{"seed": 8}\n') == (1, 3, 1)
    journal.blame(RankError(2, (RankFailure(1, "died"), RankFailure(0, "Traceback"))))
    assert (result.cases, result.mismatches, result.passed) == (2, 1, False)
    assert result.details == [
        {"seed": 7, "what": "rows"},
        {"seed": 7, "rank": 1, "what": "case failed", "got": "died"},
    ]


def test_an_interrupt_ends_it_with_what_there_is(tmp_path):
    command = [sys.executable, "-m", "symm_a2a", "check", "--ranks", "2", "--seconds", "100", "--json"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as process:
        end = time.monotonic() + 60
        while not list(tmp_path.glob("symm_a2a-check-*/0.jsonl")) and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert json.loads(out)["interrupted"]
    assert b"Traceback" not in err
    assert list(tmp_path.glob("symm_a2a-check-*")) == []


@pytest.mark.parametrize("ranks", ["0", "-1", "two"])
def test_ranks_that_cannot_be(capsys, ranks):
    with pytest.raises(SystemExit) as raised:
        main(["check", "--ranks", ranks])
    assert raised.value.code == 2
    assert "--ranks" in capsys.readouterr().err


def test_a_seed_gives_the_same_case_and_the_same_tensors():
    for seed in range(20):
        case = check.draw_case(seed, 4)
        assert case == check.draw_case(seed, 4)
        for step in case.steps:
            for first, second in zip(draw_inputs(case, step), draw_inputs(case, step), strict=True):
                for name, tensor in vars(first).items():
                    assert mismatch(name, tensor, getattr(second, name), tensor.dtype) == []


def test_cases_reach_what_they_are_for():
    seen = set()
    for seed in range(200):
        case = check.draw_case(seed, 3)
        for one in case.rounds:
            assert one.form != "pipelined" or len({step.lane for step in one.steps}) == len(one.steps)
            seen |= {one.form, one.backward, case.sizes["dtype"], f"{len(case.layers)} dispatchers"}
        for layer in range(len(case.layers)):
            assert case.config(layer).layout(3).nbytes > 0
        for step in case.steps:
            ids = [tensors.ids for tensors in draw_inputs(case, step)]
            capacity, pad = case.layers[step.layer]
            routed = reference.route(ids, case.sizes["num_experts"], pad, capacity)
            seen |= {step.routing, *step.strides, f"tokens {min(1, sum(step.tokens))}"}
            seen |= {"overflow"} if any(rank.num_dropped for rank in routed) else set()
            seen |= {"masked slots"} if any((i == -1).any() for i in ids) else set()
            assert all(i.numel() == 0 or i.max() < case.sizes["num_experts"] for i in ids)
    assert seen >= {
        *("sync", "async", "pipelined", "checkpoint", "checkpoint async"),
        *("each", "first first", "last first", "together", "none"),
        *("bfloat16", "float16", "float32", "float64", "1 dispatchers", "2 dispatchers"),
        *("any", "distinct", "skewed", "one expert", "one rank", "local", "masked", "masked slots"),
        *("plain", "transposed", "sliced", "shifted", "expanded", "overflow", "tokens 0", "tokens 1"),
    }


@pytest.mark.parametrize("strides", ["plain", "transposed", "sliced", "shifted"])
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (1, 1)])
def test_layouts_keep_the_values(strides, shape):
    values = torch.randn(shape)
    assert torch.equal(lay_out(values, strides), values)


def test_bits_are_compared():
    nan, zeros = torch.tensor([float("nan"), 0.0]), torch.tensor([0.0, 0.0])
    assert mismatch("x", nan, nan.clone(), torch.float32) == []
    assert mismatch("x", zeros, -zeros, torch.float32)[0]["wrong"] == 2
    assert mismatch("x", nan, zeros, torch.float32) == [
        {"what": "x", "index": (0,), "expected": "0.0", "got": "nan", "wrong": 1, "of": 2}
    ]
    assert mismatch("x", zeros, zeros.double(), torch.float64)[0]["got"] == "(2,) torch.float32"
    assert mismatch("x", zeros, zeros[:1], torch.float32)[0]["expected"] == "(1,) torch.float32"


def test_sums_are_compared_with_a_bound_and_infinities_without():
    exact = torch.tensor([1.0, float("inf"), float("nan"), 0.0], dtype=torch.float64)
    bound = torch.tensor([0.1, float("inf"), float("nan"), 0.0], dtype=torch.float64)

    def wrong(*values):
        found = mismatch("x", torch.tensor(values), exact, torch.float32, bound)
        return found[0]["wrong"] if found else 0

    assert wrong(1.05, float("inf"), float("nan"), -0.0) == 0
    assert wrong(1.2, float("inf"), float("nan"), 0.0) == 1
    assert wrong(float("nan"), float("-inf"), 0.0, 1e-30) == 4
    assert mismatch("x", exact, exact, torch.float32, bound)[0]["got"] == "(4,) torch.float64"


def test_the_report_names_the_backend(capsys):
    code, out = run_main(capsys)
    found = environment.collect()
    assert code == 0
    assert f"{found.backend}: {found.backend_reason}" in out
    assert f"{found.kernels}: {found.kernels_reason}" in out
    assert torch.__version__ in out
    assert max(len(line) for line in out.splitlines()) < 120


def test_the_report_as_json(capsys):
    code, out = run_main(capsys, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["backend"] in ("cuda", "host", "virtual")
    assert found["group_size"] >= 1


def test_the_report_does_without_what_it_cannot_have(monkeypatch, capsys):
    def broken(*arguments):
        raise RuntimeError("a broken driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", broken)
    monkeypatch.setattr(os, "statvfs", broken)
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", None)
    found = environment.collect()
    assert found.gpus == []
    assert found.shm_free_bytes is None
    assert not found.symmetric_memory.importable
    assert [problem for problem in found.problems if "a broken driver" in problem]
    code, out = run_main(capsys)
    assert code == 0
    assert "a broken driver" in out
