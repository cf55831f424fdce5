"""Random cases over real ranks, against the standard all-to-all and against fp64: is it right here?

A case is one arena with one or two dispatchers on it, and some rounds of one to three steps each; all
of it is drawn from the case's seed, on every rank alike. A step is a dispatch, per-expert arithmetic, a
combine, and the backward of all three. When all rounds of a case have run, back to back and with every
result still held, the results of each step are compared:

- rows and counts bit by bit with those of the baseline (`AllToAllTokenDispatcher`), which gets the same
  inputs; where a static capacity overflowed, with those of `symm_a2a.reference`, as the baseline knows no
  such capacity;
- combined outputs and the gradients of x, scores and expert weights with the reference in fp64. The bound
  is first order rounding analysis: every result is a sum of products, so running the reference again on
  absolute values gives the sum of the terms' sizes, and n roundings of unit roundoff u cost at most about
  `n * u` of that. The baseline is held to the same bound, with the roundings that it makes.

Ranks sleep for random short times between phases, each by itself.

What ranks find out goes to a journal, one file a rank, so that a case that hangs or dies is known too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from symm_a2a import reference
from symm_a2a.baselines import AllToAllTokenDispatcher
from symm_a2a.config import DTYPES, EPConfig
from symm_a2a.dispatcher import SymmTokenDispatcher
from symm_a2a.kernels.blocks import INTERPRETED
from symm_a2a.memory import choose_backend
from symm_a2a.testing import RankError, run_ranks

START_UP = 15.0
"""Seconds past its time that a run may take, to start its ranks and to end the last case."""

_SHORTEST_LIMIT = 60.0
"""Seconds that a run gets at least before it counts as hung: a slow machine's first imports take long."""

