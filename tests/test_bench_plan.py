"""The plan: its schedule is Domino's own, its clock keeps its books, and every verdict has its reason."""

import doctest
import importlib
import itertools
import json
import pkgutil
import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread

import bench.plan
import symm_a2a
from bench import __main__ as bench_main
from bench.limits.load import expected
from bench.plan.computed import costs_of, shape_of
from bench.plan.costs import Costs, ExchangeCost, Machine
from bench.plan.hardware import named
from bench.plan.imbalance import loads_of, rank_loads
from bench.plan.make import make
from bench.plan.measured import KINDS, STAGES
from bench.plan.memory import memory_of
from bench.plan.models import MODELS
from bench.plan.operations import Operation, backward, forward, step
from bench.plan.options import Options
from bench.plan.replay import replay
from bench.plan.verdict import judge
from symm_a2a.domino import schedule as domino_schedule
from symm_a2a.kernels.channel import Kind


def costs(
    layers,
    pre=1.0,
    experts=1.0,
    post=0.0,
    *,
    send=0.0,
    receive=0.0,
    join=0.0,
    ranks=2,
    counted=None,
    host=0.0,
):
    """Costs in round seconds; a number is every rank's, a list has one for each."""

    def each(seconds):
        return np.broadcast_to(np.asarray(seconds, float), ranks)

    seconds = {"pre": pre, "experts": experts, "shared": 0.0, "post": post}
    compute = {
        (forward, stage, layer): each(seconds[stage])
        for forward, stage, layer in itertools.product((True, False), STAGES, range(layers))
    }
    exchange = ExchangeCost(
        launch_W=each(0), send_W=each(send), receive_W=each(receive), join_W=each(join), nbytes_W=each(8)
    )
    exchanges = dict.fromkeys(KINDS, exchange)
    if counted is not None:
        exchanges[Kind.DISPATCH] = replace(exchange, counted_W=each(counted))
    return Costs(compute, exchanges, dict.fromkeys(compute, host))


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(bench.plan.__path__)])
def test_examples(name):
    assert doctest.testmod(importlib.import_module(f"bench.plan.{name}")).failed == 0


# The schedule.


def test_the_order_is_the_documented_one():
    documented = re.search(r"^    (A0 LD0 .*) \.\.\.$", domino_schedule.__doc__, re.MULTILINE)[1]
    expected_order = documented.replace("| ", "").split()
    emitted = [operation.short for operation in forward(2, range(2), lanes=2, shared=False)]
    assert emitted[: len(expected_order)] == expected_order


def test_the_backward_mirrors_the_forward():
    there = forward(2, range(2), lanes=2, shared=True)
    back = backward(there)
    opposite = {"compute": "compute", "launch": "join", "join": "launch"}
    assert [operation.action for operation in back] == [opposite[o.action] for o in reversed(there)]
    assert " ".join(operation.short for operation in back[:4]) == "P1' LCb1' P0' LCb0'"
    assert {operation.kind for operation in back} == {None, Kind.DISPATCH_BACKWARD, Kind.COMBINE_BACKWARD}


def test_shared_experts_run_between_a_combine_and_its_join():
    order = [operation.short for operation in forward(1, range(1), lanes=1, shared=True)]
    assert order == ["A0", "LD0", "JD0", "E0", "LC0", "S0", "JC0", "P0"]


def test_a_checkpointed_layer_joins_all_before_the_next():
    operations = step(2, 3, drains=True)
    in_flight, layer = set(), 0
    for operation in operations:
        if operation.layer != layer:
            assert not in_flight
            layer = operation.layer
        if operation.action == "launch":
            in_flight.add(operation.lane)
        elif operation.action == "join":
            in_flight.remove(operation.lane)
    launches = [o for o in operations if o.action == "launch"]
    assert sum(o.forward for o in launches) == 2 * sum(not o.forward for o in launches)


# The clock.


@pytest.mark.parametrize(("M", "drains"), [(1, False), (2, False), (3, True)])
def test_without_a_link_a_step_takes_its_compute(M, drains):
    its = costs(3, pre=1.0, experts=[2.0, 4.0], post=0.5)
    done = replay(step(M, 3, drains=drains), [its] * M)
    passes = 3 if drains else 2
    assert done.seconds == pytest.approx(passes * M * 3 * (1.0 + 4.0 + 0.5))
    assert done.compute_W.tolist() == pytest.approx([passes * M * 3 * 3.5, passes * M * 3 * 5.5])


@pytest.mark.parametrize("L", [1, 2, 4])
def test_all_flights_but_the_last_can_be_hidden(L):
    done = replay(step(2, L), [costs(L)] * 2, Machine(latency=1.0))
    for which in ("forward", "backward"):
        assert done.hidden(which) == pytest.approx((4 * L - 1) / (4 * L))
    assert done.exposed == pytest.approx(2.0)


