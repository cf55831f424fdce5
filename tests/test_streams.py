"""Launches beside the caller, on a made-up device: what runs where, behind what, with whose memory."""

import contextlib
import dataclasses
import gc
import weakref

import pytest
import torch

import symm_a2a
from symm_a2a.exchange import (
    EXACT,
    Routing,
    join_combine,
    join_combine_backward,
    join_dispatch,
    join_dispatch_backward,
    launch_combine,
    launch_combine_backward,
    launch_dispatch,
    launch_dispatch_backward,
)
from symm_a2a.kernels.blocks import SMALL_TOKENS
from symm_a2a.kernels.channel import Channel, Kind
from symm_a2a.memory import VirtualMemory
from symm_a2a.streams import LaneStream
from symm_a2a.testing import OpGuard
from symm_a2a.timeline import Recorder

D, K, E = 2, 2, 4
DEVICE = torch.device("cuda", 0)


class Stream:
    """A stream that knows the work it is behind, and has a clock."""

    def __init__(self, device=None, priority=0):
        self.behind = set()
        self.waited_for = []
        self.now = 0.0

    def wait_stream(self, other):
        self.waited_for.append(other)
        self.behind |= other.behind
        self.now = max(self.now, other.now)

    def run(self, work, seconds=1.0):
        self.behind |= {work}
        self.now += seconds


class Event:
    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self, stream):
        self.at = stream.now

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3


class Device:
    """What `torch.cuda` shows of a device with streams.

    Attributes:
        caller: the stream that the caller is in.
        current: the stream that kernels go to.
        kernels: `(stream, lane, kernel, behind)` of every launch, `behind` of the lane's earlier ones.
        tensors: the storages that kernels beside the caller were given, but for the lane's own.
    """

    def __init__(self):
        self.caller = self.current = Stream()
        self.kernels = []
        self.tensors = []

    @property
    def beside(self):
        return self.current is not self.caller

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def gpu(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device_=None: device.current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device_=None: None)
    return device


@pytest.fixture
def dispatcher(request, gpu, monkeypatch):
    """A group of one whose kernels wait and whose lanes have streams; parameters are tokens and capacity."""
    T, capacity = getattr(request, "param", (3, 3 * K))
    monkeypatch.setattr(VirtualMemory, "spins", True)
    cfg = symm_a2a.EPConfig(
        num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=T, dtype=torch.float32, capacity=capacity
    )
    with symm_a2a.SymmTokenDispatcher(cfg, device="cpu") as dispatcher:
        for lane in dispatcher.arena.lanes:
            lane._stream = LaneStream(DEVICE, exists=True)
        note_launches(gpu, dispatcher.arena.lanes, monkeypatch)
        yield dispatcher


def note_launches(gpu, lanes, monkeypatch):
    launch, channels = Channel.launch, [lane.channel for lane in lanes]
    kept = {
        id(value)
        for lane in lanes
        for value in (*vars(lane.channel).values(), *lane.channel.local.values(), *vars(lane._rows).values())
    }

    def noted(channel, kernel, *sizes):
        run = launch(channel, kernel, *sizes)

        def seen(*args, **options):
            lane = channels.index(channel)
            behind = {work for work in gpu.current.behind if work[0] == lane}
            gpu.kernels.append((gpu.current, lane, kernel.__name__, behind))
            gpu.current.run((lane, len(gpu.kernels)))
            if gpu.beside:
                tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and id(arg) not in kept]
                gpu.tensors += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
            return run(*args, **options)

        return seen

    monkeypatch.setattr(Channel, "launch", noted)


def test_what_runs_beside_is_behind_the_caller_and_the_caller_behind_it_after_the_rejoin(gpu):
    lane = LaneStream(DEVICE, exists=True)
    gpu.caller.run("rows")
    with lane.beside_caller():
        assert gpu.beside
        assert gpu.current.behind == {"rows"}
        gpu.current.run("launch")
    assert not gpu.beside
    gpu.caller.run("compute")
    assert gpu.caller.waited_for == [], "the caller goes on meanwhile"
    lane.rejoin()
    assert gpu.caller.behind == {"rows", "launch", "compute"}
    assert len(gpu.caller.waited_for) == 1


