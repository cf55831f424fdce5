"""Chaos: right where all is well, and loud where something is left, comes late, or is wrong."""

import json
import os
from unittest import mock

import pytest
import torch

from symm_a2a import SymmTokenDispatcher
from symm_a2a.__main__ import main
from symm_a2a.check import chaos
from symm_a2a.check.acts import WEIGHTS, draw_act
from symm_a2a.check.run import _after
from symm_a2a.lane import Lane

RANKS = 2


def seed_of(kind, ranks=RANKS):
    return next(seed for seed in range(1000) if draw_act(seed, ranks).kind == kind)


def run_chaos(capsys, *arguments, ranks=RANKS):
    code = main(["check", "--chaos", "--ranks", str(ranks), "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_every_kind_of_act_is_right_by_itself(capsys, kind):
    code, found = run_chaos(capsys, "--seconds", "0", "--seed", str(seed_of(kind)))
    assert code == 0, (found["details"], found["failures"])
    assert found["acts"] == {kind: 1}


@pytest.mark.timeout(240)
def test_a_minute_of_it_is_right_and_leaves_nothing(capsys):
    code, found = run_chaos(capsys, "--seconds", "60", ranks=4)
    assert code == 0, (found["details"], found["failures"])
    assert found["passed"]
    assert sum(found["acts"].values()) == found["cases"] > 3


def test_a_seed_gives_the_same_act_and_all_kinds_come():
    assert all(draw_act(seed, 4) == draw_act(seed, 4) for seed in range(50))
    assert {draw_act(seed, 4).kind for seed in range(200)} == set(WEIGHTS)
    assert {draw_act(seed, 4).victim for seed in range(200)} == {0, 1, 2, 3}
    for seed in range(200):
        parts = draw_act(seed, 4).members
        assert sorted(rank for part in parts for rank in part) == [0, 1, 2, 3]


def test_seeds_go_on_behind_the_acts_that_ran_and_the_ranks_that_were_killed():
    kinds = [draw_act(seed, RANKS).kind for seed in range(60)]
    killed = kinds.index("killed")
    assert _after(killed, RANKS, 0) == killed + 1
    assert sum(kind != "killed" for kind in kinds[: _after(0, RANKS, 40)]) == 40


def keeps_memory(*given):
    """Whatever is closed, its memory stays mapped."""
    kept, close = [], SymmTokenDispatcher._close

    def keeping(self, *, failed):
        if self._owns_arena and not self.arena.closed:
            kept.extend(self.arena.memory.arenas)
        close(self, failed=failed)

    with mock.patch.object(SymmTokenDispatcher, "_close", keeping):
        chaos.run_acts(*given)


def few_acts(act, *given):
    """Three, the first of which is taken for what a process holds."""
    with (
        mock.patch.object(chaos, "run_act", act),
        mock.patch.object(chaos, "begins", side_effect=[True, True, True, False]),
        mock.patch.object(chaos, "_SETTLED", 0),
    ):
        chaos.run_acts(*given)


def keeps_descriptors(*given):
    run_act = chaos.run_act

    def opening(*arguments):
        os.dup(0)
        return run_act(*arguments)

    few_acts(opening, *given)


def keeps_bytes(*given):
    kept, run_act = [], chaos.run_act

    def growing(*arguments):
        kept.append(torch.ones(25 << 20))
        return run_act(*arguments)

    few_acts(growing, *given)


def says_nothing(*given):
    """A rank that gives up does not tell its peers, which have to time out."""
    with mock.patch.object(Lane, "abort"):
        chaos.run_acts(*given)


def takes_anything(*given):
    with mock.patch.object(SymmTokenDispatcher, "dispatch"):
        chaos.run_acts(*given)


@pytest.mark.parametrize(
    ("fault", "kind", "what"),
    [
        (keeps_memory, "plain", "mappings of shared memory"),
        (keeps_descriptors, "wrong", "open descriptors"),
        (keeps_bytes, "wrong", "resident bytes"),
        (says_nothing, "thrown", "thrown"),
        (takes_anything, "wrong", "wrong arguments"),
    ],
)
def test_a_fault_is_found_with_its_seed(capsys, monkeypatch, fault, kind, what):
    monkeypatch.setattr("symm_a2a.check.run.run_acts", fault)
    seed = seed_that_shows(kind)
    code, found = run_chaos(capsys, "--seconds", "0", "--seed", str(seed))
    assert code == 1
    assert found["mismatches"] > 0
    assert what in {detail["what"] for detail in found["details"]}


def seed_that_shows(kind):
    """A seed whose victim throws before the others have all they want."""
    if kind != "thrown":
        return seed_of(kind)
    return next(s for s in range(1000) if draw_act(s, RANKS).kind == kind and draw_act(s, RANKS).at < 3)


def dies_quietly(*given):
    with (
        mock.patch("symm_a2a.memory.host.HostMemory.lost_peers", return_value=[]),
        mock.patch.object(chaos, "run_rounds", impatient(chaos.run_rounds)),
    ):
        chaos.run_killed(*given)


def impatient(run_rounds):
    def run(*given):
        return run_rounds(*given, timeout=1.0)

    return run


def test_who_times_out_on_a_killed_rank_has_not_noticed_its_end(capsys, monkeypatch):
    monkeypatch.setattr("symm_a2a.check.run.run_killed", dies_quietly)
    code, found = run_chaos(capsys, "--seconds", "0", "--seed", str(seed_of("killed")))
    assert code == 1
    assert [detail["expected"] for detail in found["details"]] == ["PeerLostError"]
    assert "PeerTimeoutError" in found["details"][0]["got"]


def test_the_report_says_what_happened_and_how_to_repeat_it(capsys, monkeypatch):
    monkeypatch.setattr("symm_a2a.check.run.run_acts", keeps_memory)
    seed = seed_of("plain")
    assert main(["check", "--chaos", "--ranks", "2", "--seconds", "0", "--seed", str(seed)]) == 1
    out = capsys.readouterr().out
    assert f"python -m symm_a2a check --chaos --ranks 2 --seed {seed} --seconds 0" in out
    assert "acts              1 plain" in out
    assert "memory of rank 0" in out
