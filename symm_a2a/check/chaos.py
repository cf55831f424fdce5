"""What each rank does in chaos: act after act, and after each a look at what is left of it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from symm_a2a.check.acts import Act, draw_act
from symm_a2a.check.cases import Case, draw_case
from symm_a2a.check.compare import Found, mismatch
from symm_a2a.check.footprint import footprint
from symm_a2a.check.ranks import begins, pause_of, run_case, run_rounds
from symm_a2a.dispatcher import SymmTokenDispatcher
from symm_a2a.domino import Domino
from symm_a2a.errors import ExchangeError, InputError, PeerLostError, PeerTimeoutError
from symm_a2a.memory import require_device
from symm_a2a.memory.group import exchange

_SETTLED = 6
"""Acts after which a process has imported and cached what it will."""

_GROWTH = 1.25
"""How much more memory than then it may hold at any time later."""

_PROMPT = 10.0
"""Seconds in which a rank has to learn of what befell another, well below the cases' timeout."""


class ThrownError(Exception):
    """What a caller's own code raises."""


def run_acts(
    rank: int, group: dist.ProcessGroup, seed: int, until: float, device_type: str, journal: str
) -> None:
    """Run the acts of the seeds from `seed` on, at least one; what is found goes to the journal's folder.

    Acts that end a process are left out. Rank 0 decides for all that none is begun that may not end `until`
    then, of the monotonic clock.
    """
    device = require_device(device_type)
    longest, settled = 0.0, None
    seeds = (s for s in itertools.count(seed) if draw_act(s, group.size()).kind != "killed")
    with open(Path(journal) / f"{rank}.jsonl", "w", buffering=1) as file:
        for number, one in enumerate(seeds):
            begin = time.monotonic()
            if not begins(number == 0 or begin + longest < until, group, device):
                return
            act = draw_act(one, group.size())
            file.write(json.dumps({"seed": one, "act": act.kind, "victim": act.victim, "at": act.at}) + "\n")
            with np.errstate(all="ignore"):
                steps, found = run_act(act, rank, group, device)
            dist.barrier(group)
            gc.collect()
            held = footprint()
            settled = held if number == _SETTLED else settled
            found += _left_over(rank, held.mappings, 0, "mappings of shared memory")
            if settled is not None:
                found += _left_over(rank, held.descriptors, settled.descriptors, "open descriptors")
                most = int(_GROWTH * settled.resident_bytes)
                found += _left_over(rank, held.resident_bytes, most, "resident bytes")
            entry = {"steps": steps, "found": found, "resident": held.resident_bytes}
            file.write(json.dumps(entry) + "\n")
            longest = max(longest, time.monotonic() - begin)


def _left_over(rank: int, got: int, expected: int, what: str) -> Found:
    return [] if got <= expected else [{"rank": rank, "what": what, "expected": expected, "got": got}]


def run_act(act: Act, rank: int, group: dist.ProcessGroup, device: torch.device) -> tuple[int, Found]:
    """Run an act; collective. Returns the number of its steps, and this rank's mismatches, described.

    `"plain"`: a case, compared. `"stopped"`: ranks are stopped by a signal meanwhile, and go on. `"domino"`:
    micro-batches in Domino's order, compared with one after another. `"wrong"`: the victim passes wrong
    arguments first. `"groups"`: a case in each of the parts that the ranks are split into. `"forgotten"`:
    nobody closes anything. `"thrown"`: the victim's own code raises between two phases. `"late"`: the victim
    comes later than the timeout.
    """
    case = draw_case(act.seed, group.size(), device.type)
    steps = len(case.steps)
    if act.kind == "plain":
        return steps, run_case(case, rank, group, device)
    if act.kind == "stopped":
        with _stopping_others(act, rank, group):
            return steps, run_case(case, rank, group, device)
    if act.kind == "domino":
        return _domino(act, case, rank, group, device)
    if act.kind == "wrong":
        found = _wrong_arguments(case, group, device, rank == act.victim)
        return steps, found + run_case(case, rank, group, device)
    if act.kind == "groups":
        return _in_groups(act, rank, device)
    if act.kind == "forgotten":
        run_rounds(case, rank, group, device, pause_of(case, rank), closes=False)
        return steps, []
    return steps, _interrupted(act, case, rank, group, device)


@contextlib.contextmanager
def _stopping_others(act: Act, rank: int, group: dist.ProcessGroup) -> Iterator[None]:
    """Stop other ranks for short times, from a thread of rank 0, and let them go on."""
    pids = [int(text) for text in exchange(group, str(os.getpid()))]
    done, dice = threading.Event(), random.Random(f"stop {act.seed}")

    def stop() -> None:
        while not done.wait(dice.choice([0.0, 0.005, 0.02])):
            pid = dice.choice(pids[1:])
            os.kill(pid, signal.SIGSTOP)
            try:
                done.wait(dice.choice([0.002, 0.01, 0.05, 0.2]))
            finally:
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop, daemon=True)
    if rank == 0 and group.size() > 1:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()