def test_a_lane_has_one_stream_and_each_lane_its_own(gpu):
    first, second = LaneStream(DEVICE, exists=True), LaneStream(DEVICE, exists=True)
    used = []
    for lane in (first, second, first):
        with lane.beside_caller():
            used.append(gpu.current)
        lane.rejoin()
    assert used[0] is used[2]
    assert used[0] is not used[1]


def test_the_lanes_stream_goes_first(monkeypatch, gpu):
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append((device, priority)))
    LaneStream(DEVICE, exists=True)
    assert made == [(DEVICE, -1)]


def test_a_rejoin_in_another_stream_makes_both_wait(gpu):
    """The other one reads what was sent, and the first one's memory is free again."""
    lane, other = LaneStream(DEVICE, exists=True), Stream()
    with lane.beside_caller():
        gpu.current.run("launch")
    with gpu.stream(other):
        lane.rejoin()
    for stream in (gpu.caller, other):
        assert stream.behind == {"launch"}
        assert len(stream.waited_for) == 1


def test_a_second_rejoin_does_nothing(gpu):
    lane = LaneStream(DEVICE, exists=True)
    lane.rejoin()
    assert gpu.caller.waited_for == []
    with lane.beside_caller():
        pass
    lane.rejoin()
    lane.rejoin()
    assert len(gpu.caller.waited_for) == 1


def test_an_error_inside_leaves_the_lanes_stream(gpu):
    lane = LaneStream(DEVICE, exists=True)
    with pytest.raises(ZeroDivisionError), lane.beside_caller():
        raise ZeroDivisionError
    assert not gpu.beside


def test_without_a_stream_all_runs_where_the_caller_is(gpu, monkeypatch):
    monkeypatch.delattr(torch.cuda, "Stream")
    lane = LaneStream(torch.device("cpu"), exists=False)
    assert not lane.exists
    with lane.beside_caller():
        assert not gpu.beside
    lane.rejoin()
    assert gpu.caller.waited_for == []


def layer(dispatcher, x):
    scores, ids = torch.ones(len(x), K), torch.arange(len(x) * K).view(-1, K) % E
    rows, _, handle = yield dispatcher.dispatch_async(x, scores, ids)
    return x + (yield dispatcher.combine_async(rows * 2, handle))


def test_a_lanes_kernels_follow_one_another_across_streams(gpu, dispatcher):
    """Two micro-batches through two layers, forward and backward."""

    def model(x):
        for _ in range(2):
            x = yield from layer(dispatcher, x)
        return x

    xs = [torch.ones(tokens, D, requires_grad=True) for tokens in (3, 2)]
    outs = symm_a2a.Domino(dispatcher, 2).run(model, xs)
    sum(out.sum() for out in outs).backward()
    earlier = {0: set(), 1: set()}
    for number, (_, lane, kernel, behind) in enumerate(gpu.kernels, start=1):
        assert behind == earlier[lane], f"{kernel} in lane {lane} overtakes what the lane runs"
        earlier[lane].add((lane, number))
    # Launches are beside the caller, all four operations; joins are where the caller is.
    places = {
        phase: [stream is gpu.caller for stream, _, name, _ in gpu.kernels if name[1:].startswith(phase)]
        for phase in ("scatter", "gather", "expand", "finish")
    }
    assert places == dict.fromkeys(("scatter", "gather"), [False] * 8) | dict.fromkeys(
        ("expand", "finish"), [True] * 8
    )


def test_synchronous_exchanges_stay_in_the_callers_stream(gpu, dispatcher):
    x = torch.ones(3, D, requires_grad=True)
    rows, _, handle = dispatcher.dispatch(x, torch.ones(3, K), torch.zeros(3, K, dtype=torch.int64))
    dispatcher.combine(rows, handle).sum().backward()
    dispatcher.barrier()
    assert {stream for stream, *_ in gpu.kernels} == {gpu.caller}


