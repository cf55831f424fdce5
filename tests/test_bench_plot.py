"""The pictures show what the CSV says, and say where its times mean nothing."""

import csv
import doctest
import importlib
import json
from dataclasses import replace

import matplotlib
import numpy as np
import pytest

from bench.a2av.cases import Case
from bench.a2av.figures import Metric, Result, loads
from bench.a2av.records import Setting, to_rows, write_csv
from bench.plot import command, pictures
from bench.plot.load import load
from bench.plot.matrix import rows_of
from bench.plot.options import Options
from bench.plot.panels import WARNING
from bench.style import STYLE

CASE = Case("dispatch", "olmoe", "uniform", 2, 4096, 2048, 64, 8, "bfloat16")
FLAGS = Case("flags", "none", "none", 2, 1, 8, 2, 1, "float32")
EVEN = Case("even", "even", "even", 2, 8, 2048, 2, 1, "bfloat16", bytes_per_peer=16384)
GPU = Setting("NVIDIA H200", "2.13.0", "3.7.1", "2026-01-02T03:04:05+00:00", "gpu")
HOST = replace(GPU, device="CPU, 2 cores", mode="interpreted")


def result(case, backend, p50, rates=(), rows=()):
    metrics = [Metric(f"latency_p{p}", p50 * share, "us") for p, share in ((20, 0.9), (50, 1.0), (80, 1.2))]
    names = ("logical_bandwidth", "remote_bandwidth", "link_peak")
    metrics += [Metric(name, rate, "GB/s") for name, rate in zip(names, rates, strict=False)]
    metrics += [
        Metric(f"copies[{i},{j}]", count, "rows") for i, row in enumerate(rows) for j, count in enumerate(row)
    ]
    return Result(case, backend, False, metrics)


RESULTS = [
    result(CASE, "symm", 200.0, (400.0, 250.0, 450.0), [[30, 20], [10, 40]]),
    result(CASE, "all_to_all", 500.0, (420.0, 260.0, 450.0), [[80, 60], [50, 70]]),
    result(replace(CASE, routing="zipf"), "symm", 800.0, (300.0, 200.0, 450.0), [[1, 2], [3, 4]]),
    result(replace(CASE, routing="zipf"), "all_to_all", 400.0, (310.0, 210.0, 450.0), [[5, 6], [7, 8]]),
    result(FLAGS, "symm", 5.0),
    result(FLAGS, "all_to_all", 20.0),
    result(EVEN, "symm", 50.0, (3.0, 1.5, 450.0)),
    result(replace(EVEN, tokens=32, bytes_per_peer=65536), "symm", 60.0, (5.0, 2.5, 450.0)),
    Result(replace(CASE, op="combine"), "symm", False, [Metric("error", None, "", "rank 1: bad, very")]),
]


def written(path, results=RESULTS, setting=GPU):
    write_csv(path, to_rows(results, setting))
    return path


def test_load_gives_what_was_written(tmp_path):
    run = load(written(tmp_path / "a.csv"))
    assert run.ranks == 2
    assert not run.interpreted
    assert run.setting["device"] == "NVIDIA H200"
    assert len(run.measured) == len(RESULTS) - 1
    for one, expected in zip(run.measured, RESULTS, strict=False):
        assert (one.op, one.backend) == (expected.case.op, expected.backend)
        assert one.metrics == pytest.approx({m.name: m.value for m in expected.metrics})
    labels = ["uniform", "uniform", "zipf", "zipf", "barrier", "barrier", "16 KiB", "64 KiB"]
    assert [one.label for one in run.measured] == labels
    assert np.array_equal(rows_of(run.measured[1], 2), [[80, 60], [50, 70]])
    assert run.measured[0].key == run.measured[1].key
    assert run.measured[0].key != run.measured[2].key

    other = [*RESULTS[:2], result(replace(CASE, shape="dsv3"), "symm", 1.0)]
    assert [one.label for one in load(written(tmp_path / "b.csv", other)).measured] == [
        "olmoe, uniform", "olmoe, uniform", "dsv3, uniform",
    ]  # fmt: skip


def texts(axes):
    return [text.get_text() for text in axes.texts]


def panels(figure):
    return {axes.get_title(loc="left") or axes.get_title(): axes for axes in figure.axes}