def _domino(
    act: Act, case: Case, rank: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[int, Found]:
    """Run micro-batches through two layers, interleaved and one after another: the same bits."""
    dice = random.Random(f"domino {act.seed}")
    batches, layers = dice.choice([1, 2, 2, 3, 4]), dice.choice([1, 2])
    pause, cfg = pause_of(case, rank), case.config(0, timeout=20.0)
    gen = torch.Generator().manual_seed(act.seed * 64 + rank)
    counts = torch.randint(0, cfg.max_tokens_per_rank + 1, (batches,), generator=gen).tolist()
    routed = [
        [
            (
                torch.rand(T, cfg.top_k, generator=gen),
                torch.randint(-1, cfg.num_experts, (T, cfg.top_k), generator=gen),
            )
            for _ in range(layers)
        ]
        for T in counts
    ]
    given = [torch.randn(T, cfg.hidden_dim, generator=gen).to(cfg.dtype) for T in counts]

    def block(dispatcher: Any, x: Tensor, number: int) -> Generator[Any, Any, Tensor]:
        for scores, ids in routed[number]:
            pause()
            rows, _, handle = yield dispatcher.dispatch_async(x, scores.to(device), ids.to(device))
            pause()
            x = x + (yield dispatcher.combine_async(rows * 0.5, handle))
        return x

    def passed(domino: Callable[[Any, list[Any]], list[Tensor]]) -> list[Tensor]:
        xs = [x.to(device).clone().requires_grad_() for x in given]
        with SymmTokenDispatcher(cfg, group, device=device) as dispatcher:
            outs = domino(dispatcher, [(dispatcher, x, number) for number, x in enumerate(xs)])
            torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        return [*(out.detach() for out in outs), *(x.grad for x in xs if x.grad is not None)]

    together = passed(lambda dispatcher, every: Domino(dispatcher, batches).run(block, every))
    alone = passed(lambda dispatcher, every: [Domino(dispatcher, 1).run(block, [one])[0] for one in every])
    found = [mismatch("Domino's result", a, b, cfg.dtype) for a, b in zip(together, alone, strict=True)]
    return batches * layers, [{"rank": rank, **entry} for one in found for entry in one]


def _wrong_arguments(case: Case, group: dist.ProcessGroup, device: torch.device, wrong: bool) -> Found:
    """Let a rank pass what does not fit: it is told, no peer notices, and an exchange follows."""
    cfg = case.config(0, timeout=20.0)
    x = torch.zeros(1, cfg.hidden_dim, dtype=cfg.dtype, device=device)
    scores, ids = (
        torch.ones(1, cfg.top_k, device=device),
        torch.zeros(1, cfg.top_k, dtype=torch.int64, device=device),
    )
    found: Found = []
    with SymmTokenDispatcher(cfg, group, device=device) as dispatcher:
        for given in (
            [(x[:, :0], scores, ids), (x, scores[:, :0], ids), (x, scores, ids.float())] if wrong else []
        ):
            try:
                dispatcher.dispatch(*given)
                found.append({"what": "wrong arguments", "expected": "InputError", "got": "a result"})
            except InputError:
                pass
        dispatcher.dispatch(x, scores, ids)
    return found


def _in_groups(act: Act, rank: int, device: torch.device) -> tuple[int, Found]:
    """Run a case in each part of the ranks, and give the groups back."""
    steps, found = 0, []
    groups: list[Any] = [dist.new_group(list(part)) for part in act.members]
    for number, (part, group) in enumerate(zip(act.members, groups, strict=True)):
        if rank in part:
            case = draw_case(act.seed + 1_000_003 * (number + 1), len(part), device.type)
            steps, found = len(case.steps), run_case(case, part.index(rank), group, device)
            dist.destroy_process_group(group)
    return steps, found


def _interrupted(act: Act, case: Case, rank: int, group: dist.ProcessGroup, device: torch.device) -> Found:
    """Let the victim raise, or come late, and see how the others end."""
    late = act.kind == "late"
    timeout = 0.4 if late else 20.0

    def befall() -> None:
        if not late:
            raise ThrownError(f"before phase {act.at}")
        time.sleep(3 * timeout)

    begin, ended = time.monotonic(), "done"
    try:
        run_rounds(case, rank, group, device, _pausing(act, case, rank, befall), timeout=timeout)
    except ThrownError:
        ended = "thrown"
    except ExchangeError as error:
        ended = type(error).__name__
    seconds = time.monotonic() - begin
    everyone = exchange(group, ended)
    expected = {"done", PeerLostError.__name__, *([PeerTimeoutError.__name__] if late else [])}
    if rank == act.victim and not late:
        expected = {"done", "thrown"}
    elif everyone[act.victim] == "done" and not late:
        expected = {"done"}
    found = [] if ended in expected else [{"what": act.kind, "expected": sorted(expected), "got": ended}]
    if seconds > _PROMPT:
        found.append(
            {"what": f"{act.kind}, seconds", "expected": f"below {_PROMPT:g}", "got": f"{seconds:.1f}"}
        )
    return [{"rank": rank, "everyone": everyone, **entry} for entry in found]


def run_killed(rank: int, group: dist.ProcessGroup, seed: int, device_type: str) -> None:
    """Run rounds until the victim is killed in the middle of them; the others raise what they are told."""
    device = require_device(device_type)
    act = draw_act(seed, group.size())
    case = draw_case(seed, group.size(), device_type)
    pause = _pausing(act, case, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with np.errstate(all="ignore"):
        while True:
            run_rounds(case, rank, group, device, pause)


def _pausing(act: Act, case: Case, rank: int, befall: Callable[[], None]) -> Callable[[], None]:
    """Return the case's pauses, with what befalls the act's victim ahead of the act's phase."""
    phases, pause = itertools.count(1), pause_of(case, rank)

    def before_phase() -> None:
        pause()
        if rank == act.victim and next(phases) == act.at:
            befall()

    return before_phase
