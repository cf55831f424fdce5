"""What the ranks' reports amount to: one training per dispatcher, and the figures of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bench.trace import Trace
from bench.train.agreement import Agreement
from bench.train.options import BOTH, Options
from bench.train.ranks import RankRecord, exchange_config


@dataclass(frozen=True)
class Training:
    """One training of all ranks.

    Attributes:
        losses: mean loss of each step, in nats per byte.
        loads: of each step, the slots that went to each expert, all layers together.
        sent: rows that dispatches sent, `sent[sender][receiver]`: copies with "symm", tokens with
            "all_gather", otherwise slots.
        seconds: of the steps, of the slowest rank.
        seconds_in_exchanges: of these, in exchanges; of the slowest rank.
    """

    losses: list[float]
    loads: list[list[int]]
    sent: list[list[int]]
    seconds: float
    seconds_in_exchanges: float

    @property
    def rows_sent(self) -> int:
        """Rows that all ranks sent to all."""
        return sum(map(sum, self.sent))


def merge(reports: list[dict[str, RankRecord]]) -> dict[str, Training]:
    """Make one training of the ranks' reports on it.

    Args:
        reports: of each rank, in rank order.
    """
    trainings = {}
    for name in reports[0]:
        records = [report[name] for report in reports]
        trainings[name] = Training(
            losses=records[0].losses,
            loads=records[0].loads,
            sent=[record.sent for record in records],
            seconds=max(record.seconds for record in records),
            seconds_in_exchanges=max(record.seconds_in_exchanges for record in records),
        )
    return trainings


class HasRouting(Protocol):
    """What a report has of the routing."""

    @property
    def ids_SMTK(self) -> np.ndarray | None:
        """The experts of the rank's tokens, by step and layer."""
        ...


def trace_of(options: Options, reports: Sequence[Mapping[str, HasRouting]]) -> Trace:
    """Return the routing of the first training, the one that the picture shows.

    Args:
        options: of the run, with a trace to write.
        reports: of each rank, in rank order.
    """
    ids = [report[options.names[0]].ids_SMTK for report in reports]
    return Trace(np.stack([ids_SMTK for ids_SMTK in ids if ids_SMTK is not None], axis=2), options.experts)


def figures_of(
    options: Options, trainings: dict[str, Training], agreement: Agreement | None, seconds: float
) -> dict[str, Any]:
    """Return all figures, flat; None where one needs a training that was not asked for.

    Args:
        options: of the run.
        trainings: by the dispatcher's name.
        agreement: of the trainings, if there are several.
        seconds: of everything, the start of the processes included.
    """
    names = dict.fromkeys((*BOTH, *trainings))
    symm = trainings.get("symm")
    row: dict[str, Any] = {"steps": options.steps, "ranks": options.ranks}
    for name in names:
        training = trainings.get(name)
        row[f"first_loss_{name}"] = training and training.losses[0]
        row[f"last_loss_{name}"] = training and training.losses[-1]
    row["max_loss_difference"] = agreement and max(agreement.differences)
    row["agree"] = agreement and agreement.agree
    row["first_step_routed_differently"] = agreement and agreement.parted_at
    row["copies"] = symm and symm.rows_sent
    row["slots"] = options.slots
    row["symmetric_bytes"] = exchange_config(options).symmetric_bytes(options.ranks)
    for name in names:
        training = trainings.get(name)
        row[f"seconds_in_exchanges_{name}"] = training and training.seconds_in_exchanges
        row[f"seconds_{name}"] = training and training.seconds
    row["seconds"] = seconds
    return row | common_figures(options)


def common_figures(options: Options) -> dict[str, Any]:
    """Return what was asked for, as far as figures need it to be understood."""
    names = ("tokens", "context", "layers", "experts", "top_k", "dim", "learning_rate", "seed")
    return {name: getattr(options, name) for name in (*names, "schedule", "link")}
