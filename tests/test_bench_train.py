"""The demonstration: its gradients are those of one process, and a wrong dispatcher does not pass."""

import doctest
import importlib
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.dispatchers import DISPATCHERS, sharing_of
from bench.train import command, meter
from bench.train.agreement import CALM, MOST_MOVED, compare, compare_all
from bench.train.corpus import draw_windows
from bench.train.in_turn import Synchronous
from bench.train.options import Options
from bench.train.ranks import Trainer, exchange_config, train_rank
from bench.train.results import Training
from symm_a2a import SymmTokenDispatcher
from symm_a2a.testing import run_ranks

ROOT = Path(__file__).parent.parent
TINY = Options(ranks=2, steps=3, tokens=16, context=8, layers=2, experts=4, top_k=2, dim=16)


class OneProcess(Synchronous):
    """All experts in this process, by indexing: what any dispatcher is to be equal to."""

    def dispatch(self, x_TD, scores_TK, ids_TK):
        order = ids_TK.flatten().argsort(stable=True)
        token = order // ids_TK.shape[1]
        handle = (token, scores_TK.flatten()[order], len(x_TD))
        return x_TD[token], torch.bincount(ids_TK.flatten(), minlength=TINY.experts), handle

    def combine(self, y_RD, handle):
        token, score, num_tokens = handle
        return y_RD.new_zeros(num_tokens, y_RD.shape[1]).index_add(0, token, y_RD * score[:, None])


def two_steps(trainer):
    """Return, of two steps: the losses, every parameter's gradients, the parameters, the loads."""
    named = dict(trainer.model.named_parameters())
    losses, grads, loads = [], [], []
    for number in range(2):
        losses.append(trainer.step(number))
        grads.append({name: p.grad.clone() for name, p in named.items()})
        loads.append(trainer.load_E.tolist())
    return losses, grads, {name: p.detach() for name, p in named.items()}, loads


def two_steps_of_a_rank(rank, group, name):
    sharing = sharing_of(name)
    cfg = exchange_config(TINY, torch.float64, sharing=sharing)
    with DISPATCHERS[name](cfg, group, device="cpu") as dispatcher:
        return two_steps(Trainer(TINY, dispatcher, group, torch.float64, sharing=sharing))


@pytest.mark.parametrize("name", DISPATCHERS)
def test_ranks_train_as_one_process_does(name):
    whole = replace(TINY, ranks=1, tokens=TINY.ranks * TINY.tokens)
    losses, grads, parameters, loads = two_steps(Trainer(whole, OneProcess(), None, torch.float64))
    first, second = run_ranks(two_steps_of_a_rank, 2, name)

    assert losses[0] != losses[1]
    for rank_losses, _, _, rank_loads in (first, second):
        assert rank_losses == pytest.approx(losses, rel=1e-14)
        assert rank_loads == loads
    # Sums of some hundred terms in fp64; Adam divides a gradient by its size, but not by less than 1e-8.
    compared = [(grads[0], first[1][0], second[1][0], 1e-13), (grads[1], first[1][1], second[1][1], 1e-11)]
    for expected, of_first, of_second, tolerance in [*compared, (parameters, first[2], second[2], 1e-11)]:
        for key, value in expected.items():
            if "experts" in key and sharing_of(name).experts:
                torch.testing.assert_close(
                    torch.cat([of_first[key], of_second[key]]), value, rtol=0, atol=tolerance, msg=key
                )
            else:
                torch.testing.assert_close(of_first[key], value, rtol=0, atol=tolerance, msg=key)
                assert torch.equal(of_first[key], of_second[key])
            assert value.abs().max() > 1e-6


def test_same_seed_same_curve():
    only = replace(TINY, dispatcher=("all_to_all",))
    one, again = (run_ranks(train_rank, 2, only, DISPATCHERS)[0]["all_to_all"] for _ in range(2))
    other = run_ranks(train_rank, 2, replace(only, seed=1), DISPATCHERS)[0]["all_to_all"]
    assert one.losses == again.losses
    assert one.losses != other.losses


