"""The collectives that the exchange benchmark compares with: checked, and counted as they are called."""

import csv
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from bench.a2av import command
from bench.a2av.backends import open_backend
from bench.a2av.operations import make_operation
from bench.a2av.options import OPS, ROUTED
from bench.a2av.problem import make_problem, share_out
from bench.a2av.routings import draw_ids
from bench.dispatchers import DISPATCHERS, Sharing, sharing_of
from symm_a2a import reference
from symm_a2a.baselines import AllGatherTokenDispatcher, ReplicatedTokenDispatcher
from symm_a2a.testing import run_ranks
from tests.test_bench_a2av import CASE, TINY

RANKS = 3
NAMES = ("all_to_all", "all_gather", "replicated", "local")


class Counted:
    """Counts collectives, and the bytes that each sends from one rank to every other, if it sends no more."""

    def __init__(self, patch):
        self.calls, self.sent_W = 0, [0] * RANKS
        names = {
            "all_to_all_single": lambda out, rows, theirs=None, mine=None, group=None: self.split(rows, mine),
            "all_gather_single": lambda out, rows, group=None: self.even(rows.nbytes),
            "reduce_scatter_single": lambda out, rows, group=None: self.even(out.nbytes),
            # To whom a part belongs, and from there to all.
            "all_reduce": lambda rows, group=None: self.even(2 * rows.nbytes // RANKS),
            "barrier": lambda group=None, device_ids=None: self.even(0),
        }
        for name, see in names.items():
            patch.setattr(dist, name, self.seen(getattr(dist, name), see), raising=False)

    def seen(self, collective, see):
        def run(*args, **kwargs):
            self.calls += 1
            see(*args, **kwargs)
            return collective(*args, **kwargs)

        return run

    def even(self, nbytes):
        self.sent_W = [sent + nbytes for sent in self.sent_W]

    def split(self, rows, parts):
        parts = parts or [len(rows) // RANKS] * RANKS
        row = rows.nbytes // max(1, len(rows))
        self.sent_W = [sent + row * part for sent, part in zip(self.sent_W, parts, strict=True)]


def count_bytes(rank, group):
    if not hasattr(dist, "all_gather_single"):
        dist.all_gather_single, dist.reduce_scatter_single = (
            dist.all_gather_into_tensor, dist.reduce_scatter_tensor,
        )  # fmt: skip
    case = replace(CASE, ranks=RANKS, tokens=7, experts=6, top_k=3)
    ids_WTK = draw_ids(case, 0, None)
    ids_WTK[1, 2, 1] = -1
    for name in NAMES:
        for op in OPS[name]:
            even = {"routing": "even", "tokens": 6, "experts": RANKS, "top_k": 1} if op == "even" else {}
            routed = replace(case, op=op, **even)
            ids = draw_ids(routed, 0, None) if even else ids_WTK
            problem = make_problem(routed, rank, torch.device("cpu"), ids, 0)
            problem = share_out(problem, sharing_of(name), 0)
            with (
                open_backend(name, problem, group, DISPATCHERS) as backend,
                pytest.MonkeyPatch.context() as patch,
            ):
                operation = make_operation(backend)
                assert op == "flags" or operation.check(operation.probe()) == []
                state, counted = operation.before(), Counted(patch)
                cost = backend.cost(op, lambda o=operation, s=state: o.run(s))
                said = [sum(pair) for pair in zip(cost.payload_bytes_W, cost.metadata_bytes_W, strict=True)]
                # A group of one hands no rows to a collective.
                seen = counted.sent_W
                # A group of one hands no rows to a collective.
                assert said == seen or (name == "local" and not any(seen)), (name, op, said, seen)
                assert backend.collectives.get(op, 0) == counted.calls, (name, op, counted.calls)
                assert name != "local" or sum(said) == said[rank]


def test_bytes_are_those_of_the_collectives():
    run_ranks(count_bytes, RANKS)


def test_replicated_and_local_problems():
    case = replace(CASE, ranks=RANKS, tokens=4, experts=6, top_k=2, routing="uniform")
    ids = draw_ids(case, 1, None)
    problems = [make_problem(case, rank, torch.device("cpu"), ids, 1) for rank in range(RANKS)]
    for rank, problem in enumerate(problems):
        assert share_out(problem, Sharing(), 1) is problem
        everyones = share_out(problem, Sharing(tokens=False), 1)
        for name in ("x_TD", "scores_TK", "ids_TK", "grad_TD"):
            assert torch.equal(getattr(everyones, name), torch.cat([getattr(one, name) for one in problems]))
        # The rows are the same: what a rank's experts get does not depend on who has the tokens.
        rows, _ = reference.dispatch([everyones.x_TD], [everyones.ids_TK], case.experts)
        mine, _ = reference.dispatch([one.x_TD for one in problems], list(ids), case.experts)
        first = sum(len(one) for one in mine[:rank])
        assert torch.equal(rows[0][first : first + len(mine[rank])], mine[rank])
        local = share_out(problem, Sharing(experts=False), 1)
        rows, _ = reference.dispatch([problem.x_TD], [problem.ids_TK], case.experts)
        origin, token, k = local.slots(None)
        assert torch.equal(local.row_of(origin, token, k * 0), rows[0])
        assert local.slots_WW.sum() == local.slots_WW.trace() == problem.slots_WW.sum()


class LosesScoreGradients(AllGatherTokenDispatcher):
    """As published ones do."""

    def _combine(self, y_RD, handle):
        return super()._combine(y_RD, replace(handle, scores=handle.scores.detach()))


class KeepsItsPart(ReplicatedTokenDispatcher):
    """Adds nothing up: every rank has the sums of its own experts."""

    def _combine(self, y_RD, handle):
        return handle.slots.sum_rows(y_RD, handle.scores)


@pytest.mark.parametrize(
    ("name", "wrong", "ops", "said"),
    [
        ("all_gather", LosesScoreGradients, ("forward-backward",), "gradient of scores"),
        ("replicated", KeepsItsPart, ("combine", "forward-backward"), "sums: "),
    ],
)
def test_what_is_wrong_is_not_timed(name, wrong, ops, said, tmp_path, capsys):
    options = replace(TINY, op=ops, backend=(name, "local"), csv=tmp_path / "a.csv")
    assert command.run(options, {**DISPATCHERS, name: wrong}) == 1
    shown = capsys.readouterr().out
    assert "WRONG, not timed" in shown
    assert said in shown


def test_all_backends_run_and_report(tmp_path):
    options = replace(TINY, backend=tuple(OPS), op=(*ROUTED, "counts"), top_k=3, csv=tmp_path / "a.csv")
    assert command.run(options) == 0
    with options.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figures = {(row["op"], row["backend"], row["metric"]): row["value"] for row in rows}
    ran = {(row["op"], row["backend"]) for row in rows}
    assert ran == {(op, name) for name, ops in OPS.items() for op in ops if op in options.op}
    row, tokens = 12 * 4, 5
    assert float(figures["dispatch", "all_gather", "remote_bytes"]) == tokens * (row + 8 * 3)
    assert float(figures["combine", "all_gather", "remote_bytes"]) == tokens * row
    assert float(figures["combine", "replicated", "remote_bytes"]) == 2 * tokens * row
    for name in ("replicated", "local"):
        assert float(figures["dispatch", name, "remote_bytes"]) == 0
    waits = {name: float(figures["dispatch", name, "host_syncs"]) for name in OPS}
    assert waits == {"symm": 1, "all_to_all": 2, "all_gather": 2, "replicated": 1, "local": 2}
