"""The exchange benchmark: what is wrong is never timed, and the figures are what they say."""

import csv
import doctest
import importlib
import json
from dataclasses import replace

import pytest
import torch

from bench.a2av import command
from bench.a2av.cases import Case, plan
from bench.a2av.gate import near, same
from bench.a2av.options import Options
from bench.a2av.problem import count, encode, make_problem
from bench.a2av.ranks import Work, measure_rank
from bench.a2av.records import COLUMNS
from bench.a2av.routings import draw_ids
from bench.a2av.timers import measure
from bench.dispatchers import DISPATCHERS
from bench.shapes import SHAPES
from symm_a2a import SymmTokenDispatcher, reference
from symm_a2a.testing import run_ranks
from tests.ranks import BOTH

TINY = Options(
    ranks=2,
    tokens=5,
    hidden=12,
    experts=4,
    top_k=2,
    dtype="float32",
    routing=("uniform",),
    sizes=(64,),
    iterations=2,
    warmup=1,
)
CASE = Case("dispatch", "tiny", "uniform", ranks=2, tokens=5, hidden=12, experts=4, top_k=2, dtype="float32")


def rows_of(path):
    """Return the CSV's rows, and its metrics by (op, backend)."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    metrics = {}
    for row in rows:
        metrics.setdefault((row["op"], row["backend"]), {})[row["metric"]] = row
    return rows, metrics


def test_command_writes_tidy_figures(tmp_path, capsys):
    files = {"csv": tmp_path / "new" / "a.csv", "json": tmp_path / "a.json"}
    assert command.run(replace(TINY, capacity="static", **files)) == 0
    shown = capsys.readouterr().out
    assert "NOT the published size" in shown
    assert "interpreted" in shown
    assert "GB/s" not in shown
    assert shown.splitlines()[-1] == f"Wrote {files['csv']} and {files['json']}"

    rows, metrics = rows_of(files["csv"])
    assert tuple(rows[0]) == COLUMNS
    assert set(metrics) == {(op, backend) for op in TINY.op for backend in TINY.backend}
    assert {row["mode"] for row in rows} == {"interpreted"}
    assert [[row[name] for name in COLUMNS] for row in rows] == [
        ["" if row[name] is None else str(row[name]) for name in COLUMNS]
        for row in json.loads(files["json"].read_text())
    ]
    ids = draw_ids(CASE, TINY.seed, None)
    copies, slots = (f(list(ids), 4) for f in (reference.count_copies, reference.count_slots))
    for backend, sent in (("symm", copies), ("all_to_all", slots)):
        for i in range(2):
            for j in range(2):
                name = f"copies[{i},{j}]"
                assert float(metrics["dispatch", backend][name]["value"]) == sent[i, j]
                assert float(metrics["combine", backend][name]["value"]) == sent[j, i]
                both = 2 * (sent[i, j] + sent[j, i])
                assert float(metrics["forward-backward", backend][name]["value"]) == both
        assert float(metrics["dispatch", backend]["payload_bytes"]["value"]) == sent.sum(1).max() * 12 * 4
    symm, other = metrics["dispatch", "symm"], metrics["dispatch", "all_to_all"]
    assert float(symm["symmetric_bytes"]["value"]) == CASE.config("exact").symmetric_bytes(2)
    # Nothing waits for a static capacity; the collectives' host waits for its own counts and for the others'.
    assert float(symm["host_syncs"]["value"]) == 0
    assert float(other["host_syncs"]["value"]) == 2
    assert (symm["latency_p50"]["capacity"], other["latency_p50"]["capacity"]) == ("static", "exact")
    for figures in metrics.values():
        low, middle, high = (float(figures[f"latency_p{p}"]["value"]) for p in (20, 50, 80))
        assert 0 < low <= middle <= high
        assert float(figures["launches"]["value"]) > 0


class WrongRank(SymmTokenDispatcher):
    """Sends one token to an expert of the other rank; everything else is right for that routing."""

    def dispatch(self, x_TD, scores_TK, topk_ids_TK, *args, **kwargs):
        if self.rank == 1:
            topk_ids_TK = topk_ids_TK.clone()
            E = self.cfg.num_experts
            topk_ids_TK[0, 0] = (topk_ids_TK[0, 0] + E // 2) % E
        return super().dispatch(x_TD, scores_TK, topk_ids_TK, *args, **kwargs)


class SwapsTokens(SymmTokenDispatcher):
    """Gives two tokens of one rank each other's sums."""

    def combine(self, y_RD, handle, x_TD=None):
        out_TD = super().combine(y_RD, handle)
        return torch.cat([out_TD[1:2], out_TD[:1], out_TD[2:]]) if self.rank else out_TD