@pytest.mark.parametrize("M", [2, 3, 4])
def test_where_each_layer_drains_its_last_flight_is_exposed(M):
    done = replay(step(M, 4, lanes=M, drains=True), [costs(4)] * M, Machine(latency=1.0))
    for which in ("forward", "backward"):
        assert done.hidden(which) == pytest.approx((2 * M - 1) / (2 * M))


def test_a_synchronous_step_hides_nothing():
    done = replay(step(1, 2), [costs(2, join=0.25)], Machine(latency=1.0))
    assert done.hidden("forward") == 0
    assert done.seconds == pytest.approx(2 * 2 * (2 * 1.0 + 2 * (1.0 + 0.25)))
    assert done.joins_W.tolist() == pytest.approx([2.0, 2.0])


def test_a_way_out_sends_one_message_after_another():
    # Nothing is computed: launches come faster than the way out takes them.
    done = replay(forward(2, range(1), 2, False), [costs(1, pre=0.0, experts=0.0, send=1.0)] * 2)
    first, second, third, fourth = done.timelines[0].exchanges
    assert [first.arrival, second.arrival, third.arrival, fourth.arrival] == [1.0, 2.0, 3.0, 4.0]


def test_a_way_in_is_as_busy_as_what_comes_in():
    done = replay(forward(1, range(1), 1, False), [costs(1, send=0.5, receive=[0.5, 2.0])])
    arrivals = [timeline.exchanges[0].arrival for timeline in done.timelines]
    assert arrivals == [1.5, 3.0]


def test_compute_is_slower_beside_a_send():
    its = costs(1, pre=1.0, experts=1.0, send=0.5)
    alone = replay(forward(2, range(1), 2, False), [its] * 2)
    beside = replay(forward(2, range(1), 2, False), [its] * 2, Machine(contention=0.5))
    # Half of the speed for half a second: a quarter of a second for each of three sends that something
    # runs beside.
    assert beside.seconds - alone.seconds == pytest.approx(3 * 0.25)


def test_a_host_that_issues_slowly_decides():
    busy = replay(forward(1, range(2), 1, False), [costs(2, pre=0.1, experts=0.1, host=1.0)])
    assert busy.seconds == pytest.approx(2 * 3 * 1.0)


def test_the_host_waits_for_the_counts():
    its = costs(1, pre=1.0, experts=1.0, host=0.9, counted=0.5)
    free, waits = (
        replay(forward(1, range(1), 1, False), [replace(its, exchanges=costs(1).exchanges)]),
        replay(forward(1, range(1), 1, False), [its]),
    )
    # The host issues a stage in 0.9 seconds, the experts only once the counts are there: 0.9 + 1.0 + 0.5.
    assert free.seconds == pytest.approx(0.9 + 1.0 + 1.0)
    assert waits.seconds == pytest.approx(0.9 + 1.0 + 0.5 + 0.9 + 1.0)


def test_the_busiest_rank_holds_up_all():
    its = costs(2, experts=[1.0, 1.0, 3.0], ranks=3)
    done = replay(step(1, 2), [its])
    assert all(timeline.span.end == pytest.approx(done.seconds) for timeline in done.timelines)
    assert done.timelines[0].stats()["forward"].exposed == pytest.approx(2 * 2.0)
    assert done.timelines[2].stats()["forward"].exposed == 0


# Sizes.


def test_even_ranks_move_what_the_limits_say():
    even = expected(shape_of(MODELS["qwen3-moe"], 4096, 8))
    assert rank_loads(0.0, 8, 16) == [1.0] * 8
    for load in loads_of(even, rank_loads(0.0, 8, 16)):
        assert load.sent == pytest.approx(even.sent)
        assert load.received == pytest.approx(even.received)
        assert load.rows == even.rows


@pytest.mark.parametrize("variation", [0.25, 1.0, 3.0])
def test_uneven_ranks_send_what_others_receive(variation):
    even = expected(shape_of(MODELS["olmoe"], 4096, 8))
    loads = rank_loads(variation, 8, 8)
    assert sum(loads) == pytest.approx(8)
    uneven = loads_of(even, loads)
    assert sum(load.sent for load in uneven) == pytest.approx(sum(load.received for load in uneven))
    assert all(load.received <= 7 * even.tokens for load in uneven)
    assert uneven[-1].received > uneven[0].received


def test_symmetric_memory_is_the_librarys():
    model = MODELS["deepseek-v3"]
    config = symm_a2a.EPConfig(
        num_experts=256, top_k=8, hidden_dim=7168, max_tokens_per_rank=2048, num_lanes=2
    )
    its = dict(ranks=8, layers=4, lanes=2, bytes_per_parameter=6)
    whole, inputs = (memory_of(model, [2048, 2048], checkpoint=one, **its) for one in (False, True))
    assert whole.symmetric == inputs.symmetric == config.symmetric_bytes(8)
    assert inputs.activations < whole.activations / 3


def test_more_bandwidth_is_never_slower():
    seconds = []
    for link in (50e9, 200e9, 800e9):
        profile = replace(named("h100", 8), link=link)
        its = costs_of(MODELS["olmoe"], profile, tokens=2048, ranks=8, layers=2, context=1024)
        seconds.append(replay(step(2, 2), [its] * 2).seconds)
    assert seconds == sorted(seconds, reverse=True)


