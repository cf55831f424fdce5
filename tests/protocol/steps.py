"""What each kernel does to a lane, as steps of a model: read off the kernels as they run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from symm_a2a import EPConfig, VirtualWorld, exchange
from symm_a2a.kernels.channel import Kind
from symm_a2a.kernels.credit import credit
from symm_a2a.lane import Lane
from symm_a2a.layout import FLAGS
from tests.protocol.trace import KernelRun, Key, Places, Tracer

World = Literal["host", "gpu"]
"""Whether the host waits for flags, and kernels only check them; or kernels wait."""


class Step(NamedTuple):
    """A step of one program, on memory of the lane.

    Attributes:
        what: `"wait"` until all flags have reached an epoch; `"check"` that they have; `"publish"` it in
            flags; `"write"` sections; `"read"` them.
        region: of the lane.
        places: of the region.
        epoch: less the exchange's own; of writes and reads 0.
    """

    what: str
    region: str
    places: Places
    epoch: int = 0


class Steps(NamedTuple):
    """A kernel: its programs run side by side, and the last one to end goes on."""

    programs: tuple[tuple[Step, ...], ...]
    last: tuple[Step, ...]


def steps_of(run: KernelRun) -> Steps:
    """Turn accesses into steps."""
    programs: list[list[Step]] = []
    last: list[Step] = []
    polled, acquired, counted = False, None, set[int]()
    for access in run.accesses:
        while len(programs) <= access.program:
            programs.append([])
        steps = last if access.program in counted else programs[access.program]
        if access.what == "counts":
            counted.add(access.program)
        elif access.what == "poll":
            polled = True
        elif access.what == "acquire":
            acquired = access
        elif access.what == "expects":
            assert acquired is not None, run
            what = "wait" if polled else "check"
            steps.append(Step(what, acquired.region, acquired.places, access.epoch - run.epoch))
            polled, acquired = False, None
        elif access.what == "release":
            steps.append(Step("publish", access.region, access.places, access.epoch - run.epoch))
        else:
            assert access.region not in FLAGS, f"a flag accessed the plain way: {access}"
            _touch(steps, Step(access.what, access.region, access.places))
    assert not last or len(counted) == len(programs), run
    return Steps(tuple(map(tuple, programs)), tuple(last))


def _touch(steps: list[Step], new: Step) -> None:
    """Add a read or a write to those since the last flag, whose order says nothing."""
    for back in range(len(steps) - 1, -1, -1):
        step = steps[back]
        if step.what not in ("read", "write"):
            break
        if (step.what, step.region) == (new.what, new.region):
            steps[back] = step._replace(places=step.places | new.places)
            return
    steps.append(new)


@functools.cache
def kernels(world: World, world_size: int, rank: int) -> dict[Key, Steps]:
    """Return what a rank of a world does in each kernel of the library, by the kernel's key.

    On a GPU each kernel that can have several programs has two. In worlds of more than three ranks what the
    first rank does stands for all.
    """
    if world_size > 3 and rank:
        return {key: _turned(steps, rank, world_size) for key, steps in kernels(world, world_size, 0).items()}
    K = max(2, world_size)
    cfg = EPConfig(
        num_experts=world_size, top_k=K, hidden_dim=4, max_tokens_per_rank=4, dtype=torch.float32,
        capacity=4 * world_size * K, num_lanes=1,
    )  # fmt: skip
    with VirtualWorld(cfg, world_size, "cpu") as virtual:
        lanes = [dispatcher.arena.lanes[0] for dispatcher in virtual.dispatchers]
        if world == "gpu":
            _wait_in_kernels(lanes[rank])
        tracer = Tracer([lanes[rank]], lanes)
        # Whoever waits goes last: what it waits for is there.
        order = [*(other for other in range(world_size) if other != rank), rank]
        with tracer.running():
            _run_all(lanes, order, world)
    found: dict[Key, Steps] = {}
    for run in tracer.runs:
        steps = steps_of(run)
        assert found.setdefault(run.key, steps) == steps, (run.key, found[run.key], steps)
    return found


def _turned(steps: Steps, by: int, world_size: int) -> Steps:
    """Return the steps of the rank that comes so many behind."""

    def turned(step: Step) -> Step:
        places = (((rank + by) % world_size, (section + by) % world_size) for rank, section in step.places)
        return step._replace(places=frozenset(places))

    return Steps(
        tuple(tuple(turned(step) for step in program) for program in steps.programs),
        tuple(turned(step) for step in steps.last),
    )


def _wait_in_kernels(lane: Lane) -> None:
    """Let a lane's kernels wait, in two programs where there are several."""
    blocks = dataclasses.replace(
        lane.channel.blocks, tokens=2, small_tokens=2, strip=2, copies=2, send_rows=2, copy_rows=2,
        sum_rows=2, grad_rows=2, rows=2,
    )  # fmt: skip
    lane.memory.spins = True
    lane.channel = dataclasses.replace(lane.channel, spins=True, polls=9, programs=2, blocks=blocks)