class LosesGradients(SymmTokenDispatcher):
    """Right in the forward; the gradients of one slot's score, and of one token, do not arrive."""

    def dispatch(self, x_TD, scores_TK, topk_ids_TK, *args, **kwargs):
        if self.rank == 1:
            lost = torch.zeros_like(scores_TK, dtype=torch.bool)
            lost[0, 1] = True
            scores_TK = torch.where(lost, scores_TK.detach(), scores_TK)
            x_TD = torch.cat([x_TD[:1].detach(), x_TD[1:]])
        return super().dispatch(x_TD, scores_TK, topk_ids_TK, *args, **kwargs)


class Careless(SymmTokenDispatcher):
    """Lets everyone through its barrier, and counts one slot too many."""

    def barrier(self, lane=0):
        pass

    def broadcast_counts(self, topk_ids_TK, lane=0):
        counts_WE = super().broadcast_counts(topk_ids_TK)
        counts_WE[1, 3] += 1
        return counts_WE


class Miscounts(SymmTokenDispatcher):
    """Moves what it should, and says that it moved more."""

    def stats(self):
        stats = super().stats()
        copies = {kind: [rows * 2 for rows in peers] for kind, peers in stats.copies.items()}
        return replace(stats, copies=copies)


class Fails(SymmTokenDispatcher):
    """Fails on one rank, before anything is sent."""

    def dispatch(self, x_TD, scores_TK, topk_ids_TK, *args, **kwargs):
        if self.rank == 1:
            x_TD = x_TD[:, 1:]
        return super().dispatch(x_TD, scores_TK, topk_ids_TK, *args, **kwargs)


@pytest.mark.parametrize(
    ("wrong", "ops", "said"),
    [
        (WrongRank, ("dispatch", "even"), "rows: "),
        (SwapsTokens, ("combine",), "sums: 24 of 60 are off"),
        (LosesGradients, ("forward-backward",), "gradient of scores: 1 of 10 are off"),
        (LosesGradients, ("forward-backward",), "gradient of x: 12 of 60 are off"),
        (Careless, ("counts", "flags"), "barrier: ranks [0] left before the last had arrived"),
        (Miscounts, ("dispatch",), "rows sent to each rank: expected"),
        (Fails, ("dispatch",), "expected x_TD"),
    ],
)
def test_what_is_wrong_is_not_timed(wrong, ops, said, tmp_path, capsys):
    options = replace(TINY, op=ops, csv=tmp_path / "a.csv")
    assert command.run(options, {**DISPATCHERS, "symm": wrong}) == 1
    shown = capsys.readouterr().out
    assert "WRONG, not timed" in shown
    assert said in shown
    _, metrics = rows_of(tmp_path / "a.csv")
    for op in ops:
        assert set(metrics[op, "symm"]) == {"error"}
        assert metrics[op, "symm"]["error"]["note"]
        assert float(metrics[op, "all_to_all"]["latency_p50"]["value"]) > 0


