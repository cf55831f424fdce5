"""What a timeline says follows from what happened: stretches of compute, time in flight, files."""

import itertools
import json
import sys

import pytest
import torch

import symm_a2a
from symm_a2a import EPConfig, RecordingError, Timeline, VirtualWorld
from symm_a2a.kernels.channel import Kind
from symm_a2a.timeline import Compute, Exchange, Interval, Recorder, save_picture, save_trace
from tests.domino_blocks import X, carrier, launch, right

__all__ = ["carrier"]


def exchange(kind, lane, launch, arrival, join, **more):
    return Exchange(kind, lane, 1, 100, Interval(*launch), arrival, Interval(*join), **more)


def interleaved():
    """Two lanes: compute, launch, and a join that waits from 6 to 7."""
    first = exchange(Kind.DISPATCH, 0, (1, 2), 5, (4, 4.5))
    second = exchange(Kind.DISPATCH, 1, (3, 4), 7, (6, 8))
    back = exchange(Kind.COMBINE_BACKWARD, 1, (9, 10), 9.5, (11, 12))
    # The first was not waited for: its last rows came before it was joined.
    first = Exchange(**{**vars(first), "arrival": 3.5})
    return Timeline((first, second, back), Interval(0, 14))


def test_compute_before_a_launch_is_the_launchs_and_any_other_follows_from_what_came_before():
    assert interleaved().compute() == [
        Compute(0, 0, 1), Compute(1, 2, 3), Compute(0, 4.5, 6), Compute(1, 8, 9),
        Compute(1, 10, 11), Compute(1, 12, 14),
    ]  # fmt: skip


def test_time_in_flight_is_hidden_but_for_the_wait_of_its_own_join():
    stats = interleaved().stats()
    forward, backward = stats["forward"], stats["backward"]
    assert (forward.exchanges, forward.nbytes) == (2, 200)
    assert forward.in_flight == 1.5 + 3
    assert forward.exposed == 1
    assert forward.hidden == 3.5
    assert forward.hidden_share == 3.5 / 4.5
    # Its rows were here before its own launch had ended.
    assert (backward.exchanges, backward.in_flight, backward.hidden_share) == (1, 0, 0)


def test_a_synchronous_exchange_on_a_gpu_is_exposed_from_its_launch_on():
    one = exchange(Kind.DISPATCH, 0, (1, 4), 4, (4, 5), beside=False)
    stats = Timeline((one,), Interval(0, 5)).stats()["forward"]
    assert (stats.in_flight, stats.exposed, stats.hidden_share) == (3, 3, 0)


def test_events_are_in_the_order_in_which_they_began():
    phases = [(phase, lane) for phase, _, lane in interleaved().events()]
    assert phases == [("launch", 0), ("launch", 1), ("join", 0), ("join", 1), ("launch", 1), ("join", 1)]


def test_a_trace_has_bytes_and_epochs_and_ranks_as_processes(tmp_path):
    one = interleaved()
    other = Timeline(one.exchanges, one.span, rank=1)
    save_trace(tmp_path / "trace.json", [one, other])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    flight = next(event for event in spans if event["name"] == "dispatch" and event["tid"] == 3)
    assert (flight["ts"], flight["dur"], flight["args"]) == (4e6, 3e6, {"epoch": 1, "bytes": 100})
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"lane 0", "lane 0, in flight", "lane 1", "lane 1, in flight"}
    for pid, tid in {(event["pid"], event["tid"]) for event in spans}:
        mine = [e for e in spans if (e["pid"], e["tid"]) == (pid, tid) and e["name"] != "wait" and e["dur"]]
        mine.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"]


def test_a_picture_is_higher_with_every_lane(tmp_path):
    def height(timelines):
        save_picture(tmp_path / "one.png", timelines, "a title")
        header = (tmp_path / "one.png").read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        return int.from_bytes(header[20:24], "big")

    one_lane = Timeline(interleaved().exchanges[:1], Interval(0, 14))
    heights = [
        height({"one": one_lane}),
        height({"two": interleaved()}),
        height({"1": one_lane, "2": one_lane}),
    ]
    assert heights == sorted(set(heights))


