"""What `bench a2av --placement` compares: the same ids under other placements, each checked."""

import csv
from collections import Counter
from dataclasses import replace

import pytest
import torch

from bench.a2av import command
from bench.a2av.cases import Case
from bench.a2av.options import Options
from bench.a2av.placements import place
from bench.a2av.routings import draw_ids
from bench.dispatchers import DISPATCHERS
from symm_a2a import SymmTokenDispatcher
from symm_a2a.baselines import AllGatherTokenDispatcher

ALL = ("contiguous", "worst", "best", "replicas")
CASE = Case("dispatch", "olmoe", "zipf", ranks=3, tokens=20, hidden=8, experts=12, top_k=3, dtype="float32")
OPTIONS = Options(
    ranks=3, tokens=20, hidden=8, experts=12, top_k=3, dtype="float32", routing=("zipf",), placement=ALL,
    iterations=1, warmup=0,
)  # fmt: skip


def rows_of(case, ids):
    """Return rows of each rank's experts, and copies over links, counted token by token."""
    placement = place(case, ids)
    rows, crossing = Counter(), 0
    for rank, ids_TK in enumerate(ids):
        places = ids_TK if placement is None else placement.places(ids_TK, rank)
        held = 4 if placement is None else placement.num_local_experts
        for token in places.tolist():
            owners = [p // held for p in token if p >= 0]
            rows.update(owners)
            crossing += len(set(owners) - {rank})
    return [rows[rank] for rank in range(3)], crossing


def test_each_placement_is_what_its_name_says():
    ids = draw_ids(CASE, 0, None)
    loads = torch.bincount(ids.flatten(), minlength=12).sort(descending=True).values
    most = {}
    for name in ALL:
        case = replace(CASE, placement=name)
        rows_W, _ = rows_of(case, ids)
        assert sum(rows_W) == 3 * 20 * 3
        most[name] = max(rows_W)
        if name != "contiguous":
            sizes = [len(mine) for mine in place(case, ids).experts_of_rank]
            assert sizes == [5 if name == "replicas" else 4] * 3
    # No placement has more on a rank than the four busiest experts.
    assert most["worst"] == loads[:4].sum()
    assert most["replicas"] <= most["best"] < most["contiguous"] < most["worst"]
    assert most["replicas"] <= 1.05 * 60


def test_the_figures_are_those_of_the_placement(tmp_path, capsys):
    path = tmp_path / "a.csv"
    options = replace(
        OPTIONS, csv=path, op=("dispatch", "counts"),
        backend=("symm", "all_to_all", "all_gather", "replicated", "local"),
    )  # fmt: skip
    assert command.run(options) == 0
    shown = capsys.readouterr().out
    assert "busiest rank: rows of its experts" in shown
    with path.open(newline="") as file:
        records = list(csv.DictReader(file))
    ran = {(one["op"], one["backend"], one["placement"]) for one in records}
    placed = {("dispatch", name, p) for name in ("symm", "all_to_all", "all_gather") for p in ALL}
    others = {("dispatch", name, "contiguous") for name in ("replicated", "local")}
    counts = {("counts", name, "contiguous") for name in ("symm", "all_to_all", "all_gather")}
    assert ran == placed | others | counts
    ids = draw_ids(CASE, 0, None)
    for name in ALL:
        rows_W, crossing = rows_of(replace(CASE, placement=name), ids)
        for backend in ("symm", "all_to_all", "all_gather"):
            found = {
                one["metric"]: float(one["value"])
                for one in records
                if (one["op"], one["backend"], one["placement"]) == ("dispatch", backend, name)
            }
            assert [found[f"expert_rows[{rank}]"] for rank in range(3)] == rows_W
            assert found["rows_max_over_mean"] == pytest.approx(max(rows_W) / 60, rel=1e-5)
            if backend == "symm":
                copies = [found[f"copies[{i},{j}]"] for i in range(3) for j in range(3) if i != j]
                assert sum(copies) == crossing


class ForgetsPlacement(SymmTokenDispatcher):
    def __init__(self, cfg, *args, **kwargs):
        super().__init__(replace(cfg, placement=None), *args, **kwargs)


class ForgetsIts(AllGatherTokenDispatcher):
    def __init__(self, cfg, *args, **kwargs):
        super().__init__(replace(cfg, placement=None), *args, **kwargs)


@pytest.mark.parametrize(("name", "wrong"), [("symm", ForgetsPlacement), ("all_gather", ForgetsIts)])
def test_rows_in_other_places_are_not_timed(name, wrong, tmp_path, capsys):
    options = replace(
        OPTIONS, csv=tmp_path / "a.csv", op=("dispatch",), backend=(name,), placement=("contiguous", "worst")
    )
    assert command.run(options, DISPATCHERS | {name: wrong}) == 1
    shown = capsys.readouterr().out
    assert f"WRONG: dispatch olmoe scaled zipf worst, {name}" in shown
    assert f"WRONG: dispatch olmoe scaled zipf, {name}" not in shown


def test_a_rank_alone_has_no_replicas(tmp_path, capsys):
    options = replace(OPTIONS, ranks=1, op=("dispatch",), csv=tmp_path / "a.csv")
    assert command.run(options) == 2
    assert "more than one rank for --placement replicas" in capsys.readouterr().err


def test_where_no_backend_has_a_case_nothing_is_written(tmp_path, capsys):
    csv = tmp_path / "a.csv"
    csv.write_text("kept")
    options = replace(OPTIONS, backend=("replicated",), op=("dispatch",), placement=("worst",), csv=csv)
    assert command.run(options) == 2
    said = capsys.readouterr().err
    assert "expected a backend that has one of the cases, got replicated for dispatch olmoe scaled" in said
    assert csv.read_text() == "kept"