@pytest.mark.parametrize("device", BOTH)
def test_all_ranks_run_alike(device):
    """Of all routings, shapes with odd sizes; every rank times the same number of runs."""
    on_gpu = device == "cuda"
    options = replace(
        TINY,
        tokens=7,
        hidden=20,
        top_k=3,
        dtype="bfloat16",
        routing=("balanced", "zipf", "one-hot", "one-rank"),
        op=TINY.op if on_gpu else ("dispatch", "combine"),
        capacity="static" if on_gpu else "exact",
        graph=on_gpu,
    )
    work = Work(plan(options, 2, "gpu" if on_gpu else "interpreted"), options, 3, 1, None, DISPATCHERS)
    first, second = run_ranks(measure_rank, 2, work, device=device)
    assert len(first) == 2 * len(work.cases)
    for one, other in zip(first, second, strict=True):
        assert one.faults == other.faults == []
        assert (one.case, one.backend, len(one.seconds)) == (other.case, other.backend, 3)
        assert len(other.seconds) == 3
        assert one.graph == (on_gpu and one.backend == "symm" and one.case.op not in ("counts", "flags"))


def test_measure_leaves_out_warmup_and_what_comes_before():
    clock, runs = [0.0], []

    class Clock:
        def align(self):
            clock[0] += 1000

        def start(self):
            self.begin = clock[0]

        def stop(self):
            runs.append(clock[0] - self.begin)

        def seconds(self):
            return list(runs)

    class Slow:
        def before(self):
            clock[0] += 100
            return len(runs)

        def run(self, number):
            clock[0] += number

    assert measure(Slow(), Clock(), warmup=2, iterations=3) == [2, 3, 4]


def routed(routing, **changes):
    sizes = dict(ranks=4, tokens=64, experts=16, top_k=4) | changes
    case = replace(CASE, routing=routing, **sizes)
    ids = draw_ids(case, 3, None)
    assert ids.shape == (4, case.tokens, case.top_k)
    assert torch.equal(ids, draw_ids(case, 3, None))
    return case, ids