def test_pictures_show_the_figures(tmp_path):
    run = load(written(tmp_path / "a.csv"))
    with matplotlib.rc_context(STYLE):
        latency, bandwidth, speedup, copies = (
            getattr(pictures, name)(run) for name in ("latency", "bandwidth", "speedup", "copies")
        )
    assert set(panels(latency)) == {"Dispatch", "Flag round trip", "Even all-to-all"}
    assert texts(panels(latency)["Dispatch"]) == ["200 us", "500 us", "800 us", "400 us"]
    labels = [label.get_text() for label in panels(latency)["Dispatch"].get_yticklabels()]
    assert labels == ["uniform", "zipf"]

    # What crossed a link, and not what stayed on the rank.
    assert texts(panels(bandwidth)["Dispatch"]) == ["250", "260", "200", "210"]
    assert panels(bandwidth)["Dispatch"].get_xlabel() == "GB/s"
    (curve, peak) = panels(bandwidth)["Even all-to-all"].lines
    assert curve.get_xydata().tolist() == [[16384, 1.5], [65536, 2.5]]
    assert set(peak.get_ydata()) == {450}

    # Where both were measured, and faster to the right.
    assert set(panels(speedup)) == {"Dispatch", "Flag round trip"}
    assert texts(panels(speedup)["Dispatch"]) == ["2.5x", "0.5x"]
    assert texts(panels(speedup)["Flag round trip"]) == ["4x"]

    matrices = {axes.get_title(): texts(axes) for axes in copies.axes}
    assert matrices["uniform\n100 copies"] == ["30", "20", "10", "40"]
    assert matrices["260 rows"] == ["80", "60", "50", "70"]
    assert matrices["26 rows"] == ["5", "6", "7", "8"]


def placed(placement, rows, copies, routing="zipf"):
    one = result(replace(CASE, routing=routing, placement=placement), "symm", 9.0, (), copies)
    return replace(one, metrics=[*one.metrics, *loads(rows)])


def test_the_picture_of_placements_shows_rows_and_what_crosses_links(tmp_path):
    both = [placed("contiguous", [30, 10], [[9, 7], [5, 9]]), placed("best", [20, 20], [[4, 80], [60, 4]])]
    figure = pictures.placements(load(written(tmp_path / "a.csv", both)))
    left, right = figure.axes
    assert texts(left) == ["contiguous", "busiest rank 1.50x the mean", "12 copies over links"]
    assert texts(right) == ["best", "busiest rank 1.00x the mean", "140 copies over links"]
    assert [bar.get_height() for bar in left.patches] == [30, 10]
    assert left.get_ylim() == right.get_ylim()
    assert pictures.placements(load(written(tmp_path / "b.csv", both[:1]))) is None
    assert [one.label for one in load(tmp_path / "a.csv").measured] == ["zipf", "zipf, best"]


@pytest.mark.parametrize(
    ("rates", "unit", "shown"),
    [((2.0, 1.5), "GB/s", "1.5"), ((0.4, 0.25), "MB/s", "250"), ((9.5e-5, 2e-6), "kB/s", "2")],
)
def test_rates_are_in_the_unit_that_fits(rates, unit, shown, tmp_path):
    results = [result(CASE, "symm", 1.0, rates), result(EVEN, "symm", 1.0, rates)]
    drawn = panels(pictures.bandwidth(load(written(tmp_path / "a.csv", results, HOST))))
    assert drawn["Dispatch"].get_xlabel() == unit
    assert texts(drawn["Dispatch"]) == [shown]
    assert drawn["Even all-to-all"].get_ylabel() == f"{unit} across a link"
    (curve,) = drawn["Even all-to-all"].lines
    assert curve.get_ydata().tolist() == pytest.approx([float(shown)])


def test_few_panels_fill_the_figure(tmp_path):
    for name, results in (("one", RESULTS[:2]), ("two", RESULTS[:4])):
        run = load(written(tmp_path / f"{name}.csv", results))
        for make in (pictures.latency, pictures.bandwidth, pictures.speedup, pictures.copies):
            assert max(axes.get_position().x1 for axes in make(run).axes) > 0.9, (name, make)


@pytest.mark.parametrize("setting", [GPU, HOST])
def test_interpreted_results_say_so(setting, tmp_path):
    run = load(written(tmp_path / "a.csv", setting=setting))
    for name in ("latency", "bandwidth", "speedup", "copies"):
        heads = [text.get_text() for text in getattr(pictures, name)(run).texts]
        assert (WARNING in heads) == (setting is HOST)
        assert any(setting.device in text for text in heads)


