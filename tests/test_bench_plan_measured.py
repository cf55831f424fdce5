"""The plan from measured stages: what a synchronous run shows foretells Domino's run, on real processes."""

import json
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import symm_a2a
from bench import __main__ as bench_main
from bench.plan import measured_file
from bench.plan.measured import KINDS
from bench.plan.operations import step
from bench.plan.recorded import from_timelines
from bench.plan.replay import replay
from bench.plan.schedules import schedule
from symm_a2a.testing import run_ranks

WITHIN = 0.15
"""The largest share of a real step by which its prediction may be off."""

STAGE_SECONDS = {"pre": 0.06, "experts": [0.06, 0.07], "post": 0.02}
ONE_RANK = {
    "compute": {"forward": STAGE_SECONDS, "backward": STAGE_SECONDS},
    "exchanges": {kind.name.lower(): {"launch": 0.01, "join": 0.02, "bytes": 1e6} for kind in KINDS},
}


@pytest.fixture
def stages(tmp_path):
    """A file of measured stages."""
    file = tmp_path / "stages.json"
    file.write_text(json.dumps({"layers": 2, "latency": 0.01, "bandwidth": 1e8, "ranks": [ONE_RANK] * 2}))
    return file


def run(tmp_path, *arguments):
    return bench_main.main(["plan", "--out", str(tmp_path / "out"), *arguments])


def test_measured_stages_of_a_file(stages, tmp_path, capsys):
    json_file = tmp_path / "plan.json"
    assert run(tmp_path, "--measured", str(stages), "--json", str(json_file)) == 0
    assert "Computed from measured stages: 2 ranks, 2 layers." in capsys.readouterr().out
    first, second, *_ = json.loads(json_file.read_text())["schedules"]
    flights = 4 * 2 * (0.01 + 0.02 + 0.01 + 0.01)
    assert first["seconds"] == pytest.approx(2 * (2 * 0.08 + 0.13) + flights)
    assert second["seconds"] < first["seconds"]
    again = tmp_path / "again.json"
    again.write_text(json.dumps(measured_file.as_object(measured_file.from_file(stages))))
    assert measured_file.from_file(again) == measured_file.from_file(stages)


@pytest.mark.parametrize(
    "broken", [{}, {"layers": 2, "ranks": [ONE_RANK]}, {"layers": 3, "ranks": [ONE_RANK] * 2}]
)
def test_a_wrong_file_of_measured_stages(broken, tmp_path, capsys):
    file = tmp_path / "stages.json"
    file.write_text(json.dumps(broken))
    assert run(tmp_path, "--measured", str(file)) == 2
    assert capsys.readouterr().err.startswith("bench plan: expected")


@pytest.mark.parametrize("M", [1, 2, 3])
def test_stages_are_read_off_timelines(M, stages):
    given = measured_file.from_file(stages)
    operations = step(1, given.layers)
    half = len(operations) // 2
    there, back = (
        replay(part, given.costs(1), given.machine).timelines
        for part in (operations[:half], operations[half:])
    )
    read = from_timelines(there, back, given.link)
    assert schedule(read, M).seconds == pytest.approx(schedule(given, M).seconds)
    # Without a link to know of, the time in flight is one that nothing has to share.
    guessed = from_timelines(there, back)
    assert guessed.link.latency == pytest.approx(given.link.seconds(1_000_000))
    assert schedule(guessed, 1).seconds == pytest.approx(schedule(given, 1).seconds)


def test_timelines_of_another_kind_are_refused(stages):
    given = measured_file.from_file(stages)
    both = replay(step(2, 2), given.costs(2)).timelines
    with pytest.raises(ValueError, match="record each forward and backward apart"):
        from_timelines(both, both)
    with pytest.raises(ValueError, match="same ranks"):
        from_timelines([], [])


