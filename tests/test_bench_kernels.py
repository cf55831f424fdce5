"""What is read from compiled kernels is right, and each rule about them is noticed when it is broken."""

import doctest
import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from bench.kernels import command
from bench.kernels.flow import hottest_loop, loads_in_flight
from bench.kernels.gpus import GPUS
from bench.kernels.loops import find_loops
from bench.kernels.measure import in_processes
from bench.kernels.options import Options, ShapeName
from bench.kernels.rules import FLAGS, RULES, check, check_forms, check_sources
from bench.kernels.sass import Instruction, parse
from bench.kernels.traffic import valid_share
from bench.shapes import SHAPES
from tests.faulty_kernels import FAULTS, measure_fault

ROOT = Path(__file__).parent.parent
BROKEN = {
    "none": set(),
    "no alignment hint": {"store_bytes"},
    "relaxed flag": {"releases", "order"},
    "no barrier": {"order"},
    "no barrier behind a store": {"order"},
    "no barrier around a loop": {"order"},
    "rows after the count": {"order"},
    "spills": {"loop_spills", "stack"},
    "too many registers": {"program_registers", "resident_warps"},
    "read-only loads": {"readonly_loads"},
    "small grid": {"resident_warps", "tile_bytes", "flight_bytes"},
}


@pytest.fixture(scope="module")
def measured():
    cases = [(fault, "sm_90") for fault in FAULTS]
    cases += [("no alignment hint", "sm_80"), ("no alignment hint", "sm_100"), ("none", "gfx942")]
    found = in_processes([(measure_fault, case) for case in cases])
    return {cases[number]: figures for number, figures in found}


def figures_broken(breaches):
    return {breach.rule.split(":")[0] for breach in breaches}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_rule_is_noticed_when_broken(measured, fault):
    figures = measured[fault, "sm_90"]
    breaches = check([figures])
    assert figures_broken(breaches) == BROKEN[fault]
    for breach in breaches:
        text = str(breach)
        for part in (figures.kernel, "sm_90", "olmoe", "expected", "got"):
            assert part in text


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_stores_without_a_hint_are_of_one_element(measured, target):
    figures = measured["no alignment hint", target]
    assert figures.store_bytes == 2
    assert figures.load_bytes == 16
    assert "expected at least 16, got 2" in str(check([figures])[0])


def test_figures_of_a_kernel_that_can_be_counted_by_hand(measured):
    """Two rows of 1024 bfloat16 in a program of 4 warps, 8 programs on each multiprocessor.

    They are taken for one of two slots of two copies.
    """
    figures = measured["none", "sm_90"]
    assert (figures.warps, figures.grid, figures.resident_warps) == (4, 8 * 132, 32)
    assert (figures.load_bytes, figures.store_bytes, figures.spills, figures.stack) == (16, 16, 0, 0)
    share = valid_share(SHAPES["olmoe"], "_gather_kernel", (2, 1024))
    assert 0.5 < share < 1
    assert figures.tile_bytes == figures.flight_bytes == pytest.approx(8 * 2 * 1024 * 2 * share)
    # A thread loads and stores 32 bytes in a round, of what it loads a share.
    count = 2 * (1 + share) * figures.instructions
    assert count == pytest.approx(round(count))
    assert 4 < figures.instructions < 40


def test_amd_kernels_are_compiled_and_judged_by_their_order_alone(measured):
    figures = measured["none", "gfx942"]
    assert figures.registers > 8
    assert (figures.spills, figures.stack) == (0, 0)
    assert figures.flight_bytes is None
    assert check([figures]) == []
    assert figures_broken(check([replace(figures, order=("late",), stack=400)])) == {"order"}


def test_rules_ask_for_what_they_name(measured):
    good = measured["none", "sm_90"]
    # A kernel of many accesses of rows in which none were found is no kernel without faults.
    assert figures_broken(check([replace(good, store_bytes=None)])) == {"store_bytes"}
    assert figures_broken(check([replace(good, kernel="_new_kernel")])) == {"acquires", "releases"}
    few = replace(good, resident_warps=2.0, tile_bytes=2.0, flight_bytes=2.0, shape="small")
    assert check([few]) == []
    narrow = replace(good, load_bytes=4, kernel="_finish_kernel[HAS_SCORES=0,KIND=1]")
    assert "load_bytes" in figures_broken(check([narrow]))
    assert "load_bytes" not in figures_broken(check([replace(narrow, aligned=False)]))
    wide = replace(good, warps=16, registers=100)
    assert check([wide]) == []
    assert figures_broken(check([replace(wide, registers=129)])) == {"program_registers"}


