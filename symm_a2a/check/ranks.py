"""What each rank does: one case after another, until the time is up."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from symm_a2a.check.cases import Case, Round, Step, draw_case
from symm_a2a.check.compare import Found, compare
from symm_a2a.check.flow import Outcome, run_round
from symm_a2a.check.inputs import draw_inputs, place
from symm_a2a.dispatcher import SymmTokenDispatcher
from symm_a2a.memory import require_device


def run_cases(
    rank: int, group: dist.ProcessGroup, seed: int, until: float, device_type: str, journal: str
) -> None:
    """Run cases of the seeds from `seed` on, at least one; what is found goes to the journal's folder.

    Rank 0 decides for all that none is begun that may not end `until` then, of the monotonic clock.
    """
    device = require_device(device_type)
    longest = 0.0
    with open(Path(journal) / f"{rank}.jsonl", "w", buffering=1) as file:
        for number in itertools.count():
            begin = time.monotonic()
            if not begins(number == 0 or begin + longest < until, group, device):
                return
            case = draw_case(seed + number, dist.get_world_size(group), device_type)
            file.write(json.dumps({"seed": case.seed, "sizes": case.sizes, "layers": case.layers}) + "\n")
            # NumPy, which interprets the kernels, warns of NaN.
            with np.errstate(all="ignore"):
                found = run_case(case, rank, group, device)
            file.write(json.dumps({"steps": len(case.steps), "found": found}) + "\n")
            longest = max(longest, time.monotonic() - begin)


def begins(wanted: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return what rank 0 wants, on every rank; collective."""
    flag = torch.tensor(wanted, dtype=torch.int32, device=device)
    dist.broadcast(flag, dist.get_global_rank(group, 0), group=group)
    return bool(flag.item())


def pause_of(case: Case, rank: int) -> Callable[[], None]:
    """Return what sleeps for a random short time, or not, by the case's seed, on each rank by itself."""
    dice = random.Random(f"{case.seed} {rank}")
    return lambda: time.sleep(dice.choice([0.0] * 9 + [0.0001, 0.001, 0.003, 0.02]))


def run_rounds(
    case: Case,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
    pause: Callable[[], None],
    *,
    timeout: float | None = None,
    closes: bool = True,
) -> list[tuple[Round, Step, Outcome]]:
    """Run the rounds of a case; collective. Returns what each step gave on this rank.

    Args:
        case: to run.
        rank: this rank.
        group: of all.
        device: where rows live.
        pause: called before every phase.
        timeout: of the dispatchers; None for one that is long enough.
        closes: whether the dispatchers are closed at the end.
    """
    timeout = timeout or (60.0 if device.type == "cuda" else 20.0)
    with contextlib.ExitStack() as stack:
        owner = SymmTokenDispatcher(case.config(0, timeout), group, device=device)
        dispatchers = [stack.enter_context(owner)]
        for layer in range(1, len(case.layers)):
            sharer = SymmTokenDispatcher(case.config(layer, timeout), arena=owner.arena)
            dispatchers.append(stack.enter_context(sharer))
        done = []
        for one in case.rounds:
            leaves = [place(draw_inputs(case, step)[rank], step, rank, device) for step in one.steps]
            outcomes = run_round(one, [dispatchers[step.layer] for step in one.steps], leaves, pause)
            done += [(one, *pair) for pair in zip(one.steps, outcomes, strict=True)]
        if not closes:
            stack.pop_all()
        return done


def run_case(case: Case, rank: int, group: dist.ProcessGroup, device: torch.device) -> Found:
    """Run a case and compare what it gave; collective. Returns this rank's mismatches, described."""
    done = run_rounds(case, rank, group, device, pause_of(case, rank))
    return [m for one, step, outcome in done for m in compare(case, one, step, rank, outcome, group)]
