"""The figures of all trainings, as text for a terminal."""

from __future__ import annotations

import os
from typing import Any

from tabulate import tabulate

from bench.train.link import describe, parse_link
from bench.train.results import Training

TITLES = {
    "symm": "SymmTokenDispatcher",
    "all_to_all": "AllToAllTokenDispatcher",
    "all_gather": "AllGatherTokenDispatcher",
    "replicated": "ReplicatedTokenDispatcher",
    "local": "a group of one",
}


def format_table(trainings: dict[str, Training], figures: dict[str, Any]) -> str:
    """Return a column per training, and below it what they have in common.

    Args:
        trainings: by the dispatcher's name.
        figures: of `figures_of`.
    """
    rows = [
        ["first loss, nats per byte", *(f"{t.losses[0]:.4f}" for t in trainings.values())],
        ["last loss", *(f"{t.losses[-1]:.4f}" for t in trainings.values())],
        ["rows sent by dispatches", *(_rows(name, training) for name, training in trainings.items())],
        [
            "symmetric memory of a rank",
            *(
                f"{figures['symmetric_bytes'] / 2**10:,.0f} KiB" if name == "symm" else "none"
                for name in trainings
            ),
        ],
        ["in exchanges, interpreted *", *(f"{t.seconds_in_exchanges:.1f} s" for t in trainings.values())],
        ["in all steps", *(f"{t.seconds:.1f} s" for t in trainings.values())],
    ]
    table = tabulate(rows, headers=["", *(TITLES[name] for name in trainings)], disable_numparse=True)
    notes = [
        f"* of the slowest rank, waiting for its peers included. {figures['ranks']} ranks on "
        f"{os.cpu_count()} CPUs, kernels in Triton's",
        "  interpreter against gloo's native code: no measure of the library's speed.",
    ]
    if figures["link"] is not None:
        notes.append(
            "SymmTokenDispatcher's rows, and no others, went over an emulated link: "
            f"{describe(parse_link(figures['link']))}."
        )
    if figures["copies"] is not None:
        saved = 1 - figures["copies"] / figures["slots"]
        notes.append(
            f"{figures['slots']:,} slots needed {figures['copies']:,} copies, {saved:.1%} fewer rows: "
            "one per token and rank."
        )
    notes.append(f"{figures['seconds']:.0f} s in all, the start of the processes included.")
    return "\n".join([table, "", *notes])


def _rows(name: str, training: Training) -> str:
    kinds = {"symm": "copies", "all_gather": "tokens"}
    # Ranks that have all experts, or all tokens, have no rows to send; the latter's combine is an all-reduce.
    return "none" if name in ("local", "replicated") else f"{training.rows_sent:,} {kinds.get(name, 'slots')}"