_MOST_DETAILS = 50
"""Mismatches that a report describes; the others are only counted."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_GRADIENTS = ("x", "scores", "weight", "bias")


@dataclass(frozen=True)
class Step:
    """One micro-batch of a case; sequences are over the ranks.

    Attributes:
        number: its place in the case.
        lane: where it runs.
        layer: which of the case's dispatchers runs it.
        tokens: T of each rank.
        routing: how experts are chosen, see `_draw_ids`.
        ids_dtype: of the expert ids.
        scores_dtype: of the scores.
        strides: memory layouts of x, scores, ids, the experts' output, and the output's gradient, see
            `_laid_out`.
        constant: whether the experts ignore their input, so that no gradient reaches the rows.
        twice: whether the handle is combined twice, the second time with half of the experts' output, and
            the two added: two exchanges of one direction in a row, where a rank must wait for the slowest.
        special: whether x has negative zeros, infinities and NaN, and masked slots a score of NaN.
        x_grad: whether x requires a gradient.
        scores_grad: whether the scores do.
        with_counts: whether the caller counts the slots of each expert too.
    """

    number: int
    lane: int
    layer: int
    tokens: tuple[int, ...]
    routing: str
    ids_dtype: str
    scores_dtype: str
    strides: tuple[str, ...]
    constant: bool
    twice: bool
    special: bool
    x_grad: tuple[bool, ...]
    scores_grad: tuple[bool, ...]
    with_counts: bool


@dataclass(frozen=True)
class Round:
    """Steps that run together.

    Attributes:
        form: `"sync"`; `"async"`, launch and join; `"pipelined"`, the same with the steps interleaved,
            each in a lane of its own; `"checkpoint"` and `"checkpoint async"`, recomputed in the
            backward; or `"no_grad"`.
        backward: `"each"`, before the next step's forward; `"first first"` or `"last first"`, after all
            forwards; or `"together"`, one backward for all.
        steps: one to three.
    """

    form: str
    backward: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Case:
    """Everything about a case but the tensors' values, which its seed gives too.

    Attributes:
        seed: all of it follows from this, the number of ranks, and the kind of device.
        sizes: E, K, D, C, the row dtype and the lanes, under the names of `EPConfig`'s arguments.
        layers: `(capacity, pad_multiple)` of each dispatcher on the arena.
        rounds: in the order in which they run.
    """

    seed: int
    sizes: dict[str, Any]
    layers: tuple[tuple[reference.Capacity, int], ...]
    rounds: tuple[Round, ...]

    @property
    def steps(self) -> list[Step]:
        """All steps, in the order of their numbers."""
        return [step for one in self.rounds for step in one.steps]

    def config(self, layer: int, timeout: float = 60.0, **changes: Any) -> EPConfig:
        """Return the configuration of one of the dispatchers."""
        capacity, pad_multiple = self.layers[layer]
        settings = {"dtype": _DTYPES[self.sizes["dtype"]], "capacity": capacity, "pad_multiple": pad_multiple}
        return EPConfig(**{**self.sizes, **settings, "overflow": "drop", "timeout": timeout, **changes})


def draw_case(seed: int, world_size: int, device: str = "cpu") -> Case:
    """Return the case of a seed.

    Args:
        seed: any integer.
        world_size: W.
        device: `"cpu"` or `"cuda"`; on the latter, where each case's kernels are compiled first, there
            are more rounds.
    """
    rng = random.Random(seed)
    # Past the largest block of tokens, and of columns, only now and then: those cases take long.
    shape = rng.choice(["small"] * 8 + ["long", "wide"])
    hidden = {"small": [1, 2, 3, 7, 8, 17, 32, 33, 64, 100, 130], "long": [1, 3, 16], "wide": [4100]}
    tokens = {"small": [1, 2, 5, 16, 31, 32, 33, 48], "long": [300], "wide": [1, 5, 16]}
    sizes = {
        "num_experts": world_size * rng.choice([1, 1, 2, 3, 4, 5, 8]),
        "top_k": rng.choice([1, 2, 2, 3, 4, 6, 8]),
        "hidden_dim": rng.choice(hidden[shape]),
        "max_tokens_per_rank": rng.choice(tokens[shape]),
        "dtype": rng.choice(["bfloat16", "bfloat16", "float16", "float32", "float32", "float64"]),
        "num_lanes": rng.choice([1, 2, 2, 2, 3]),
    }
    most = world_size * sizes["max_tokens_per_rank"] * sizes["top_k"]
    layers: list[tuple[reference.Capacity, int]] = []
    for _ in range(rng.choice([1, 1, 2])):
        pad = rng.choice([1, 1, 2, 3, 8, 16])
        enough = most + sizes["num_experts"] // world_size * (pad - 1)
        capacities: list[reference.Capacity] = ["exact", "exact", "exact", enough, rng.randint(1, enough)]
        layers.append((rng.choice(capacities), pad))
    numbers = itertools.count()
    rounds = []
    for _ in range(rng.choice([1, 2, 2, 3]) * (8 if device == "cuda" else 1)):
        form = rng.choice(["sync", "sync", "async", "pipelined", "pipelined", "checkpoint", "no_grad"])
        if form == "checkpoint" and rng.random() < 0.3:
            form = "checkpoint async"
        lanes = [rng.randrange(sizes["num_lanes"]) for _ in range(rng.choice([1, 1, 2, 3]))]
        if form == "pipelined":
            lanes = list(range(sizes["num_lanes"]))
            rng.shuffle(lanes)
        steps = [_draw_step(rng, next(numbers), lane, len(layers), sizes, world_size) for lane in lanes]
        backward = rng.choice(["each", "first first", "last first", "together"])
        if form == "pipelined" and backward == "each":
            backward = "together"
        rounds.append(Round(form, backward, tuple(steps)))
    return Case(seed, sizes, tuple(layers), tuple(rounds))


def _draw_step(
    rng: random.Random, number: int, lane: int, layers: int, sizes: dict[str, Any], world_size: int
) -> Step:
    most = sizes["max_tokens_per_rank"]
    routings = ["any", "any", "any", "skewed", "one expert", "one rank", "local", "masked"]
    if sizes["top_k"] <= sizes["num_experts"]:
        routings += ["distinct"] * 3
    counts = rng.choice(["ragged", "ragged", "ragged", "full", "none", "one rank"])
    busy = rng.randrange(world_size)
    anyhow = [rng.choice([0, 1, most, *[rng.randint(0, most)] * 3]) for _ in range(world_size)]
    tokens = {
        "ragged": anyhow,
        "full": [most] * world_size,
        "none": [0] * world_size,
        "one rank": [rng.randint(1, most) if rank == busy else 0 for rank in range(world_size)],
    }[counts]
    plain = ["plain", "plain", "transposed", "sliced", "shifted"]
    return Step(
        number=number,
        lane=lane,
        layer=rng.randrange(layers),
        tokens=tuple(tokens),
        routing=rng.choice(routings),
        ids_dtype=rng.choice(["int32", "int64"]),
        scores_dtype=rng.choice(["float32", "float32", "float64", sizes["dtype"]]),
        strides=tuple(rng.choice([*plain, *extra]) for extra in ([], [], [], [], ["expanded"])),
        constant=rng.random() < 0.15,
        twice=rng.random() < 0.25,
        special=rng.random() < 0.25,
        x_grad=tuple(rng.random() < 0.85 for _ in range(world_size)),
        scores_grad=tuple(rng.random() < 0.85 for _ in range(world_size)),
        with_counts=rng.random() < 0.3,
    )


@dataclass(frozen=True)
class Inputs:
    """What a step's ranks put in: a tensor per rank each, on the CPU, contiguous.

    Attributes:
        x: `(T, D)`, of the row dtype.
        scores: `(T, K)`.
        ids: `(T, K)`.
        weight: `(L, D)`, of the row dtype; an expert makes `row * weight + bias` of a row.
        bias: `(L, D)`; not zero, so that pad rows become something else than zeros.
        grad_out: `(T, D)`, the gradient of what the combine gives.
    """

    x: list[torch.Tensor]
    scores: list[torch.Tensor]
    ids: list[torch.Tensor]
    weight: list[torch.Tensor]
    bias: list[torch.Tensor]
    grad_out: list[torch.Tensor]

    def in_fp64(self, change: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Inputs:
        """Return them with the floating point ones in fp64, each changed by a function."""
        parts = {one.name: getattr(self, one.name) for one in fields(self)}
        return Inputs(**{n: v if n == "ids" else [change(t.double()) for t in v] for n, v in parts.items()})


def draw_inputs(case: Case, step: Step) -> Inputs:
    """Return the tensors of every rank of a step; the same wherever it is called."""
    generator = torch.Generator().manual_seed((case.seed * 1009 + step.number) % (1 << 63))
    sizes, dtype, ranks = case.sizes, _DTYPES[case.sizes["dtype"]], range(len(step.tokens))
    D, L = sizes["hidden_dim"], sizes["num_experts"] // len(step.tokens)

    def values(rows: int) -> torch.Tensor:
        # Away from zero: no product of a few of them underflows in fp16, where relative bounds end.
        size = torch.rand(rows, D, generator=generator, dtype=torch.float64) * 1.9 + 0.1
        return (size * (torch.randint(0, 2, size.shape, generator=generator) * 2 - 1)).to(dtype)

    inputs = Inputs([], [], [], [], [], [])
    for rank in ranks:
        T, K = step.tokens[rank], sizes["top_k"]
        x, ids = values(T), _draw_ids(step.routing, generator, rank, T, K, sizes["num_experts"], L)
        scores = torch.rand(T, K, generator=generator, dtype=torch.float64) + 0.05
        scores[torch.rand(T, K, generator=generator) < 0.05] = 0.0
        if step.special:
            for share, value in ((0.05, "-0.0"), (0.01, "nan"), (0.01, "inf"), (0.01, "-inf")):
                x[torch.rand(T, D, generator=generator) < share] = float(value)
            scores[ids < 0] = float("nan")
        grad_out = values(T)
        if step.strides[4] == "expanded":
            grad_out = grad_out[:1].expand(T, D).contiguous()
        inputs.x.append(x)
        inputs.scores.append(scores.to(_DTYPES[step.scores_dtype]))
        inputs.ids.append(ids.to(torch.int32 if step.ids_dtype == "int32" else torch.int64))
        inputs.weight.append(values(L))
        inputs.bias.append(values(L))
        inputs.grad_out.append(grad_out)
    return inputs


def _draw_ids(
    routing: str, generator: torch.Generator, rank: int, T: int, K: int, E: int, L: int
) -> torch.Tensor:
    """Return int64 `(T, K)` expert ids, some of them -1 where the routing is not `"distinct"`."""
    if routing == "distinct":
        return torch.rand(T, E, generator=generator).topk(K, dim=1).indices
    if routing == "masked":
        return torch.full((T, K), -1)
    low, high = {"one expert": (E - 1, E), "one rank": (0, L), "local": (rank * L, (rank + 1) * L)}.get(
        routing, (0, E)
    )
    ids = torch.randint(low, high, (T, K), generator=generator)
    if routing == "skewed":
        ids = (ids.double() / E).pow(4).mul(E).long()
    masked = torch.rand(T, K, generator=generator) < (0.15 if routing == "any" else 0.05)
    # And tokens that no expert gets.
    masked |= torch.rand(T, 1, generator=generator) < 0.05
    return ids.masked_fill(masked, -1)


def _laid_out(values: torch.Tensor, strides: str) -> torch.Tensor:
    """Return equal values `(rows, columns)` in another memory layout."""
    rows, columns = values.shape
    if strides == "transposed":
        return values.t().contiguous().t()
    if strides == "sliced":
        wide = values.new_zeros(rows, 2 * columns)
        wide[:, ::2] = values
        return wide[:, ::2]
    if strides == "shifted":
        # Contiguous, but not where an allocator would put it: wide loads are not aligned.
        return torch.cat([values.new_zeros(1), values.flatten()])[1:].view(rows, columns)
    if strides == "expanded":
        return values[:1].expand(rows, columns)
    return values


@dataclass
class Leaves:
    """One rank's tensors of a step, on its device, where gradients end up; fields as in `Inputs`."""

    x: torch.Tensor
    scores: torch.Tensor
    ids: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    grad_out: torch.Tensor