def test_without_matplotlib_the_picture_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match="expected matplotlib"):
        save_picture(tmp_path / "one.png", {"": interleaved()})


def test_one_recording_at_a_time_and_its_timeline_at_the_end(carrier):
    with carrier.record() as recording:
        with pytest.raises(RecordingError, match="one recording at a time"), carrier.record():
            pass
        with pytest.raises(RecordingError, match="has ended"):
            _ = recording.timeline
        symm_a2a.Domino(carrier, 1).run(lambda _: right(carrier), [0])
    assert len(recording.timeline.exchanges) == 2
    carrier.combine(*carrier.dispatch(X, torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64))[::2])
    with carrier.record() as again:
        pass
    assert again.timeline.exchanges == ()


def test_a_recording_that_an_error_ends_has_no_timeline(carrier):
    with pytest.raises(ZeroDivisionError), carrier.record() as recording:
        raise ZeroDivisionError
    with pytest.raises(RecordingError, match="has failed"):
        _ = recording.timeline


def test_an_exchange_that_begins_or_ends_outside_is_left_out_and_counted(carrier):
    before = launch(carrier, lane=0)
    with carrier.record() as recording:
        before.join()
        after = launch(carrier, lane=1)
    after.join()
    assert (recording.timeline.exchanges, recording.timeline.unfinished) == ((), 1)


def test_bytes_and_epochs_are_those_that_the_statistics_count():
    cfg = EPConfig(num_experts=4, top_k=2, hidden_dim=5, max_tokens_per_rank=6, dtype=torch.float32)
    with VirtualWorld(cfg, 2, "cpu") as world:
        xs = [torch.randn(n, 5, requires_grad=True) for n in (6, 3)]
        scores = [torch.rand(n, 2) for n in (6, 3)]
        ids = [torch.randint(-1, 4, (n, 2), generator=torch.Generator().manual_seed(n)) for n in (6, 3)]
        first = world.dispatchers[0]
        earlier = first.stats()
        with first.record() as recording:
            for _ in range(2):
                rows, _, handles = world.dispatch(xs, scores, ids, lane=1)
                torch.cat(world.combine(rows, handles)).sum().backward()
        done = first.stats() - earlier
    exchanges = recording.timeline.exchanges
    assert [(e.kind.name, e.epoch) for e in exchanges[:4]] == [
        ("DISPATCH", 1), ("COMBINE", 1), ("COMBINE_BACKWARD", 2), ("DISPATCH_BACKWARD", 2),
    ]  # fmt: skip
    assert sum(e.nbytes for e in exchanges) == done.payload_bytes_W[1] + done.metadata_bytes_W[1]
    assert {e.lane for e in exchanges} == {1}


class Event:
    """An event on a made-up clock, in milliseconds."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.at = Event.now

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.mark.parametrize("beside", [True, False])
def test_on_a_gpu_times_are_those_of_events_in_the_streams(monkeypatch, beside):
    for name, fake in (("Event", Event), ("current_stream", lambda _: None), ("synchronize", lambda _: None)):
        monkeypatch.setattr(torch.cuda, name, fake)
    layout = EPConfig(num_experts=2, top_k=1, hidden_dim=4, max_tokens_per_rank=4).layout(2)

    def at(milliseconds):
        Event.now = milliseconds
        return recorder.mark()

    Event.now = 1000.0
    recorder = Recorder(0, layout, torch.device("cuda", 0))
    copies = torch.tensor([1, 1]), torch.tensor([3, 4])
    arrival = at(1500)
    recorder.launched(0, Kind.COMBINE, 7, (at(1100), at(1101)), arrival, copies, beside=beside)
    recorder.joined(0, (at(1400), at(1600)), None)
    Event.now = 2000.0
    timeline = recorder.timeline()
    (one,) = timeline.exchanges
    assert (timeline.span, one.epoch) == (Interval(0, 1), 7)
    # Three copies of four bfloat16, padded to 16 bytes, for the other rank; and two flags.
    assert one.nbytes == 3 * 16 + 2 * 8
    begin, exposed = (0.101, 0.1) if beside else (0.1, 0.4)
    assert one.flight == pytest.approx(Interval(begin, 0.5))
    assert timeline.stats()["forward"].exposed == pytest.approx(exposed)
