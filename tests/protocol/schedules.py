"""What the host makes of a program: kernels in streams, as the library's own code launches them.

A group of one runs the program, with a host or with kernels that wait. What it launches, and in which order,
does not depend on the number of ranks, nor on their data.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

from symm_a2a import Domino, EPConfig, SymmTokenDispatcher
from symm_a2a.arena import Arena
from symm_a2a.host_wait import HostWait
from symm_a2a.kernels.channel import Channel
from symm_a2a.memory import VirtualMemory
from symm_a2a.readback import RowCount
from symm_a2a.streams import LaneStream
from tests.protocol.steps import World
from tests.protocol.trace import Key, Tracer

E, K, D, T = 2, 2, 4, 3
WAITS = "host waits"


class Node(NamedTuple):
    """A kernel, or a wait of the host, on one rank.

    Attributes:
        key: the kernel's; of a wait `(WAITS, flag)`.
        lane: its place.
        epoch: of the exchange, in its direction.
        stream: in which nodes follow one another.
        after: places of nodes, in any stream, that have ended when this one begins.
    """

    key: Key
    lane: int
    epoch: int
    stream: str
    after: tuple[int, ...]


class _Host:
    """Follows what one rank's host gives to its streams."""

    def __init__(self, tracer: Tracer) -> None:
        self.nodes: list[Node] = []
        self.stream = "caller"
        self._tracer = tracer
        self._last: dict[str, int] = {}
        self._awaited: dict[str, set[int]] = {}
        self._known: set[int] = set()

    def note(self, key: Key, lane: int, epoch: int) -> None:
        """A kernel has been launched in the current stream, or the host has waited there."""
        after = self._awaited.pop(self.stream, set()) | self._known
        if self.stream in self._last:
            after.add(self._last[self.stream])
        self._last[self.stream] = len(self.nodes)
        self.nodes.append(Node(key, lane, epoch, self.stream, tuple(sorted(after))))

    def wait_stream(self, stream: str, other: str) -> None:
        """Let what comes in a stream wait for all that another has been given."""
        if other in self._last:
            self._awaited.setdefault(stream, set()).add(self._last[other])

    def synchronize(self, stream: str) -> None:
        """Wait on the host for a stream: nothing is launched before it has come that far."""
        self._known = {self._last[stream]}

    @contextmanager
    def within(self, stream: str) -> Iterator[None]:
        """Launch in another stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


class _Stream(LaneStream):
    """A lane's stream whose orders are noted; everything runs at once, where it is."""

    def __init__(self, host: _Host, lane: int) -> None:
        super().__init__(torch.device("cpu"), exists=False)
        self._host = host
        self._name = f"lane {lane}"
        self._beside = False

    @contextmanager
    def beside_caller(self) -> Iterator[None]:
        self._host.wait_stream(self._name, self._host.stream)
        self._beside = True
        with self._host.within(self._name):
            yield

    def rejoin(self) -> None:
        if self._beside:
            self._host.wait_stream(self._host.stream, self._name)
        self._beside = False


def emitted(
    run: Callable[[SymmTokenDispatcher], Any], world: World, lanes: int = 2, **policies: Any
) -> list[Node]:
    """Return what the library gives to one rank's streams in a program.

    Args:
        run: the program.
        world: who waits.
        lanes: of the arena.
        **policies: of `EPConfig`.
    """
    cfg = EPConfig(
        num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=T, dtype=torch.float32, num_lanes=lanes,
        **({"capacity": T * K} | policies),
    )  # fmt: skip
    layout = cfg.layout(1)
    memory = VirtualMemory.world(1, layout.nbytes, torch.device("cpu"))[0]
    memory.host_waits, memory.spins = world == "host", world == "gpu"
    arena = Arena(cfg, memory, layout)
    tracer = Tracer(arena.lanes)
    host = _Host(tracer)
    with ExitStack() as stack:
        stack.enter_context(tracer.running())
        stack.enter_context(_noted_launches(host, tracer))
        if world == "gpu":
            for lane in arena.lanes:
                lane._stream = _Stream(host, lane.index)
            stack.enter_context(_noted_row_counts(host))
        else:
            stack.enter_context(_noted_waits(host))
        run(SymmTokenDispatcher(cfg, arena=arena))
    arena.close()
    return host.nodes


@contextmanager
def _noted_launches(host: _Host, tracer: Tracer) -> Iterator[None]:
    launch = Channel.launch

    def noted(channel: Channel, kernel: Any, *work: Any) -> Any:
        run = launch(channel, kernel, *work)

        def launched(*given: Any, **constants: Any) -> None:
            run(*given, **constants)
            made = tracer.runs[-1]
            host.note(made.key, made.lane, made.epoch)

        return launched

    with mock.patch.object(Channel, "launch", noted):
        yield


