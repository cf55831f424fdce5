"""What cannot be written is said before the work, in one line."""

import sys

import pytest

from bench import outputs
from bench.a2av.options import Options as A2av
from bench.gpu_check import __main__ as gpu_check
from bench.kernels.options import Options as Kernels
from bench.limits.options import Options as Limits
from bench.plot.options import Options as Plot
from bench.train.options import Options as Train
from tests.test_bench_plot import written


def test_files_are_left_as_they_are(tmp_path):
    old, new = tmp_path / "old.csv", tmp_path / "a" / "b" / "new.csv"
    old.write_text("kept")
    outputs.prepare(old, None, new)
    assert old.read_text() == "kept"
    assert new.parent.is_dir()
    assert not new.exists()


def run_command(name, options):
    return __import__(f"bench.{name}.command", fromlist=["run"]).run(options)


OUTPUTS = [
    ("a2av", lambda path, _: A2av(csv=path)),
    ("a2av", lambda path, folder: A2av(csv=folder / "good.csv", json=path)),
    ("kernels", lambda path, _: Kernels(json=path)),
    ("limits", lambda path, _: Limits(json=path)),
    ("plot", lambda path, folder: Plot(csv=written(folder / "a.csv"), out=path)),
    ("plot", lambda path, folder: Plot(csv=written(folder / "a.csv"), out=folder, json=path)),
    ("train", lambda path, _: Train(out=path)),
    ("train", lambda path, folder: Train(out=folder, json=path)),
    ("train", lambda path, folder: Train(out=folder, trace=path)),
]


@pytest.mark.parametrize(("name", "make"), OUTPUTS)
def test_commands_say_it_before_they_work(name, make, tmp_path, capsys):
    (tmp_path / "file").write_text("a file")
    for path, reason in (
        ("/proc/nowhere/a.out", "No such file or directory"),
        (tmp_path / "file" / "a.out", "Not a directory"),
    ):
        options = make(type(tmp_path)(path), tmp_path)
        assert run_command(name, options) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith(f"bench {name}: expected a file that can be written, got {path}")
        assert shown.err.endswith(f": {reason}\n")
        assert shown.err.count("\n") == 1


def test_the_gpu_check_says_it_before_it_works(tmp_path, capsys):
    assert gpu_check.main(["--device", "cuda", "--json", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"gpu_check: expected a file that can be written, got {tmp_path}: Is a directory\n"


def test_the_gpu_check_names_what_the_interpreter_lacks(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert gpu_check.main(["--device", "cuda"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"expected an interpreter with torch, triton, numpy, got {sys.executable}: " in shown.err
    assert "PYTHON=/path/to/python" in shown.err
    assert shown.err.count("\n") == 1