def test_rules_are_of_forms_that_are_launched(measured):
    good = measured["none", "sm_90"]
    missing = check_forms([good])
    assert {breach.kernel for breach in missing} == set(FLAGS) - {good.kernel}
    assert check_forms([replace(good, kernel=form) for form in FLAGS]) == []


def test_only_the_wait_loops_poll_and_only_through_atomics(tmp_path):
    assert check_sources(command.SOURCES) == []
    wait = "while tl.min(words) < epoch:\n    words = {}(flags_ptr)\n"
    (tmp_path / "flags.py").write_text(wait.format("tl.atomic_add"))
    assert check_sources(tmp_path) == []
    (tmp_path / "flags.py").write_text(wait.format("tl.load"))
    (breach,) = check_sources(tmp_path)
    assert "flags.py" in str(breach)
    assert "tl.load" in str(breach)
    (tmp_path / "flags.py").write_text("while left > 0:\n    left -= 1\n")
    assert "waits for nothing" in str(*check_sources(tmp_path))
    (tmp_path / "flags.py").write_text(wait.format("tl.atomic_add"))
    (tmp_path / "gather.py").write_text(wait.format("tl.atomic_add"))
    assert "'gather.py': 1" in str(*check_sources(tmp_path))


def test_a_jump_back_from_a_block_moved_to_the_end_is_no_loop():
    code = parse(
        """
        /*0000*/ @P0 BRA `(.L_x_3) ;
    .L_x_0:
        /*0010*/ MOV R1, R2 ;
    .L_x_1:
        /*0020*/ IADD3 R1, R1, R2, RZ ;
        /*0030*/ @!P1 BRA `(.L_x_2) ;
        /*0040*/ LDL R3, [R1] ;
    .L_x_2:
        /*0050*/ @P2 BRA `(.L_x_1) ;
        /*0060*/ EXIT ;
    .L_x_3:
        /*0070*/ MOV R2, R4 ;
        /*0080*/ BRA `(.L_x_0) ;
    """.replace("    .L", ".L")
    )
    assert find_loops(code) == [frozenset({2, 3, 4, 5})]


def test_a_loop_left_by_a_call_is_found():
    code = parse("""
.L_x_0:
        /*0010*/ IADD3 R1, R1, R2, RZ ;
        /*0020*/ @P0 CALL.REL.NOINC `(.L_x_1) ;
        /*0030*/ BRA `(.L_x_0) ;
.L_x_1:
        /*0040*/ STG.E.128 desc[UR4][R2.64], R4 ;
        /*0050*/ BRA.U !UP0, `(.L_x_1) ;
        /*0060*/ EXIT ;
    """)
    assert sorted(map(sorted, find_loops(code))) == [[0, 1, 2], [3, 4]]
    assert code[3].stores
    assert (code[3].width, code[3].written) == (16, None)


def test_the_innermost_loop_that_loads_is_the_hottest():
    load, store = Instruction("LDG.E.128", "R4, [R2.64]"), Instruction("STG.E.128", "[R2.64], R4")
    code = [load, store, load, store, store, store]
    outer, inner, zeros = frozenset(range(4)), frozenset({2, 3}), frozenset({4, 5})
    moves = dict.fromkeys(range(6), 1.0)
    assert hottest_loop(code, [outer, inner, zeros], moves) == inner
    # A loop of stores, inside one that loads what they store, is part of it.
    assert hottest_loop(code, [frozenset(range(2, 6)), zeros], moves) == frozenset(range(2, 6))
    assert hottest_loop(code, [zeros], moves) == zeros
    assert hottest_loop(code, [], moves) == frozenset()


def test_loads_for_the_next_round_are_in_flight():
    use, load = Instruction("FADD", "R8, R8, R4"), Instruction("LDG.E.128", "R4, [R2.64]")
    other = Instruction("LDG.E.64", "R12, [R2.64]")
    # The load at the end waits through the next round's other load, up to its own use.
    code = [other, use, load]
    assert loads_in_flight(code, frozenset(range(3)), {0: 1.0, 2: 1.0}) == 24
    assert loads_in_flight(code, frozenset(range(3)), {2: 0.25}) == 4