def test_nothing_is_cut_off(tmp_path):
    """With few cases, and with many ranks, shapes and routings."""
    many = [
        result(replace(case, op=op, shape=shape, routing=routing), backend, 10.0**n, (1, 2), [[9] * 16] * 16)
        for case in (replace(CASE, ranks=16),)
        for op in ("dispatch", "combine", "forward-backward", "counts")
        for shape in ("olmoe changed", "dsv3 changed", "qwen3 changed")
        for routing in ("balanced", "one-rank")
        for n, backend in enumerate(("symm", "all_to_all"), start=2)
    ]
    names = ("contiguous", "worst", "best", "replicas")
    many += [
        placed(name, [10**6 + n] * 16, [[10**5] * 16] * 16, routing) for n, name in enumerate(names)
        for routing in ("zipf", "uniform")
    ]  # fmt: skip
    many = [replace(one, case=replace(one.case, ranks=16)) for one in many]
    for name, results in (("few", RESULTS), ("one", RESULTS[4:6]), ("many", many)):
        run = load(written(tmp_path / f"{name}.csv", results, HOST))
        with matplotlib.rc_context(STYLE):
            for make in pictures.PICTURES.values():
                figure = make(run)
                if figure is not None:
                    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
                    assert 0 <= box.x0 < box.x1 <= width, (name, make)
                    assert 0 <= box.y0 < box.y1 <= height, (name, make)


def test_command_draws_what_there_is(tmp_path, capsys):
    out = tmp_path / "new" / "pictures"
    assert command.run(Options(csv=written(tmp_path / "a.csv"), out=out)) == 0
    names = ["latency.png", "bandwidth.png", "speedup.png", "copies.png"]
    assert capsys.readouterr().out == "Wrote " + ", ".join(str(out / name) for name in names) + "\n"
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in names)

    assert command.run(Options(csv=written(tmp_path / "b.csv", RESULTS[4:5]), out=tmp_path)) == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["latency.png"]


def test_what_is_drawn_can_be_had_as_json(tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert command.run(Options(csv=written(tmp_path / "a.csv"), out=tmp_path, json=path)) == 0
    assert str(path) in capsys.readouterr().out
    found, run = json.loads(path.read_text()), load(tmp_path / "a.csv")
    assert found["setting"] == run.setting
    assert [case.pop("metrics") for case in found["cases"]] == [one.metrics for one in run.measured]
    assert found["cases"] == [one.case for one in run.measured]


def without(column):
    def change(rows):
        for row in rows:
            del row[column]

    return change


def set_in(index, **values):
    def change(rows):
        rows[index].update(values)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("metric"), "without columns metric"),
        (set_in(3, mode="interpreted"), "expected one mode in"),
        (set_in(3, device="NVIDIA B200"), "got NVIDIA B200, NVIDIA H200; draw them apart"),
        (set_in(1, metric="latency_p20"), "expected each metric of a case once"),
        (set_in(1, value="fast"), "got 'fast' as latency_p50"),
        (set_in(1, metric="latency"), "expected latency_p50 of every case"),
        (set_in(9, metric="copies"), "expected copies[1,1] of every case"),
        (set_in(3, mode=""), "got row 4 of 59 without mode; the file may be cut off"),
        (set_in(58, triton="", date="", mode=""), "got row 59 of 59 without triton; the file may be cut off"),
        (set_in(3, mode="interp"), "got 'interp' in row 4 of 59; the file may be cut off"),
        (lambda rows: rows.clear(), "got none that passed their checks"),
    ],
)
def test_files_that_do_not_fit(change, message, tmp_path, capsys):
    rows = [{k: "" if v is None else str(v) for k, v in row.items()} for row in to_rows(RESULTS, GPU)]
    columns = list(rows[0])
    change(rows)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0] if rows else columns)
        writer.writeheader()
        writer.writerows(rows)
    assert command.run(Options(csv=tmp_path / "a.csv", out=tmp_path)) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("content", [None, b"", b"\x89PNG\xff\xfe", b'"a\n'])
def test_files_that_are_no_csv(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "a.csv").write_bytes(content)
    assert command.run(Options(csv=tmp_path / "a.csv", out=tmp_path)) == 2
    assert "expected a CSV file of `python -m bench a2av`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["load", "pictures"])
def test_examples(name):
    failed, tried = doctest.testmod(importlib.import_module(f"bench.plot.{name}"))
    assert tried > 0
    assert failed == 0