def test_command_writes_picture_and_figures(tmp_path):
    sizes = {"ranks": 2, "steps": 12, "tokens": 32, "context": 16, "layers": 1, "experts": 4, "dim": 16}
    arguments = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    arguments += ["--dispatcher", "both", "all_gather", "replicated", "local", "symm"]
    files = ["--out", str(tmp_path / "new"), "--json", str(tmp_path / "figures" / "train.json")]
    done = subprocess.run(
        [sys.executable, "-m", "bench", "train", *arguments, *files], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Wrote" in done.stdout.splitlines()[-1]
    # A line of progress in every tenth of a training, at most.
    assert done.stderr.count("\n") <= 10 * len(DISPATCHERS)
    lines = done.stdout.splitlines()
    assert sum("The trainings agree" in line for line in lines) == len(DISPATCHERS) - 1
    sent = next(line for line in lines if line.startswith("rows sent"))
    tokens = 12 * 2 * 32 * 2
    assert sent.split("  ")[-1].strip() == "none"
    assert f"{tokens:,} slots" in sent
    assert f"{tokens:,} tokens" in sent

    picture = (tmp_path / "new" / "train.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "figures" / "train.json").read_text())
    assert (figures["steps"], figures["ranks"]) == (12, 2)
    for name in DISPATCHERS:
        assert figures[f"first_loss_{name}"] == pytest.approx(math.log(256), abs=0.3)
        assert figures[f"last_loss_{name}"] < figures[f"first_loss_{name}"] - 0.3
        assert 0 < figures[f"seconds_in_exchanges_{name}"] < figures[f"seconds_{name}"] < figures["seconds"]
    assert figures["max_loss_difference"] < 1e-5
    assert figures["slots"] == 12 * 2 * 32 * 2
    # With both experts of some tokens on one rank, and never fewer than a copy per token.
    assert figures["slots"] / 2 < figures["copies"] < figures["slots"]
    assert figures["symmetric_bytes"] == exchange_config(Options(**sizes)).symmetric_bytes(2)


class SwapsTwoRows(SymmTokenDispatcher):
    """Gives two tokens of one rank each other's sums."""

    def combine(self, y_RD, handle, x_TD=None):
        out_TD = super().combine(y_RD, handle)
        return out_TD if self.rank else torch.cat([out_TD[1:2], out_TD[:1], out_TD[2:]])


class LosesAScoresGradient(SymmTokenDispatcher):
    """Right in the forward; the gradient of one slot's score does not arrive."""

    def dispatch(self, x_TD, scores_TK, topk_ids_TK, *args, **kwargs):
        if self.rank == 1:
            scores_TK = torch.cat([scores_TK[:1].detach(), scores_TK[1:]])
        return super().dispatch(x_TD, scores_TK, topk_ids_TK, *args, **kwargs)


@pytest.mark.parametrize("wrong", [SwapsTwoRows, LosesAScoresGradient])
def test_a_wrong_dispatcher_fails(wrong, tmp_path, capsys):
    options = replace(TINY, layers=1, steps=4, out=tmp_path)
    assert command.run(options, {**DISPATCHERS, "symm": wrong}) == 1
    assert "differ by more than rounding" in capsys.readouterr().out
    assert (tmp_path / "train.png").exists()


def test_one_dispatcher_alone(tmp_path):
    options = replace(TINY, ranks=1, dispatcher=("all_to_all",), out=tmp_path, json=tmp_path / "train.json")
    assert command.run(options) == 0
    figures = json.loads((tmp_path / "train.json").read_text())
    assert figures["max_loss_difference"] is None
    assert figures["last_loss_symm"] is None
    assert figures["last_loss_all_to_all"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 5}, "multiple of --ranks 2, got 5"),
        ({"tokens": 12}, "multiple of --context 8, got 12"),
        ({"top_k": 5}, "at most --experts 4, got 5"),
        ({"dim": 20}, "multiple of 16, got 20"),
        ({"steps": 0}, "positive --steps, got 0"),
        ({"link": "fast"}, "expected --link latency=SECONDS,gbps=NUMBER or one of the two, got 'fast'"),
        ({"dispatcher": ()}, "expected at least one --dispatcher, got none"),
        (
            {"link": "gbps=1", "dispatcher": ("all_to_all", "local")},
            "expected --link with --dispatcher symm or both, got all_to_all and local, without a link",
        ),
    ],
)
def test_options_that_do_not_fit(change, message, tmp_path, capsys):
    assert command.run(replace(TINY, out=tmp_path, **change)) == 2
    assert message in capsys.readouterr().err


def curves(losses, moved=None):
    """Return a training; `moved` maps a step to the slots that went elsewhere from then on."""
    loads = [[100, 100] for _ in losses]
    for step, slots in (moved or {}).items():
        for load in loads[step:]:
            load[:] = 100 - slots, 100 + slots
    return Training(list(losses), loads, [[0]], 0.0, 0.0)


FALLING = [5.0 - 0.1 * step for step in range(20)]