def _run_all(lanes: Sequence[Lane], order: Iterable[int], world: World) -> None:
    """Run every operation in every form that has kernels of its own; every token goes to every rank."""
    order = list(order)
    W, layout = len(lanes), lanes[0].layout
    T, K, D = layout.max_tokens, layout.top_k, layout.hidden_dim
    x_TD, scores_TK = torch.ones(T, D), torch.ones(T, K)
    ids_TK = (torch.arange(K) % W).expand(T, K).contiguous()

    def on_all(launch, join):
        flying = {rank: launch(lanes[rank], rank) for rank in order}
        return {rank: join(lanes[rank], rank, flying[rank]) for rank in order}

    def dispatch(capacity):
        return on_all(
            lambda lane, _: exchange.launch_dispatch(lane, x_TD, scores_TK, ids_TK, capacity, 1),
            lambda lane, _, flight: exchange.join_dispatch(flight),
        )

    done = dispatch(T * W * K)
    if world == "gpu":
        for lane in lanes:
            if lane.memory.spins:
                for kind in Kind:
                    credit(lane.channel, kind)
    done = dispatch(exchange.EXACT)
    rows = {rank: one.rows_RD for rank, one in done.items()}
    routing = {rank: one.routing for rank, one in done.items()}
    on_all(
        lambda lane, r: exchange.launch_combine(lane, rows[r], routing[r]),
        lambda lane, r, y: exchange.join_combine(lane, y, routing[r]),
    )
    grads = on_all(
        lambda lane, r: exchange.launch_combine_backward(lane, x_TD, routing[r]),
        lambda lane, r, _: exchange.join_combine_backward(lane, rows[r], routing[r], 1),
    )
    on_all(
        lambda lane, r: exchange.launch_dispatch_backward(lane, grads[r][0], grads[r][1], routing[r]),
        lambda lane, r, g: exchange.join_dispatch_backward(lane, g, routing[r]),
    )
    on_all(
        lambda lane, r: exchange.launch_dispatch_again(lane, x_TD, routing[r]),
        lambda lane, r, x: exchange.join_dispatch_again(lane, x, routing[r], len(rows[r]), 1),
    )
    on_all(
        lambda lane, r: exchange.launch_dispatch_again_backward(lane, rows[r], routing[r]),
        lambda lane, r, g: exchange.join_dispatch_again_backward(lane, g, routing[r]),
    )
    on_all(
        lambda lane, _: exchange.launch_barrier(lane),
        lambda lane, _, __: exchange.join_barrier(lane),
    )
    on_all(
        lambda lane, _: exchange.launch_counts(lane, ids_TK),
        lambda lane, _, counts: exchange.join_counts(lane, counts),
    )
    for lane in lanes:
        lane.raise_reports()


def told(steps: Sequence[Step]) -> list[str]:
    """Return steps in words, without the places."""
    ends = {"wait": "{:+d}", "check": "{:+d}", "publish": "{:+d}", "write": "", "read": ""}
    return [f"{s.what} {s.region} {ends[s.what].format(s.epoch)}".replace(" +0", "").strip() for s in steps]
