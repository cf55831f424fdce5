"""What a rank does to compare schedules: the same training twice, and when its exchanges were in flight."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist

import symm_a2a
from bench.dispatchers import DispatcherFactory
from bench.progress import Progress
from bench.train.meter import MeteredDispatcher
from bench.train.options import Options
from bench.train.ranks import Trainer, exchange_config, over_link
from symm_a2a.timeline import FlightStats


@dataclass
class ScheduleRecord:
    """What one rank reports of one training; `losses` and `loads` are the same on every rank.

    Attributes:
        losses: the mean loss of each step over the batch of all ranks.
        loads: of each step, the slots that went to each expert, all layers and ranks together.
        flights: of each step, what became of the time in flight, `"forward"` and `"backward"`.
        seconds: of the steps.
        timeline: of the step in the middle.
        ids: of each step, int32 `(N, T, K)`, the experts of this rank's tokens, if there is to be a trace.
    """

    losses: list[float] = field(default_factory=list)
    loads: list[list[int]] = field(default_factory=list)
    flights: list[dict[str, FlightStats]] = field(default_factory=list)
    seconds: float = 0.0
    timeline: symm_a2a.Timeline | None = None
    ids: list[np.ndarray] = field(default_factory=list)

    @property
    def ids_SMTK(self) -> np.ndarray | None:
        """The experts of this rank's tokens, by step and layer, if there is to be a trace."""
        return np.stack(self.ids) if self.ids else None


def train_schedules(
    rank: int, group: dist.ProcessGroup, options: Options, factories: Mapping[str, DispatcherFactory]
) -> dict[str, ScheduleRecord]:
    """Be one rank: train synchronously and with Domino, step by step in turn, and report on both.

    In turn, so that whatever else the machine has to do slows down both alike.
    """
    records = {name: ScheduleRecord() for name in options.names}
    with ExitStack() as stack:
        trainers = {}
        for name in options.names:
            M = options.num_micro_batches if name == "domino" else 1
            make = over_link(factories["symm"], options)
            dispatcher = stack.enter_context(
                make(exchange_config(options, micro_batches=M), group, device="cpu")
            )
            if name == "domino":
                trainer = Trainer(options, dispatcher, group, domino=symm_a2a.Domino(dispatcher, M))
            else:
                trainer = Trainer(options, MeteredDispatcher(dispatcher), group)
            trainers[name] = dispatcher, trainer
            # What runs for the first time takes longer: a batch whose gradients nobody uses.
            trainer.backward(0)
        with Progress("both", options.steps, show=rank == 0) as progress:
            for number in range(options.steps):
                for name, (dispatcher, trainer) in trainers.items():
                    _step(number, dispatcher, trainer, records[name])
                progress.advance(", ".join(f"{name} loss {r.losses[-1]:.3f}" for name, r in records.items()))
    return records


def _step(number: int, dispatcher: Any, trainer: Trainer, record: ScheduleRecord) -> None:
    dist.barrier(trainer.group)
    begin = time.perf_counter()
    with dispatcher.record() as recording:
        record.losses.append(trainer.step(number))
    record.seconds += time.perf_counter() - begin
    record.loads.append(trainer.load_E.tolist())
    record.flights.append(recording.timeline.stats())
    if number == trainer.options.steps // 2:
        record.timeline = recording.timeline
    if trainer.options.trace:
        record.ids.append(trainer.ids_NTK.numpy().astype(np.int32))
