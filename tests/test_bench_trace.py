"""Routing traces: what training writes, benchmarks read, and what is no trace is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.a2av import command
from bench.trace import Trace, read_trace, write_trace
from bench.train import command as train
from bench.train.options import Options as TrainOptions
from symm_a2a import reference
from symm_a2a.testing import run_ranks
from tests.test_bench_a2av import TINY, rows_of


def trace_of_two_ranks():
    ids = np.random.default_rng(0).integers(-1, 4, (3, 2, 2, 5, 2), dtype=np.int32)
    return Trace(ids, 4)


def test_trace_is_read_as_it_was_written(tmp_path, capsys):
    trace, path = trace_of_two_ranks(), tmp_path / "new" / "a.trace"
    write_trace(path, trace)
    again = read_trace(path)
    assert again.num_experts == 4
    assert np.array_equal(again.ids, trace.ids)
    assert np.array_equal(again.layer(-1, 1), trace.ids[2, 1])
    with pytest.raises(ValueError, match=r"expected a layer in \[-2, 2\) of the trace, got 2"):
        again.layer(0, 2)

    options = replace(TINY, routing=("trace",), trace=path, csv=tmp_path / "a.csv", op=("dispatch",))
    assert command.run(replace(options, trace_step=1, trace_layer=-1)) == 0
    _, metrics = rows_of(tmp_path / "a.csv")
    expected = reference.count_copies(list(torch.from_numpy(trace.ids[1, 1])), 4)
    got = [[metrics["dispatch", "symm"][f"copies[{i},{j}]"]["value"] for j in range(2)] for i in range(2)]
    assert [[int(rows) for rows in row] for row in got] == expected.tolist()

    capsys.readouterr()
    for change, message in (
        ({"ranks": 4}, "expected 2 ranks, as in"),
        ({"top_k": 3}, "expected 2 top_k, as in"),
        ({"trace_step": 3}, "expected a step in [-3, 3) of the trace, got 3"),
    ):
        assert command.run(replace(options, **change)) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"ids": None}, "got no ids"),
        ({"format": np.int64(2)}, "expected format 1, got 2"),
        ({"num_experts": np.array([4])}, "expected num_experts to be one integer"),
        ({"num_experts": np.int64(3)}, r"expected ids in \[-1, 3\), got 3"),
        ({"ids": np.full((1, 1, 1, 1, 1), -2, np.int32)}, r"expected ids in \[-1, 4\), got -2"),
        ({"ids": np.zeros((1, 1, 1, 1), np.int32)}, r"expected ids as int32 \(steps, layers,"),
        ({"ids": np.zeros((1, 1, 1, 1, 1))}, "got float64"),
        ({"ids": np.zeros((1, 1, 0, 1, 1), np.int32)}, "at least one id"),
        ({"ids": np.array([None])}, "expected ids as a plain array of numbers, got objects or damaged data"),
    ],
)
def test_broken_traces(arrays, message, tmp_path):
    good = {"format": np.int64(1), "num_experts": np.int64(4), "ids": trace_of_two_ranks().ids}
    arrays = {name: array for name, array in (good | arrays).items() if array is not None}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(tmp_path / "a.npz")
    assert "a.npz is no routing trace" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"nothing", b"PK\x03\x04 and nothing"])
def test_files_that_are_no_traces(content, tmp_path):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"is no routing trace.*expected a \.npz archive") as caught:
        read_trace(tmp_path / "a.npz")
    assert "pickle" not in str(caught.value)


def test_damaged_traces(tmp_path):
    path = tmp_path / "a.npz"
    write_trace(path, trace_of_two_ranks())
    whole = path.read_bytes()
    # In the compressed ids, the last array of the file.
    middle = whole.rindex(b"ids.npy", 0, whole.index(b"PK\x01\x02")) + 60
    path.write_bytes(whole[:middle] + bytes(20) + whole[middle + 20 :])
    with pytest.raises(ValueError, match="expected ids as a plain array of numbers, got objects or damaged"):
        read_trace(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="got a damaged file"):
        read_trace(path)


def test_training_writes_its_routing(tmp_path):
    sizes = dict(ranks=2, steps=2, tokens=16, context=8, layers=2, experts=4, top_k=2, dim=16)
    options = TrainOptions(**sizes, dispatcher=("all_to_all",), out=tmp_path, trace=tmp_path / "trace.npz")
    reports = []

    def keep(*args, **kwargs):
        reports.extend(run_ranks(*args, **kwargs))
        return reports

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run_ranks", keep)
        assert train.run(options) == 0
    trace = read_trace(tmp_path / "trace.npz")
    assert trace.ids.shape == (2, 2, 2, 16, 2)
    loads = [np.bincount(step.flatten(), minlength=4).tolist() for step in trace.ids]
    assert loads == reports[0]["all_to_all"].loads
    # Different tokens on different ranks.
    assert not np.array_equal(trace.ids[:, :, 0], trace.ids[:, :, 1])