LAYERS, MICRO_BATCHES, TOKENS, HIDDEN, EXPERTS, TOP_K = 3, 2, 4, 8, 4, 2
NAPS = {"pre": 0.07, "experts": 0.07, "post": 0.02}
LINK = symm_a2a.Link(latency=0.2, bandwidth=2500.0)
"""Slow: a flight takes 0.25 seconds, longer than what a micro-batch computes meanwhile, so that some of it is
exposed, and what the link does matters."""


class Nap(torch.autograd.Function):
    """Compute that takes a while, and no part of a processor that others would have to leave it."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


def both_ways(rank, group):
    """Timelines of micro-batches one after another, forward and backward apart, and of Domino's steps."""
    config = symm_a2a.EPConfig(
        num_experts=EXPERTS, top_k=TOP_K, hidden_dim=HIDDEN, max_tokens_per_rank=TOKENS, dtype=torch.float32,
        capacity=2 * TOKENS * TOP_K, timeout=30,
    )  # fmt: skip
    gen = torch.Generator().manual_seed(rank)
    scores = torch.rand(TOKENS, TOP_K, generator=gen)
    ids = torch.rand(TOKENS, EXPERTS, generator=gen).topk(TOP_K).indices
    xs = [torch.ones(TOKENS, HIDDEN, requires_grad=True) for _ in range(MICRO_BATCHES)]
    with symm_a2a.SymmTokenDispatcher(config, group, link=LINK) as dispatcher:

        def block(x):
            for _ in range(LAYERS):
                x = Nap.apply(x, NAPS["pre"])
                rows, _, handle = yield dispatcher.dispatch_async(x, scores, ids)
                x = yield dispatcher.combine_async(Nap.apply(rows, NAPS["experts"]), handle)
                x = Nap.apply(x, NAPS["post"])
            return x

        def recorded(work):
            dist.barrier(group)
            with dispatcher.record() as recording:
                result = work()
            return result, recording.timeline

        def one_after_another(x):
            (out,), there = recorded(lambda: symm_a2a.Domino(dispatcher, 1).run(block, [x]))
            return there, recorded(out.sum().backward)[1]

        def interleaved():
            outs = symm_a2a.Domino(dispatcher, MICRO_BATCHES).run(block, xs)
            sum(out.sum() for out in outs).backward()

        one_after_another(xs[0])  # what is only slow the first time
        alone = [one_after_another(x) for x in xs]
        return alone, [recorded(interleaved)[1] for _ in range(2)]


@pytest.mark.alone
def test_the_prediction_of_a_real_run():
    results = run_ranks(both_ways, 2)
    forwards = [there for alone, _ in results for there, _ in alone]
    backwards = [back for alone, _ in results for _, back in alone]
    measured = from_timelines(forwards, backwards, LINK)

    # Of two real runs the one that other processes have disturbed less; of each its slower rank.
    runs = zip(*(steps for _, steps in results), strict=True)
    real, on_ranks = min((max(one.span.seconds for one in run), run) for run in runs)

    def predicted(M, work):
        """Seconds of all micro-batches; a schedule has them for one."""
        return schedule(work, M).seconds * MICRO_BATCHES

    def off(seconds):
        return abs(seconds / real - 1)

    figures = {
        "real": real,
        "predicted": predicted(MICRO_BATCHES, measured),
        "without its link": predicted(MICRO_BATCHES, replace(measured, link=symm_a2a.Link())),
        "without overlap": predicted(1, measured),
    }
    print(figures)
    assert off(figures["predicted"]) < WITHIN, figures
    assert off(figures["without its link"]) > WITHIN, figures
    assert off(figures["without overlap"]) > WITHIN, figures
    # Not the time alone: every launch and join in its order, those that autograd chose as well.
    foretold = schedule(measured, MICRO_BATCHES).replay.timelines
    for real_one, foretold_one in zip(on_ranks, foretold, strict=True):
        assert real_one.events() == foretold_one.events()
        bytes_of = [[e.nbytes for e in one.exchanges] for one in (real_one, foretold_one)]
        assert bytes_of[0] == bytes_of[1]