@dataclass
class Outcome:
    """What a step gave on one rank.

    Attributes:
        leaves: with their gradients, if there was a backward.
        rows: of the dispatch.
        tokens_per_expert: of the dispatch.
        out: of the combine.
        backward: whether there was one.
    """

    leaves: Leaves
    rows: torch.Tensor
    tokens_per_expert: torch.Tensor
    out: torch.Tensor
    backward: bool


Flow = Generator[None, None, Outcome]
"""A step's exchanges on one rank, with a yield between each launch and its join."""


def _leaves(inputs: Inputs, step: Step, rank: int, device: torch.device) -> Leaves:
    def leaf(name: str, strides: str, requires_grad: bool = False) -> torch.Tensor:
        values = _laid_out(getattr(inputs, name)[rank].to(device), strides)
        return values.detach().requires_grad_(requires_grad)

    x, scores, ids, _, grad_out = step.strides
    return Leaves(
        x=leaf("x", x, step.x_grad[rank]),
        scores=leaf("scores", scores, step.scores_grad[rank]),
        ids=leaf("ids", ids),
        weight=leaf("weight", "plain", True),
        bias=leaf("bias", "plain", True),
        grad_out=leaf("grad_out", grad_out),
    )


def _experts(
    rows: torch.Tensor, counts_L: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, constant: bool
) -> torch.Tensor:
    """Return `row * weight + bias` of each row's expert; NaN past the last expert's, never to be read."""
    counts = counts_L.tolist()
    *parts, rest = rows.split([*counts, rows.shape[0] - sum(counts)])
    made = [
        b.expand(part.shape) if constant else part * w + b
        for part, w, b in zip(parts, weight.unbind(), bias.unbind(), strict=True)
    ]
    return torch.cat([*made, torch.full_like(rest, float("nan"))])