@pytest.mark.parametrize(
    ("agree", "factor", "since", "moved"),
    [
        (True, 1.0, 0, {}),
        (True, 1 + 2e-7, 0, {}),
        (False, 1 + 5e-6, CALM - 1, {}),
        (True, 1 + 5e-6, CALM, {}),
        (False, 1 + 5e-5, 19, {}),
        (False, math.nan, 19, {}),
        (True, 1.01, CALM, {CALM: MOST_MOVED}),
        (False, 1.01, CALM, {CALM + 1: 1}),
        (False, 1.1, CALM, {CALM: 1}),
        (False, 1.0, 0, {CALM: MOST_MOVED + 1}),
        (False, 1.0, 0, {CALM - 1: 1}),
    ],
)
def test_compare(agree, factor, since, moved):
    other = [loss * factor if step >= since else loss for step, loss in enumerate(FALLING)]
    result = compare(curves(FALLING), curves(other, moved))
    assert result.agree == agree
    assert result.parted_at == min(moved, default=None)
    assert ("more than rounding" in result.text) == (not agree)


def test_compare_all():
    def training(factor, since=0):
        return curves([loss * factor if step >= since else loss for step, loss in enumerate(FALLING)])

    assert compare_all({"a": curves(FALLING)}) is None
    pair = {"a": curves(FALLING), "b": training(1 + 5e-6, CALM)}
    assert compare_all(pair) == compare(*pair.values())
    result = compare_all({**pair, "c": training(1 + 2e-7), "d": curves([*FALLING[:-1], math.nan])})
    assert not result.agree
    assert [line.partition(":")[0] for line in result.text.splitlines()] == ["a and b", "a and c", "a and d"]
    assert result.differences[0] == compare_all({**pair, "b": training(1 + 2e-7)}).differences[0]
    assert result.differences[CALM] == compare_all(pair).differences[CALM]
    assert math.isnan(result.differences[-1])
    moved = {"a": curves(FALLING), "b": curves(FALLING, {7: 1}), "c": curves(FALLING, {6: 2})}
    assert compare_all(moved).parted_at == 6
    assert compare_all(moved).agree


class Sleeper(torch.autograd.Function):
    """Moves the clock on: by `forward` now, by `backward` in the backward."""

    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        ctx.clock, ctx.backward_seconds = clock, backward
        clock[0] += forward
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock[0] += ctx.backward_seconds
        return grad, None, None, None


class SlowDispatcher(OneProcess):
    world_size = 1

    def __init__(self, clock):
        self.clock = clock

    def dispatch(self, x_TD, scores_TK, ids_TK):
        rows, counts, handle = super().dispatch(Sleeper.apply(x_TD, self.clock, 1, 20), scores_TK, ids_TK)
        return rows, counts, Handle(*handle)

    def combine(self, y_RD, handle):
        return Sleeper.apply(super().combine(y_RD, handle), self.clock, 300, 4000)


class Handle(tuple):
    def __new__(cls, *values):
        return super().__new__(cls, values)

    sent = (7,)


def test_meter_counts_exchanges_alone(monkeypatch):
    clock = [0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    metered = meter.MeteredDispatcher(SlowDispatcher(clock))
    x = torch.randn(4, 3, requires_grad=True)
    before = Sleeper.apply(x, clock, 50_000, 50_000)
    rows, _, handle = metered.dispatch(before, torch.rand(4, 1), torch.zeros(4, 1, dtype=torch.int64))
    y = Sleeper.apply(rows, clock, 50_000, 50_000)
    Sleeper.apply(metered.combine(y, handle), clock, 50_000, 50_000).sum().backward()
    assert metered.watch.seconds == 4321
    assert metered.sent_W.tolist() == [7]


@pytest.mark.parametrize("name", ["agreement", "corpus", "in_turn", "link", "picture", "schedule_results"])
def test_examples(name):
    module = importlib.import_module(f"bench.train.{name}")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testmod(module, optionflags=flags)
    assert tried > 0
    assert failed == 0


def test_windows_are_pieces_of_the_text():
    text = torch.arange(50, dtype=torch.uint8)
    windows = draw_windows(text, 3, 4, 200, 9)
    assert windows.shape == (200, 10)
    assert torch.equal(windows, windows[:, :1] + torch.arange(10))
    assert windows.min() == 0
    assert windows.max() == 49
    assert torch.equal(windows, draw_windows(text, 3, 4, 200, 9))
    for seed, step in ((3, 5), (2, 4)):
        assert not torch.equal(windows, draw_windows(text, seed, step, 200, 9))