def copied(value):
    """The same in other memory; on a CPU a launch has run to its end by now."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Routing):
        return Routing(*map(copied, value))
    return dataclasses.replace(value, routing=copied(value.routing), x_TD=copied(value.x_TD))


def turned(*shape, dtype=torch.float32):
    """Ones whose last two dimensions are swapped in memory, so that kernels need a copy."""
    *rest, m, n = shape
    tensor = torch.ones(*rest, n, m, dtype=dtype).transpose(-1, -2)
    assert not tensor.is_contiguous()
    return tensor


def four_exchanges(dispatcher):
    """Yield between the launch of each operation and its join; only the lane keeps what it was given."""
    lane, T = dispatcher.arena.lanes[0], dispatcher.cfg.max_tokens_per_rank
    capacity = EXACT if dispatcher.cfg.capacity == "exact" else dispatcher.cfg.capacity
    ids = turned(T, K, dtype=torch.int64)
    flight = launch_dispatch(lane, turned(T, D), turned(T, K), ids, capacity, 1, beside=True)
    flight = copied(flight)
    yield "dispatch"
    rows, _, routing, _ = join_dispatch(flight)
    launch_combine(lane, turned(*rows.shape), copied(routing), beside=True)
    yield "combine"
    join_combine(lane, rows, routing)
    launch_combine_backward(lane, turned(T, D), copied(routing), beside=True)
    yield "combine backward"
    join_combine_backward(lane, rows, routing, 1)
    grad_scores = turned(*routing.score_of_copy.shape)
    launch_dispatch_backward(lane, turned(*rows.shape), grad_scores, copied(routing), beside=True)
    yield "dispatch backward"
    join_dispatch_backward(lane, rows, routing)


SIZES = pytest.mark.parametrize(
    "dispatcher",
    [(T, capacity) for T in (3, SMALL_TOKENS + 2) for capacity in (T * K, "exact")],
    ids=["small, static", "small, exact", "large, static", "large, exact"],
    indirect=True,
)


class Allocations(OpGuard):
    """Notes what makes new memory beside the caller; the interpreter's own work does not count."""

    def __init__(self, gpu):
        super().__init__(allow_syncs=True)
        self.gpu = gpu
        self.made = []

    def see_operator(self, func, args, kwargs):
        tensors = [r for r in func._schema.returns if isinstance(r.type, torch.TensorType)]
        if self.gpu.beside and not self._in_kernel and any(r.alias_info is None for r in tensors):
            self.made.append(str(func))


@SIZES
def test_no_memory_is_made_beside_the_caller(gpu, dispatcher):
    with Allocations(gpu) as seen:
        for _ in four_exchanges(dispatcher):
            pass
    assert seen.made == []
    assert sum(stream is not gpu.caller for stream, *_ in gpu.kernels) >= 4


def test_memory_made_beside_the_caller_is_noticed(gpu):
    x = torch.ones(2, 2)
    with Allocations(gpu) as seen:
        x.clone()
        with LaneStream(DEVICE, exists=True).beside_caller():
            x.t()
            x.t().contiguous()
            torch.empty_like(x).copy_(x)
    assert seen.made == ["aten.clone.default", "aten.empty_like.default"]


@SIZES
def test_a_lane_keeps_what_its_kernels_use_until_the_join(gpu, dispatcher):
    given = []
    for operation in four_exchanges(dispatcher):
        gc.collect()
        assert not any(tensor() is not None for tensor in given), "the last join has let go of it"
        given, gpu.tensors = gpu.tensors, []
        assert len(given) >= 4
        assert all(tensor() is not None for tensor in given), operation
    gc.collect()
    assert not any(tensor() is not None for tensor in given)


def test_a_recording_has_the_times_of_both_streams(gpu, dispatcher, monkeypatch):
    """A kernel takes a second here; the clock is the streams'."""
    lane = dispatcher.arena.lanes[1]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: lane.device.index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    lane._on_gpu = True
    gpu.caller.now = 100.0
    lane.recorder = recorder = Recorder(0, lane.layout, DEVICE)
    gpu.caller.run("before", 10)
    pending = dispatcher.dispatch_async(
        torch.ones(3, D), torch.ones(3, K), torch.zeros(3, K, dtype=torch.int64), lane=1
    )
    gpu.caller.run("beside", 0.25)
    rows, _, handle = pending.join()
    dispatcher.combine(rows, handle)
    lane.recorder = None
    beside, alone = recorder.timeline().exchanges
    assert (beside.kind, beside.lane, beside.epoch, beside.beside) == (Kind.DISPATCH, 1, 1, True)
    assert beside.launch == (10, 10), "the caller's stream comes by at once"
    assert beside.flight == (10, 11)
    assert beside.join == (10.25, 12), "its wait, and a kernel"
    assert beside.wait == (10.25, 11)
    assert (alone.kind, alone.lane, alone.epoch, alone.beside) == (Kind.COMBINE, 1, 1, False)
    assert alone.launch == alone.flight == alone.wait == (12, 13)
    assert alone.join == (13, 14)