def _flow(
    dispatcher: Any, step: Step, leaves: Leaves, asynchronous: bool, pause: Callable[[], None], **lane: int
) -> Flow:
    """Dispatch, let the experts work, combine."""
    counts = None
    if step.with_counts:
        valid = leaves.ids[leaves.ids >= 0].long()
        counts = torch.bincount(valid, minlength=dispatcher.cfg.num_experts)
    arguments = (leaves.x, leaves.scores, leaves.ids, counts)
    pause()
    if asynchronous:
        pending = dispatcher.dispatch_async(*arguments, **lane)
        yield
        pause()
        rows, tokens_per_expert, handle = pending.join()
    else:
        rows, tokens_per_expert, handle = dispatcher.dispatch(*arguments, **lane)
    pause()
    y = _experts(rows, tokens_per_expert, leaves.weight, leaves.bias, step.constant)
    y = _laid_out(y, step.strides[3])
    outs = []
    for part in [y, y / 2] if step.twice else [y]:
        if asynchronous:
            pending = dispatcher.combine_async(part, handle)
            yield
            pause()
            outs.append(pending.join())
        else:
            outs.append(dispatcher.combine(part, handle))
    out = outs[0] + outs[1] if step.twice else outs[0]
    return Outcome(leaves, rows, tokens_per_expert, out, torch.is_grad_enabled())


