"""What the ranks' reports on two schedules amount to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import symm_a2a
from bench.train.agreement import Agreement
from bench.train.options import Options
from bench.train.results import common_figures
from bench.train.schedules import ScheduleRecord
from symm_a2a.timeline import FlightStats

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class ScheduleTraining:
    """One training of all ranks.

    Attributes:
        losses: mean loss of each step, in nats per byte.
        loads: of each step, the slots that went to each expert, all layers together.
        seconds: of the steps, of the slowest rank.
        flights: what became of the time in flight, `"forward"` and `"backward"`; all steps and ranks.
        timelines: of the step in the middle, of each rank.
    """

    losses: list[float]
    loads: list[list[int]]
    seconds: float
    flights: dict[str, FlightStats]
    timelines: list[symm_a2a.Timeline]


def add_up(flights: Iterable[FlightStats]) -> FlightStats:
    """Return what became of the time in flight of all of them together.

    Example:
        >>> add_up([FlightStats(1, 10, in_flight=1.0, exposed=1.0), FlightStats(1, 10, in_flight=3.0)])
        FlightStats(exchanges=2, nbytes=20, in_flight=4.0, exposed=1.0)
    """
    flights = list(flights)
    return FlightStats(
        exchanges=sum(one.exchanges for one in flights),
        nbytes=sum(one.nbytes for one in flights),
        in_flight=sum(one.in_flight for one in flights),
        exposed=sum(one.exposed for one in flights),
    )


def merge_schedules(reports: list[dict[str, ScheduleRecord]]) -> dict[str, ScheduleTraining]:
    """Make one training of the ranks' reports on it, by the schedule's name.

    Args:
        reports: of each rank, in rank order.
    """
    trainings = {}
    for name in reports[0]:
        records = [report[name] for report in reports]
        steps = [flights for record in records for flights in record.flights]
        trainings[name] = ScheduleTraining(
            losses=records[0].losses,
            loads=records[0].loads,
            seconds=max(record.seconds for record in records),
            flights={direction: add_up(step[direction] for step in steps) for direction in DIRECTIONS},
            timelines=[record.timeline for record in records if record.timeline],
        )
    return trainings


def most_hidden(options: Options) -> float:
    """Return the share of the flights that can hide: all but the last of a forward, or of a backward.

    Example:
        >>> most_hidden(Options(layers=4, micro_batches=2))
        0.9375
    """
    flights = 2 * options.num_micro_batches * options.layers
    return 0.0 if options.num_micro_batches == 1 else (flights - 1) / flights


def schedule_figures(
    options: Options, trainings: dict[str, ScheduleTraining], agreement: Agreement, seconds: float
) -> dict[str, Any]:
    """Return all figures, flat.

    Args:
        options: of the run.
        trainings: by the schedule's name.
        agreement: of the two.
        seconds: of everything, the start of the processes included.
    """
    row: dict[str, Any] = {"steps": options.steps, "ranks": options.ranks}
    for name, training in trainings.items():
        row[f"first_loss_{name}"] = training.losses[0]
        row[f"last_loss_{name}"] = training.losses[-1]
    row["loss_difference"] = max(agreement.differences)
    row["agree"] = agreement.agree
    row["first_step_routed_differently"] = agreement.parted_at
    for direction in DIRECTIONS:
        row[f"hidden_{direction}"] = trainings["domino"].flights[direction].hidden_share
    row["most_hidden"] = most_hidden(options)
    for name, training in trainings.items():
        for direction, flights in training.flights.items():
            row[f"exchanges_{direction}_{name}"] = flights.exchanges
            row[f"in_flight_{direction}_{name}"] = flights.in_flight
            row[f"exposed_{direction}_{name}"] = flights.exposed
            row[f"hidden_{direction}_{name}"] = flights.hidden_share
        row[f"seconds_{name}"] = training.seconds
    return row | {"seconds": seconds, "micro_batches": options.num_micro_batches} | common_figures(options)