# The verdict.

VERDICTS = {
    "helps": Options(shape="olmoe"),
    "communication too short": Options(shape="mixtral", intermediate=4 * 14336, micro_batches=(2,)),
    "compute too short": Options(shape="olmoe", link=2),
    "micro-batches too small": Options(shape="deepseek-v3", tokens=1024, context=256),
    "memory": Options(shape="deepseek-v3", batches="accumulated", micro_batches=(4,)),
}


@pytest.mark.parametrize("reason", VERDICTS)
def test_each_verdict_is_reached(reason):
    plan = make(VERDICTS[reason])
    assert plan.verdict.reason == reason, plan.verdict.text
    assert plan.verdict.helps == (reason == "helps")


def test_few_tokens_are_slower_in_parts_whatever_the_link_takes():
    assert make(Options(tokens=128, context=32)).verdict.reason == "micro-batches too small"


def test_one_lane_is_given_as_the_reason():
    plan = make(Options(lanes=1))
    assert plan.verdict.reason == "one lane"
    assert "with one lane no exchange runs beside" in plan.verdict.text
    assert "-0" not in plan.verdict.text


def test_what_does_not_fit_at_all_is_said_so():
    plan = make(Options(shape="deepseek-v3", layers="all"))
    assert plan.verdict.reason == "memory"
    assert "with Domino or without" in plan.verdict.text


def test_the_best_that_fits_is_chosen():
    plan = make(Options(shape="deepseek-v3", batches="accumulated"))
    best = judge(plan.together, plan.interleaved, 100 * plan.capacity)
    assert plan.verdict.micro_batches == 2
    assert best.micro_batches == 4


# The command.


def run(tmp_path, *arguments):
    return bench_main.main(["plan", "--out", str(tmp_path / "out"), *arguments])


def test_what_is_written(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert run(tmp_path, "--json", str(file), "--shape", "deepseek-v3", "--layers", "3") == 0
    printed = capsys.readouterr().out
    assert "not measured" in printed
    assert "Domino, M = 4" in printed
    height, width = imread(tmp_path / "out" / "plan.png").shape[:2]
    assert min(height, width) > 300
    events = json.loads((tmp_path / "out" / "plan.trace.json").read_text())["traceEvents"]
    launches = [event for event in events if event["name"] == "launch dispatch"]
    assert len(launches) == 8 * 3 * 2
    plan = json.loads(file.read_text())
    assert set(plan) == {"computed", "work", "schedules", "imbalance", "verdict"}
    assert [one["micro_batches"] for one in plan["schedules"]] == [1, 2, 3, 4]
    keys = {
        "micro_batches", "seconds", "gain", "exposed", "compute", "joins", "hidden_forward",
        "hidden_backward", "memory", "fits",
    }  # fmt: skip
    assert set(plan["schedules"][0]) == keys
    assert set(plan["verdict"]) == {"reason", "micro_batches", "gain", "text", "helps"}
    assert [one["variation"] for one in plan["imbalance"]] == [0.0, 0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "gpt"], "expected --shape to be one of olmoe, deepseek-v3, qwen3-moe, mixtral, got gpt"),
        (["--hardware", "tpu"], "expected --hardware to be one of h100, h200, b200, mi300x, got tpu"),
        (["--ranks", "16"], "give --link"),
        (["--ranks", "3"], "divisible"),
        (["--layers", "17"], "at most the 16 layers"),
        (["--tokens", "1000"], "whole sequences"),
        (["--context", "2048", "--micro-batches", "4"], "a sequence for each of 4 micro-batches"),
        (["--micro-batches", "1"], "--micro-batches of at least 2"),
        (["--shape", "deepseek-v3", "--heads", "8"], "grouped attention"),
        (["--hidden", "0"], "positive --hidden"),
        (["--contention", "2"], "contention of at least 0 and at most 1"),
        (["--imbalance", "-1"], "--imbalance"),
        (["--measured", "nowhere.json"], "file that can be read"),
        (["--profile", "nowhere.json"], "file that can be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_an_error(arguments, message, tmp_path, capsys):
    assert run(tmp_path, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("bench plan: ")
    assert message in shown.err
    assert not shown.out
    assert not (tmp_path / "out" / "plan.png").exists()


def test_a_machine_of_ones_own(tmp_path, capsys):
    file = tmp_path / "slow.json"
    file.write_text(json.dumps({"link": 1e9, "flops": 5e14}))
    assert run(tmp_path, "--profile", str(file), "--ranks", "16") == 0
    assert " on slow, EP 16" in capsys.readouterr().out
    file.write_text(json.dumps({"bandwidth": 1e9}))
    assert run(tmp_path, "--profile", str(file)) == 2
    assert "got bandwidth" in capsys.readouterr().err


def test_an_operation_is_short():
    assert Operation("join", 0, 1, kind=Kind.DISPATCH_BACKWARD, forward=False, lane=0).short == "JDb0'"