def _in_turns(flows: Sequence[Flow]) -> list[Outcome]:
    """Run flows in turns, from one yield to the next; return what each returned."""
    results: dict[int, Outcome] = {}
    while len(results) < len(flows):
        for index, flow in enumerate(flows):
            if index not in results:
                try:
                    next(flow)
                except StopIteration as stop:
                    results[index] = stop.value
    return [results[index] for index in range(len(flows))]


def _recomputed(flow: Callable[[Leaves], Flow], leaves: Leaves) -> Outcome:
    """Run a flow under activation checkpointing."""
    seen: list[Outcome] = []

    def body(x: torch.Tensor, scores: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        changed = replace(leaves, x=x, scores=scores, weight=weight, bias=bias)
        seen.extend(_in_turns([flow(changed)]))
        return seen[-1].out

    out = checkpoint(body, leaves.x, leaves.scores, leaves.weight, leaves.bias, use_reentrant=False)
    return replace(seen[0], leaves=leaves, out=out)


def _run_round(
    one: Round,
    flows: Sequence[Callable[[Leaves], Flow]],
    leaves: Sequence[Leaves],
    pause: Callable[[], None],
) -> list[Outcome]:
    """Run a round's steps forward and backward.

    Args:
        one: the round.
        flows: of each of its steps, from this rank's tensors to its exchanges.
        leaves: these tensors, of each step.
        pause: sleeps for a while, or not.
    """

    def go_back(outcomes: Sequence[Outcome]) -> None:
        pause()
        torch.autograd.backward([o.out for o in outcomes], [o.leaves.grad_out for o in outcomes])

    pairs = list(zip(flows, leaves, strict=True))
    if one.form == "no_grad":
        with torch.no_grad():
            return [_in_turns([flow(mine)])[0] for flow, mine in pairs]
    if one.form == "pipelined":
        outcomes = _in_turns([flow(mine) for flow, mine in pairs])
    else:
        outcomes = []
        for flow, mine in pairs:
            again = one.form.startswith("checkpoint")
            outcomes.append(_recomputed(flow, mine) if again else _in_turns([flow(mine)])[0])
            if one.backward == "each":
                go_back(outcomes[-1:])
    if one.backward == "together":
        go_back(outcomes)
    elif one.backward != "each":
        for outcome in outcomes if one.backward == "first first" else outcomes[::-1]:
            go_back([outcome])
    return outcomes


def _pauses(seed: int, rank: int) -> Callable[[], None]:
    """Return a function that sleeps for a random time, mostly none, by a rank's own dice."""
    rng = random.Random(f"{seed} {rank}")

    def pause() -> None:
        if rng.random() < 0.3:
            time.sleep(rng.choice([0.0001, 0.001, 0.003, 0.02]))

    return pause


def _no_pause() -> None:
    """Sleep not at all."""


def _oracle(
    case: Case, step: Step, inputs: Inputs
) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    """Return each rank's output, and gradients by name, by the reference from inputs in fp64."""
    capacity, pad_multiple = case.layers[step.layer]
    routing = (inputs.ids, case.sizes["num_experts"], pad_multiple, capacity)
    leaves = {name: [t.requires_grad_() for t in getattr(inputs, name)] for name in _GRADIENTS}
    rows, counts = reference.dispatch(inputs.x, *routing)
    arguments = zip(rows, counts, inputs.weight, inputs.bias, strict=True)
    ys = [_experts(*one, step.constant) for one in arguments]
    outs = [out * (1.5 if step.twice else 1) for out in reference.combine(ys, inputs.scores, *routing)]
    flat = [t for tensors in leaves.values() for t in tensors]
    grads = torch.autograd.grad(outs, flat, inputs.grad_out, allow_unused=True)
    found = iter([torch.zeros_like(t) if g is None else g for t, g in zip(flat, grads, strict=True)])
    gradients = {name: [next(found) for _ in tensors] for name, tensors in leaves.items()}
    return [out.detach() for out in outs], gradients


def _difference(what: str, wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> list[Any]:
    """Return a mismatch where tensors of one shape differ: the first place, and how many."""
    if not wrong.any():
        return []
    index = tuple(wrong.nonzero()[0].tolist())
    # As text: NaN and infinities are no JSON.
    values = {"expected": repr(expected[index].item()), "got": repr(actual[index].item())}
    return [{"what": what, "index": index, **values, "wrong": int(wrong.sum()), "of": wrong.numel()}]


def _misfit(what: str, actual: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> list[Any]:
    """Return a mismatch if a tensor has another shape or dtype than expected."""
    expected, got = f"{tuple(shape)} {dtype}", f"{tuple(actual.shape)} {actual.dtype}"
    return [{"what": what, "expected": expected, "got": got}] if expected != got else []


def _bitwise(what: str, actual: torch.Tensor, expected: torch.Tensor) -> list[dict[str, Any]]:
    """Return a mismatch unless tensors have the same bits: -0.0 is not 0.0 here, and NaN equals NaN."""
    actual, expected = actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    if misfit := _misfit(what, actual, expected.shape, expected.dtype):
        return misfit
    bits = _BITS[actual.element_size()]
    wrong = actual.view(bits) != expected.view(bits)
    return _difference(what, wrong, actual, expected)


def _within(
    what: str, actual: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Return a mismatch unless a tensor is within a bound of fp64 values, and infinite or NaN with them."""
    actual = actual.detach().cpu()
    if misfit := _misfit(what, actual, exact.shape, dtype):
        return misfit
    actual = actual.double()
    # Of equal infinities the difference is NaN, which is not within anything.
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    wrong = ~(same | (exact.isfinite() & ((actual - exact).abs() <= bound)))
    return _difference(what, wrong, actual, exact)


def _compare_sums(
    case: Case, step: Step, rank: int, inputs: Inputs, outcome: Outcome, roundings: int, prefix: str = ""
) -> list[dict[str, Any]]:
    """Compare a rank's output and gradients with the reference in fp64.

    Args:
        case: the case.
        step: the step.
        rank: whose.
        inputs: of all ranks.
        outcome: this rank's.
        roundings: to the row dtype, at most, on the way to any result, but for the sum of two combines.
        prefix: of what is reported.
    """
    dtype = _DTYPES[case.sizes["dtype"]]
    outs, grads = _oracle(case, step, inputs.in_fp64())
    sizes, grad_sizes = _oracle(case, step, inputs.in_fp64(torch.abs))
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    # One rounding more than the analysis counts pays for its higher orders. Sums of up to D products,
    # and of an expert's rows, are taken in fp32 (fp64), and the reference's own in fp64.
    unit = (roundings + step.twice + 1) * torch.finfo(dtype).eps / 2
    unit += (2 * case.sizes["hidden_dim"] + 64) * torch.finfo(accumulate).eps / 2
    found = _within(f"{prefix}out", outcome.out, outs[rank], unit * sizes[rank], dtype)
    if not outcome.backward:
        return found
    for name in _GRADIENTS:
        leaf = getattr(outcome.leaves, name)
        if not leaf.requires_grad:
            continue
        actual = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        own = torch.finfo(leaf.dtype).eps / 2
        bound = (unit + own) * grad_sizes[name][rank]
        found += _within(f"{prefix}gradient of {name}", actual, grads[name][rank], bound, leaf.dtype)
    return found


def _compare(
    case: Case, one: Round, step: Step, rank: int, outcome: Outcome, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Compare what a step gave on this rank with the baseline and the reference; collective.

    Returns:
        The mismatches, described.
    """
    inputs = draw_inputs(case, step)
    capacity, pad_multiple = case.layers[step.layer]
    num_experts, device = case.sizes["num_experts"], outcome.rows.device
    needed = [len(rank.origin) for rank in reference.route(inputs.ids, num_experts, pad_multiple)]
    found = _compare_sums(case, step, rank, inputs, outcome, roundings=4)
    if capacity != "exact" and max(needed) > capacity:
        rows, counts = reference.dispatch(inputs.x, inputs.ids, num_experts, pad_multiple, capacity)
        rows, counts = rows[rank], counts[rank]
    else:
        cfg = case.config(step.layer, capacity="exact")
        form = "sync" if outcome.backward else "no_grad"
        with AllToAllTokenDispatcher(cfg, group, device) as baseline:
            flow = partial(_flow, baseline, step, asynchronous=False, pause=_no_pause)
            leaves = _leaves(inputs, step, rank, device)
            theirs = _run_round(Round(form, "each", (step,)), [flow], [leaves], _no_pause)[0]
        roundings = 3 + case.sizes["top_k"]
        found += _compare_sums(case, step, rank, inputs, theirs, roundings, "the baseline's ")
        rows, counts = theirs.rows.detach(), theirs.tokens_per_expert
        if capacity != "exact":
            rows = torch.cat([rows, rows.new_zeros(capacity - len(rows), rows.shape[1])])
    found += _bitwise("rows", outcome.rows, rows)
    found += _bitwise("tokens per expert", outcome.tokens_per_expert, counts)
    place = {"step": step.number, "rank": rank, "form": one.form, "backward": one.backward}
    return [{**place, **mismatch, "parameters": asdict(step)} for mismatch in found]


def run_case(case: Case, rank: int, group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """Run a case; collective. Returns this rank's mismatches, described."""
    timeout = 60.0 if device.type == "cuda" else 20.0
    pause = _pauses(case.seed, rank)
    with contextlib.ExitStack() as stack:
        owner = SymmTokenDispatcher(case.config(0, timeout), group, device=device)
        dispatchers = [stack.enter_context(owner)]
        for layer in range(1, len(case.layers)):
            sharer = SymmTokenDispatcher(case.config(layer, timeout), arena=owner.arena)
            dispatchers.append(stack.enter_context(sharer))
        done: list[tuple[Round, Step, Outcome]] = []
        for one in case.rounds:
            leaves = [_leaves(draw_inputs(case, step), step, rank, device) for step in one.steps]
            halves = one.form in ("async", "pipelined", "checkpoint async")
            flows = [
                partial(
                    _flow, dispatchers[step.layer], step, asynchronous=halves, pause=pause, lane=step.lane
                )
                for step in one.steps
            ]
            outcomes = _run_round(one, flows, leaves, pause)
            done += [(one, *pair) for pair in zip(one.steps, outcomes, strict=True)]
        found = []
        for one, step, outcome in done:
            found += _compare(case, one, step, rank, outcome, group)
        return found


def run_cases(
    rank: int, group: dist.ProcessGroup, seed: int, until: float, device_type: str, journal: str
) -> None:
    """Run cases of the seeds from `seed` on until the time is up, at least one; what each rank does.

    Args:
        rank: this rank.
        group: all of them.
        seed: of the first case.
        until: when to stop, of the monotonic clock; rank 0 looks at it for all.
        device_type: `"cpu"` or `"cuda"`.
        journal: the folder for what is found.
    """
    device = torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else 0)
    longest = 0.0
    with open(Path(journal) / f"{rank}.jsonl", "a", buffering=1) as file:

        def note(**entry: Any) -> None:
            file.write(json.dumps(entry) + "\n")

        for number in itertools.count():
            begin = time.monotonic()
            wanted = torch.tensor(number == 0 or begin + longest < until, dtype=torch.int32, device=device)
            dist.broadcast(wanted, 0, group=group)
            if not wanted.item():
                return
            case = draw_case(seed + number, dist.get_world_size(group), device_type)
            shown = {"seed": case.seed, "sizes": case.sizes, "layers": case.layers}
            note(event="begin", **shown)
            # NumPy, which interprets the kernels, warns of NaN.
            with np.errstate(all="ignore"):
                found = run_case(case, rank, group, device)
            for mismatch in found:
                note(event="mismatch", **shown, **mismatch)
            note(event="end", seed=case.seed, steps=len(case.steps))
            longest = max(longest, time.monotonic() - begin)


@dataclass
class Result:
    """What a check found.

    Attributes:
        ranks: how many there were.
        backend: that they used.
        backend_reason: why.
        kernels: `"compiled"` or `"interpreted"`.
        seed: of the first case; the n-th has `seed + n`.
        cases: run, the one that failed included.
        steps: run.
        mismatches: cases with a wrong result on any rank, or that failed or hung.
        seconds: for all of it.
        details: of the mismatches, at most 50.
        failures: what became of the ranks, the first failure first, where a case failed or hung, or none
            could be started; `rank` and `text` of each.
        interrupted: whether the user ended it.
    """

    ranks: int
    backend: str
    backend_reason: str
    kernels: str
    seed: int
    cases: int = 0
    steps: int = 0
    mismatches: int = 0
    seconds: float = 0.0
    details: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        """Whether cases were run, and all were right."""
        return self.cases > 0 and self.mismatches == 0 and not self.failures


class _Journal:
    """Reads, as they are written, the files that the ranks leave in a folder, into a result."""

    def __init__(self, folder: Path, ranks: int, result: Result) -> None:
        self._result = result
        self._paths = [folder / f"{rank}.jsonl" for rank in range(ranks)]
        self._offsets = [0] * ranks
        self._wrong: set[int] = set()
        self._case: dict[str, Any] | None = None
        self._case_ended = True

    def read(self) -> None:
        """Add what is new."""
        for rank, path in enumerate(self._paths):
            for entry in self._new_entries(rank, path):
                event = entry.pop("event")
                if event == "mismatch":
                    self._mismatch(entry)
                elif rank == 0:
                    self._case_ended = event == "end"
                    self._case = entry if event == "begin" else self._case
                    self._result.cases += event == "end"
                    self._result.steps += entry.get("steps", 0)

    def blame(self, error: RankError) -> None:
        """Add that the ranks failed, in the case that began last, if one did."""
        self._result.failures = [asdict(failure) for failure in error.failures]
        if self._case is not None:
            self._result.cases += not self._case_ended
            rank, lines = error.failures[0].rank, error.failures[0].text.strip().splitlines()
            why = lines[-1 if lines[0].startswith("Traceback") else 0]
            self._mismatch({**self._case, "rank": rank, "what": "case failed", "got": why})

    def _mismatch(self, entry: dict[str, Any]) -> None:
        self._wrong.add(entry["seed"])
        self._result.mismatches = len(self._wrong)
        if len(self._result.details) < _MOST_DETAILS:
            self._result.details.append(entry)

    def _new_entries(self, rank: int, path: Path) -> list[dict[str, Any]]:
        if not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(self._offsets[rank])
            data = file.read()
        # The last line may not be complete yet.
        complete = data[: data.rfind(b"\n") + 1]
        self._offsets[rank] += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


def check(
    ranks: int,
    seconds: float,
    seed: int | None = None,
    progress: Callable[[Result], None] | None = None,
) -> Result:
    """Run random cases over processes of this machine; never raises for what they find.

    With a GPU for each rank the ranks use them; otherwise CPU memory and Triton's interpreter.

    Args:
        ranks: how many processes.
        seconds: for all of it, roughly; at least one case is run.
        seed: of the first case; None draws one.
        progress: called some times a second, from a thread, with what there is so far.

    Returns:
        What was found. An interrupt from the keyboard ends the run, with what there is by then.
    """
    begin = time.monotonic()
    on_gpus = not INTERPRETED and torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    device = "cuda" if on_gpus else "cpu"
    backend, reason = choose_backend(torch.device(device), ranks)
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    result = Result(ranks, backend, reason, "compiled" if on_gpus else "interpreted", seed)
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="symm_a2a-check-") as folder, _interpreter(not on_gpus):
        journal = _Journal(Path(folder), ranks, result)

        def watch() -> None:
            while not stop.wait(0.25):
                journal.read()
                result.seconds = time.monotonic() - begin
                if progress:
                    progress(result)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        error = None
        try:
            limit = max(seconds + START_UP, _SHORTEST_LIMIT)
            run_ranks(run_cases, ranks, seed, begin + seconds, device, folder, timeout=limit, device=device)
        except RankError as raised:
            error = raised
        except KeyboardInterrupt:
            result.interrupted = True
        finally:
            stop.set()
            watcher.join()
        journal.read()
        if error is not None:
            journal.blame(error)
    result.seconds = time.monotonic() - begin
    return result


@contextlib.contextmanager
def _interpreter(wanted: bool) -> Iterator[None]:
    """Have processes that start now interpret their kernels, also beside GPUs that are too few."""
    before = os.environ.get("TRITON_INTERPRET")
    if wanted:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if wanted and before is None:
            del os.environ["TRITON_INTERPRET"]
        elif before is not None:
            os.environ["TRITON_INTERPRET"] = before