def test_routings():
    for name in ("balanced", "uniform", "zipf"):
        case, ids = routed(name)
        sorted_ids = ids.sort(-1).values
        assert (sorted_ids[..., 1:] > sorted_ids[..., :-1]).all()
        load = torch.bincount(ids.flatten(), minlength=16)
        assert load.sum() == 4 * 64 * 4
        if name == "balanced":
            assert (load == 64).all()
            assert (count(ids // (case.experts // case.ranks), distinct=True) == 64).all()
        # An even share is 64; the standard deviation of "uniform" is 7.
        assert (load.max() > 150) == (name == "zipf")
        assert not torch.equal(ids, draw_ids(case, 4, None)) or name == "balanced"
    _, ids = routed("one-hot")
    assert (ids[..., 0] == 0).all()
    assert (ids[..., 1:] == -1).all()
    _, ids = routed("one-rank")
    assert ids.sort(-1).values.unique(dim=1).flatten(0, 1).unique(dim=0).tolist() == [[0, 1, 2, 3]]
    _, ids = routed("one-rank", top_k=6)
    assert ((ids >= 0).sum(-1) == 4).all()
    even = replace(CASE, routing="even", tokens=6, experts=2, top_k=1)
    assert draw_ids(even, 0, None).squeeze(-1).tolist() == [[0, 0, 0, 1, 1, 1]] * 2


def test_rows_tell_all_slots_apart():
    case = replace(CASE, tokens=700, top_k=8, hidden=9, dtype="bfloat16")
    codes = torch.arange(2 * 700 * 8)
    rows = encode(codes, case)
    assert len(rows.unique(dim=0)) == len(codes)
    assert torch.equal(rows.double(), encode(codes, replace(case, dtype="float32")).double())
    assert len(rows[:, :8].T.unique(dim=0)) == 8
    assert (encode(torch.tensor([-1]), case) == 0).all()


def test_problem_is_the_references():
    case, ids = routed("uniform", hidden=5, dtype="float32")
    ids[1, 3] = -1
    ids[2, 0, 0] = ids[2, 0, 1]
    problems = [make_problem(case, rank, torch.device("cpu"), ids, 0) for rank in range(4)]
    assert torch.equal(problems[0].copies_WW, reference.count_copies(list(ids), 16))
    assert torch.equal(problems[0].slots_WW, reference.count_slots(list(ids), 16))
    rows, _ = reference.dispatch([problem.x_TD for problem in problems], list(ids), 16)
    most = max(map(len, rows))
    assert problems[0].most_rows == most
    for problem, expected in zip(problems, rows, strict=True):
        origin, token, k = problem.slots(most)
        mine = problem.row_of(origin, token, torch.zeros_like(k))
        assert torch.equal(mine[: len(expected)], expected)
        assert (mine[len(expected) :] == 0).all()


def test_gate():
    x = torch.arange(6.0).view(3, 2)
    assert same("x", x, x.clone()) == []
    wrong = x.clone()
    wrong[2, 1] += 1
    assert "x: 1 of 3 differ, number 2 first: expected [4.0, 6.0], got [4.0, 5.0]" in same("x", x, wrong)[0]
    assert "float64" in same("x", x, x.double())[0]
    assert "(2, 2)" in same("x", x, x[:2])[0]
    budget = torch.full_like(x, 0.5, dtype=torch.float64)
    assert near("x", x, x.double() + 0.5, budget, torch.float32) == []
    assert "6 of 6" in near("x", x, x.double() + 0.51, budget, torch.float32)[0]
    assert near("x", x * float("nan"), x.double(), budget, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": True, "capacity": "static"}, "expected GPUs under torchrun for --graph"),
        ({"graph": True}, "expected --capacity static with --graph"),
        ({"routing": ("trace",)}, "expected --routing trace and --trace FILE together, got no file"),
        ({"shape": ("olmo",)}, "expected --shape to be one of olmoe, "),
        ({"experts": 5}, "expected experts that divide among 2 ranks, got 5"),
        ({"top_k": 9}, "expected a top-k of at most 4 experts, got 9"),
        ({"tokens": 0}, "expected a positive --tokens, got 0"),
        ({"hidden": 3}, "expected --hidden of at least 4"),
        ({"warmup": -1}, "expected --warmup of 0 or more, got -1"),
        ({"op": ()}, "expected at least one --op"),
        (
            {"op": ("even", "flags"), "backend": ("symm", "local")},
            "expected --op with any of dispatch, combine, forward-backward for --backend local",
        ),
        ({"sizes": (8,)}, "expected --sizes of at least 16 bytes, got 8"),
        ({"routing": ("trace",), "trace": "missing.npz"}, "expected a readable trace at missing.npz"),
    ],
)
def test_options_that_do_not_fit(change, message, tmp_path, capsys):
    assert command.run(replace(TINY, csv=tmp_path / "a.csv", **change)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.csv").exists()


def test_torchrun_needs_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.run(TINY) == 2
    assert "expected a GPU for each rank under torchrun, got none" in capsys.readouterr().err


def test_published_shapes_stay_as_they_are():
    options = Options(shape=tuple(SHAPES), op=("dispatch",), routing=("uniform",))
    cases = {case.shape: case for case in plan(options, 2, "gpu")}
    assert set(cases) == set(SHAPES)
    assert (cases["dsv3"].tokens, cases["dsv3"].hidden, cases["dsv3"].top_k) == (4096, 7168, 8)
    scaled = {case.shape: case for case in plan(options, 2, "interpreted")}
    assert set(scaled) == {f"{name} scaled" for name in SHAPES}
    even = plan(Options(op=("even",)), 8, "gpu")
    assert [case.bytes_per_peer for case in even] == [4096 * 4**n for n in range(8)]
    assert all(case.tokens * case.row_bytes == 8 * case.bytes_per_peer for case in even)


MODULES = [
    "a2av.cases", "a2av.figures", "a2av.gate", "a2av.links", "a2av.operations", "a2av.problem",
    "a2av.routings", "a2av.table", "style",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failed, tried = doctest.testmod(importlib.import_module(f"bench.{name}"))
    assert tried > 0
    assert failed == 0
