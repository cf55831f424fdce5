"""`bench train --schedule domino`: micro-batches train as the whole batch does, and the shares are right."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

import symm_a2a
from bench.dispatchers import DISPATCHERS
from bench.trace import read_trace
from bench.train import command
from bench.train.link import parse_link
from bench.train.model import whole_batch
from bench.train.moe import Routed
from bench.train.options import Options
from bench.train.ranks import Trainer, exchange_config
from bench.train.schedule_results import merge_schedules, schedule_figures
from bench.train.schedule_table import format_schedules
from bench.train.schedules import ScheduleRecord
from symm_a2a.kernels.channel import Kind
from symm_a2a.testing import run_ranks
from symm_a2a.timeline import Exchange, Interval, Timeline
from tests.test_bench_train import OneProcess, SwapsTwoRows, curves, two_steps

TINY = Options(
    ranks=2, steps=2, tokens=32, context=8, layers=2, experts=4, dim=16, schedule="domino", micro_batches=2
)


def two_steps_of_micro_batches(rank, group, micro_batches):
    cfg = exchange_config(TINY, torch.float64, micro_batches)
    with symm_a2a.SymmTokenDispatcher(cfg, group) as dispatcher:
        domino = symm_a2a.Domino(dispatcher, micro_batches)
        return two_steps(Trainer(TINY, dispatcher, group, torch.float64, domino))


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_micro_batches_train_as_the_whole_batch_does(micro_batches):
    whole = replace(TINY, ranks=1, tokens=TINY.ranks * TINY.tokens)
    losses, grads, _, loads = two_steps(Trainer(whole, OneProcess(), None, torch.float64))
    ranks = run_ranks(two_steps_of_micro_batches, 2, micro_batches)
    for rank_losses, _, _, rank_loads in ranks:
        assert rank_losses == pytest.approx(losses, rel=1e-12)
        assert rank_loads == loads
    for step, expected in enumerate(grads):
        for key, value in expected.items():
            parts = [rank[1][step][key] for rank in ranks]
            got = torch.cat(parts) if "experts" in key else parts[0]
            torch.testing.assert_close(got, value, rtol=1e-10, atol=(1e-13, 1e-11)[step], msg=key)
            assert value.abs().max() > 1e-6


def test_the_balance_is_that_of_the_whole_batch():
    """One micro-batch sends all to expert 0, the other, three times as large, all to expert 1."""

    def micro_batch(tokens, expert, probabilities, loss):
        load_E = torch.tensor([0, 0])
        load_E[expert] = tokens
        routing = Routed(torch.tensor(probabilities), load_E, torch.full((tokens, 1), expert))
        return torch.tensor(loss), [routing, routing]

    outputs = [micro_batch(10, 0, [0.8, 0.2], 4.0), micro_batch(30, 1, [0.4, 0.6], 2.0)]
    batch = whole_batch(outputs, symm_a2a.token_shares([10, 30]), None)
    assert batch.loss.item() == pytest.approx(2.5)
    assert batch.load_E.tolist() == [20, 60]
    # Two layers of 2 * (0.25 * 0.5 + 0.75 * 0.5); micro-batch by micro-batch it would be 2.6.
    assert batch.imbalance.item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("text", "latency", "gbps"),
    [
        ("latency=0.02,gbps=1", 0.02, 1),
        ("gbps=0.5, latency=20ms", 0.02, 0.5),
        ("latency=250us", 250e-6, math.inf),
        ("latency=1s", 1.0, math.inf),
        ("gbps=8", 0.0, 8),
    ],
)
def test_links(text, latency, gbps):
    link = parse_link(text)
    assert link.latency == pytest.approx(latency)
    assert link.bandwidth == pytest.approx(gbps * 125e6)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "latency",
        "latency=",
        "latency=5m",
        "gbps=1ms",
        "latency=1,latency=2",
        "speed=1",
        "gbps=1,",
    ],
)
def test_texts_that_are_no_link(text):
    with pytest.raises(ValueError, match=f"expected --link .*, got {re.escape(repr(text))}"):
        parse_link(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (f"latency={number}", "expected latency from 0 to 3600 seconds")
            for number in ("-1", "inf", "nan")
        ),
        *(
            (f"gbps={number}", "expected bandwidth of at least 1000 bytes a second")
            for number in ("0", "nan")
        ),
    ],
)
def test_links_out_of_range(text, message):
    with pytest.raises(ValueError, match=f"--link {text}: {message}"):
        parse_link(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batches": 3}, "to be a multiple of --micro-batches 3, got 4"),
        ({"micro_batches": 0}, "positive --micro-batches, got 0"),
        ({"dispatcher": ("all_to_all", "all_gather")}, "expected --dispatcher symm with --schedule"),
        ({"schedule": None}, "expected --schedule domino beside --micro-batches"),
        ({"link": "latency=soon"}, "expected --link latency=SECONDS,gbps=NUMBER or one of the two"),
    ],
)
def test_options_that_do_not_fit(change, message, tmp_path, capsys):
    assert command.run(replace(TINY, out=tmp_path, **change)) == 2
    assert message in capsys.readouterr().err


def timeline(*exchanges):
    """Return one of exchanges given as kind, launch, join, and arrival."""
    made = [
        Exchange(kind, 0, epoch, 100, Interval(launch - 1, launch), arrival, Interval(join, join + 5))
        for epoch, (kind, launch, join, arrival) in enumerate(exchanges, start=1)
    ]
    return Timeline(tuple(made), Interval(0, 100))


def record(*timelines, seconds=1.0):
    losses = [2.0, 1.0][: len(timelines)]
    loads = [[4, 4]] * len(timelines)
    return ScheduleRecord(losses, loads, [one.stats() for one in timelines], seconds, timelines[-1])


def test_shares_are_of_all_ranks_and_steps():
    late = timeline((Kind.DISPATCH, 10, 10, 14), (Kind.COMBINE_BACKWARD, 20, 20, 30))
    # 3 of 4 seconds hidden; 10 of 10; nothing in flight, for the peer's rows came before the launch.
    hides = timeline((Kind.DISPATCH, 10, 13, 14), (Kind.DISPATCH_BACKWARD, 20, 40, 30))
    first = timeline((Kind.COMBINE, 10, 13, 9), (Kind.COMBINE_BACKWARD, 20, 20, 21))
    reports = [
        {"sync": record(late, late), "domino": record(hides, hides, seconds=3.0)},
        {"sync": record(late, late, seconds=2.0), "domino": record(first, first)},
    ]
    trainings = merge_schedules(reports)
    options = replace(TINY, layers=4, micro_batches=2, link="latency=4ms")
    agreement = command.compare(trainings["sync"], trainings["domino"])
    figures = schedule_figures(options, trainings, agreement, 9.0)

    assert figures["hidden_forward"] == pytest.approx(3 / 4)
    assert figures["hidden_backward"] == pytest.approx(20 / 22)
    assert figures["hidden_forward_sync"] == figures["hidden_backward_sync"] == 0
    assert (figures["in_flight_forward_sync"], figures["exposed_forward_sync"]) == (16, 16)
    assert (figures["in_flight_forward_domino"], figures["exposed_forward_domino"]) == (8, 2)
    assert (figures["in_flight_backward_domino"], figures["exposed_backward_domino"]) == (22, 2)
    assert (figures["seconds_sync"], figures["seconds_domino"], figures["seconds"]) == (2.0, 3.0, 9.0)
    assert (figures["loss_difference"], figures["agree"]) == (0, True)
    assert (figures["micro_batches"], figures["link"], figures["schedule"]) == (2, "latency=4ms", "domino")

    lines = [
        re.split(r"  +", line.strip()) for line in format_schedules(options, trainings, 9.0).splitlines()
    ]
    for row in (
        ["tokens of a rank", "1 x 32", "2 x 16"],
        ["last loss", "1.0000", "1.0000"],
        ["forward, in flight *", "16.00 s", "8.00 s"],
        ["forward, asleep in joins", "16.00 s", "2.00 s"],
        ["forward, hidden", "0.0%", "75.0%"],
        ["forward, uncovered on average", "4000.0 of 4000.0 ms", "500.0 of 2000.0 ms"],
        ["backward, hidden", "0.0%", "90.9%"],
        ["in all steps **", "2.0 s", "3.0 s"],
    ):
        assert row in lines
    text = " ".join(format_schedules(options, trainings, 9.0).split())
    assert "over an emulated link: latency 4 ms." in text
    assert "here 93.8%" in text
    assert "Domino took 150% of the time." in text


def test_loss_difference_is_the_largest():
    trainings = merge_schedules([{name: record(timeline(), timeline()) for name in ("sync", "domino")}])
    trainings["domino"] = replace(trainings["domino"], losses=[2.5, 1.25])
    agreement = command.compare(curves([2.0, 1.0]), curves([2.5, 1.25]))
    figures = schedule_figures(TINY, trainings, agreement, 9.0)
    assert (figures["loss_difference"], figures["agree"]) == (0.5, False)
    # Nothing was in flight.
    assert figures["hidden_forward"] == 0


@pytest.mark.alone
def test_domino_hides_what_is_in_flight(tmp_path, capsys):
    options = replace(
        TINY, tokens=256, context=32, dim=64, experts=16, layers=3, link="latency=30ms", out=tmp_path,
        json=tmp_path / "train.json", trace=tmp_path / "trace.npz",
    )  # fmt: skip
    assert command.run(options) == 0
    figures = json.loads((tmp_path / "train.json").read_text())
    assert figures["agree"]
    assert figures["loss_difference"] < 1e-5
    assert figures["first_loss_domino"] == pytest.approx(math.log(256), abs=0.3)
    for direction in ("forward", "backward"):
        for name, micro_batches in (("sync", 1), ("domino", 2)):
            # Of two ranks, two steps, three layers; the flight of one's rows is the other's, or longer.
            exchanges = figures[f"exchanges_{direction}_{name}"]
            assert exchanges == 2 * 2 * 3 * 2 * micro_batches
            assert figures[f"in_flight_{direction}_{name}"] > 0.9 * 0.03 * exchanges
        assert figures[f"hidden_{direction}_sync"] < 0.1
    assert figures["hidden_forward"] > 0.5
    assert figures["hidden_backward"] > 0.3

    assert read_trace(options.trace).ids.shape == (2, 3, 2, 256, 2)

    shown = capsys.readouterr().out
    assert "2 micro-batches" in shown
    assert "The trainings agree" in shown
    assert f"{figures['hidden_forward']:.1%}" in shown
    assert (tmp_path / "domino.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "domino.trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= {
        "lane 0",
        "lane 1",
    }
    # One step alone.
    assert sum(event["name"] == "dispatch" for event in events) == 2 * 3 * 2


def test_schedules_that_differ_fail(tmp_path, capsys):
    """Its synchronous combine is wrong and its launched one right."""
    options = replace(TINY, steps=1, layers=1, out=tmp_path)
    assert command.run(options, {**DISPATCHERS, "symm": SwapsTwoRows}) == 1
    assert "differ by more than rounding" in capsys.readouterr().out
    assert (tmp_path / "domino.png").exists()


def test_either_name_asks_for_both_schedules():
    for schedule in ("sync", "domino"):
        assert replace(TINY, schedule=schedule).names == ("sync", "domino")


def test_dispatchers_over_a_link(tmp_path, capsys):
    options = replace(
        TINY,
        schedule=None,
        micro_batches=None,
        steps=1,
        layers=1,
        link="latency=200ms",
        out=tmp_path,
        json=tmp_path / "train.json",
    )
    assert command.run(options) == 0
    figures = json.loads((tmp_path / "train.json").read_text())
    # Each of four exchanges answers the one before it.
    assert figures["seconds_in_exchanges_symm"] > 0.6
    assert figures["seconds_symm"] > figures["seconds_all_to_all"] + 0.3
    assert "went over an emulated link: latency 200 ms" in capsys.readouterr().out