@contextmanager
def _noted_row_counts(host: _Host) -> Iterator[None]:
    start, read = RowCount.start, RowCount.read
    streams: dict[int, str] = {}

    def noted_start(count: RowCount, channel: Channel, pad_multiple: int) -> None:
        stream = streams.setdefault(id(count), f"rows {len(streams)}")
        host.wait_stream(stream, host.stream)
        with host.within(stream):
            start(count, channel, pad_multiple)

    def noted_read(count: RowCount) -> int:
        host.synchronize(streams[id(count)])
        return read(count)

    with mock.patch.object(RowCount, "start", noted_start), mock.patch.object(RowCount, "read", noted_read):
        yield


@contextmanager
def _noted_waits(host: _Host) -> Iterator[None]:
    until = HostWait._until

    def noted(wait: HostWait, flag: str, epoch: int, *why: Any) -> None:
        until(wait, flag, epoch, *why)
        host.note((WAITS, flag), wait._index, epoch)

    with mock.patch.object(HostWait, "_until", noted):
        yield


def without(nodes: Sequence[Node], dropped: Callable[[Node], bool]) -> list[Node]:
    """Return a schedule without some of its nodes; what came after one comes after what was before it."""
    places: list[set[int]] = []
    kept: list[Node] = []
    for node in nodes:
        after = set[int]().union(*(places[at] for at in node.after))
        if dropped(node):
            places.append(after)
        else:
            places.append({len(kept)})
            kept.append(node._replace(after=tuple(sorted(after))))
    return kept


def _tokens(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=gen, requires_grad=True)
    return x, torch.rand(T, K, generator=gen), torch.randint(E, (T, K), generator=gen)


def _layer(dispatcher: SymmTokenDispatcher, x: torch.Tensor) -> torch.Tensor:
    _, scores, ids = _tokens()
    rows, _, handle = dispatcher.dispatch(x, scores, ids)
    return x + dispatcher.combine(rows * 2, handle)


def training(dispatcher: SymmTokenDispatcher) -> None:
    """Two layers, forward and backward, two steps."""
    for _ in range(2):
        _layer(dispatcher, _layer(dispatcher, _tokens()[0])).sum().backward()


def recomputing(dispatcher: SymmTokenDispatcher) -> None:
    """Two layers under activation checkpointing: each is run again in the backward."""
    x = _tokens()[0]
    for _ in range(2):
        x = checkpoint(_layer, dispatcher, x, use_reentrant=False)
    x.sum().backward()


def dispatching(dispatcher: SymmTokenDispatcher) -> None:
    """Dispatches alone, in one lane: one direction again and again."""
    with torch.no_grad():
        for _ in range(4):
            dispatcher.dispatch(*_tokens(), lane=0)


def everything(dispatcher: SymmTokenDispatcher) -> None:
    """Each operation, in orders that repeat a direction and that alternate."""
    x, scores, ids = _tokens()
    dispatcher.barrier(lane=0)
    dispatcher.broadcast_counts(ids, lane=0)
    rows, _, handle = dispatcher.dispatch(x, scores, ids, lane=0)
    again = dispatcher.dispatch_again(x * 2, handle)
    out = dispatcher.combine(rows, handle) + dispatcher.combine(again, handle)
    out.sum().backward()
    dispatcher.barrier(lane=0)


def micro_batches(
    number: int, layers: int = 1, *, again: bool = False
) -> Callable[[SymmTokenDispatcher], None]:
    """Return a program that runs micro-batches through layers under `Domino`, forward and backward.

    Args:
        number: of micro-batches.
        layers: of the model.
        again: whether the backward runs all of it again first.
    """

    def block(dispatcher: SymmTokenDispatcher, x: torch.Tensor) -> Generator[Any, Any, torch.Tensor]:
        for _ in range(layers):
            _, scores, ids = _tokens()
            rows, _, handle = yield dispatcher.dispatch_async(x, scores, ids)
            x = x + (yield dispatcher.combine_async(rows * 2, handle))
        return x

    def forward(dispatcher: SymmTokenDispatcher, *xs: torch.Tensor) -> torch.Tensor:
        outs = Domino(dispatcher, number).run(block, [(dispatcher, x) for x in xs])
        return torch.stack([out.sum() for out in outs]).sum()

    def run(dispatcher: SymmTokenDispatcher) -> None:
        xs = [_tokens(seed)[0] for seed in range(number)]
        if again:
            checkpoint(forward, dispatcher, *xs, use_reentrant=False).backward()
        else:
            forward(dispatcher, *xs).backward()

    return run


def one_after_another(*lanes: int) -> Callable[[SymmTokenDispatcher], None]:
    """Return a program that launches and joins a dispatch in one lane, then in the next."""

    def run(dispatcher: SymmTokenDispatcher) -> None:
        for lane in lanes:
            dispatcher.dispatch_async(*_tokens(), lane=lane).join()

    return run


def together(*lanes: int) -> Callable[[SymmTokenDispatcher], None]:
    """Return a program that launches a dispatch in every lane, then joins them in that order."""

    def run(dispatcher: SymmTokenDispatcher) -> None:
        for pending in [dispatcher.dispatch_async(*_tokens(), lane=lane) for lane in lanes]:
            pending.join()

    return run
