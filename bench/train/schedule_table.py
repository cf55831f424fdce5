"""The figures of both schedules, as text for a terminal."""

from __future__ import annotations

import os
import textwrap

from tabulate import tabulate

from bench.train.link import describe
from bench.train.options import Options
from bench.train.schedule_results import DIRECTIONS, ScheduleTraining, most_hidden
from symm_a2a.timeline import FlightStats


def format_schedules(options: Options, trainings: dict[str, ScheduleTraining], seconds: float) -> str:
    """Return a column per schedule, and below it what the numbers are.

    Args:
        options: of the run.
        trainings: by the schedule's name.
        seconds: of everything, the start of the processes included.
    """
    both = trainings.values()
    rows = [
        ["tokens of a rank", f"1 x {options.tokens:,}", _parts(options)],
        ["first loss, nats per byte", *(f"{t.losses[0]:.4f}" for t in both)],
        ["last loss", *(f"{t.losses[-1]:.4f}" for t in both)],
    ]
    for direction in DIRECTIONS:
        flights = [t.flights[direction] for t in both]
        rows += [
            [f"{direction}, in flight *", *(f"{one.in_flight:.2f} s" for one in flights)],
            [f"{direction}, asleep in joins", *(f"{one.exposed:.2f} s" for one in flights)],
            [f"{direction}, hidden", *(f"{one.hidden_share:.1%}" for one in flights)],
            [f"{direction}, uncovered on average", *(_rest(one) for one in flights)],
        ]
    rows.append(["in all steps **", *(f"{t.seconds:.1f} s" for t in both)])
    table = tabulate(rows, headers=["", *trainings], disable_numparse=True)
    return "\n".join([table, "", *_notes(options, trainings, seconds)])


def _parts(options: Options) -> str:
    return f"{options.num_micro_batches} x {options.tokens // options.num_micro_batches:,}"


def _rest(flights: FlightStats) -> str:
    each = max(1, flights.exchanges)
    return f"{flights.exposed / each * 1e3:.1f} of {flights.in_flight / each * 1e3:.1f} ms"


def _notes(options: Options, trainings: dict[str, ScheduleTraining], seconds: float) -> list[str]:
    link = options.emulated_link
    over = f"over an emulated link: {describe(link)}" if link else "over shared memory, which takes no time"
    notes = [
        f"*  {over}. From a launch until the last peer's rows were here, a late peer included; added up over "
        "exchanges, ranks and steps. The part that was not hidden a rank slept through, in the join.",
        "** wall time of the slowest rank, after a batch to warm up; a step of one, a step of the other. "
        f"{options.ranks} ranks on {os.cpu_count()} CPUs, kernels in Triton's interpreter: no "
        "measure of the library's speed.",
    ]
    if options.num_micro_batches > 1:
        notes.append(
            "Of flights of one length all but the last of each forward and backward can hide, here "
            f"{most_hidden(options):.1%}. Where the compute between exchanges is shorter than a flight, the "
            "rest of the flight stays uncovered."
        )
    ratio = trainings["domino"].seconds / trainings["sync"].seconds
    notes.append(f"Domino took {ratio:.0%} of the time. {seconds:.0f} s in all, the start included.")
    return [textwrap.fill(note, 100, subsequent_indent=" " * 3 * note.startswith("*")) for note in notes]