def test_a_multiprocessor_is_filled_by_what_is_scarcest():
    resident = GPUS["sm_90"].resident
    assert resident(registers=32, shared=1024, warps=4, grid=10**6) == 16
    assert resident(registers=33, shared=1024, warps=4, grid=10**6) == 12
    assert resident(registers=32, shared=100 << 10, warps=4, grid=10**6) == 2
    assert resident(registers=32, shared=1024, warps=1, grid=10**6) == 32
    assert resident(registers=32, shared=1024, warps=4, grid=66) == 0.5
    assert GPUS["sm_80"].resident(registers=32, shared=0, warps=4, grid=108) == 1


def test_tiles_of_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="expected _new_kernel in"):
        valid_share(SHAPES["olmoe"], "_new_kernel", (1, 4, 1024))
    assert valid_share(SHAPES["olmoe"], "_new_kernel", (4, 1024)) == 1
    assert valid_share(SHAPES["olmoe"], "_gather_kernel", (4, 1024), "store") == 1


def test_shares_of_tiles_are_those_of_drawn_routings():
    """One rank's copies among 20,000 tokens: slots come first, and a round is as long as its longest copy."""
    shape = SHAPES["olmoe"]
    draws = torch.rand(20_000, shape.experts, generator=torch.Generator().manual_seed(0))
    experts = draws.topk(shape.top_k).indices
    slots = (experts < shape.experts // shape.ranks).sum(1)
    slots = slots[slots > 0][:10_000]
    for rows, step in ((1, 2), (1, 4), (4, 2)):
        rounds = (slots.view(-1, rows).amax(1) + step - 1) // step
        share = slots.sum() / (rounds.sum() * rows * step)
        expected = valid_share(shape, "_expand_grad_kernel", (rows, step, 1024))
        assert share.item() == pytest.approx(expected, abs=0.01)
        if step == 2:
            assert valid_share(shape, "_gather_kernel", (rows, 1024)) == expected
    copies = (experts // (shape.experts // shape.ranks)).sort(1).values.diff(dim=1).ne(0).sum(1) + 1
    expected = valid_share(shape, "_finish_kernel", (1, 8, 1024))
    assert (copies / 8).mean().item() == pytest.approx(expected, abs=0.005)


def test_shapes_can_be_named():
    assert set(get_args(ShapeName)) == {*SHAPES, "all"}
    assert Options(shape=("small", "all")).shapes == tuple(SHAPES)
    assert Options(shape=("small", "small")).shapes == ("small",)


def test_command_says_which_rules_are_broken(measured, monkeypatch, capsys, tmp_path):
    good, bad = measured["none", "sm_90"], measured["no alignment hint", "sm_90"]
    file = tmp_path / "new" / "kernels.json"
    forms = [replace(good, kernel=form) for form in FLAGS]
    monkeypatch.setattr(command, "_measure", lambda options: forms)
    assert command.run(Options(json=file), rules=RULES[:3]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Wrote {file}"
    monkeypatch.setattr(command, "_measure", lambda options: [*forms, bad])
    assert command.run(Options(json=file), rules=RULES[:3]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BROKEN")]
    assert "for sm_90, shape olmoe: expected at least 16, got 2" in line
    written = json.loads(file.read_text())
    assert len(written["figures"]) == len(FLAGS) + 1
    assert written["breaches"][0]["found"] == 2


def test_command_measures_the_kernels(tmp_path):
    file = tmp_path / "kernels.json"
    arguments = ["--arch", "sm_90", "--shape", "small", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", "kernels", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    written = json.loads(file.read_text())
    assert {kernel["kernel"] for kernel in written["figures"]} == set(FLAGS)
    assert done.returncode == (1 if written["breaches"] else 0), done.stdout + done.stderr
    assert done.stdout.count("BROKEN") == len(written["breaches"])
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("name", ["flow", "gpus", "ir", "loops", "polls", "reuse", "sass", "traffic"])
def test_examples(name):
    module = importlib.import_module(f"bench.kernels.{name}")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testmod(module, optionflags=flags)
    assert tried > 0
    assert failed == 0
