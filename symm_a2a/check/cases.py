"""What a case is, and how one is drawn from a seed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch

from symm_a2a.config import EPConfig
from symm_a2a.reference import Capacity


@dataclass(frozen=True)
class Step:
    """One micro-batch of a case, on dispatcher number `layer`; its `number` is its place in the case.

    Attributes:
        tokens: T of each rank.
        routing: how experts are chosen, see `inputs._draw_ids`.
        strides: memory layouts, see `inputs.lay_out`, of x, scores, ids, the experts' output, and the
            output's gradient.
        constant: whether the experts ignore their input, so that no gradient reaches the rows.
        twice: whether the handle is combined twice, the second time with half of the experts' output, and
            the two added: two exchanges of one direction in a row, where a rank must wait for the slowest.
        special: whether x has negative zeros, infinities and NaN, and masked slots a score of NaN.
        x_grad: whether x requires a gradient, on each rank; `scores_grad`: whether the scores do.
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


@dataclass(frozen=True)
class Round:
    """Steps that run together.

    Attributes:
        form: `"sync"`; `"async"`, launch and join; `"pipelined"`, the same with the steps interleaved,
            each in a lane of its own; or recomputed in the backward, `"checkpoint"` and
            `"checkpoint async"`.
        backward: `"each"`, as soon as possible; after all forwards, `"first first"`, `"last first"` or
            `"together"`; or `"none"`, without grad mode.
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
    layers: tuple[tuple[Capacity, int], ...]
    rounds: tuple[Round, ...]

    @property
    def steps(self) -> list[Step]:
        """All of them, in the order of their numbers."""
        return [step for one in self.rounds for step in one.steps]

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return getattr(torch, self.sizes["dtype"])

    def config(self, layer: int, timeout: float = 60.0) -> EPConfig:
        """Return the configuration of one of the dispatchers."""
        capacity, pad = self.layers[layer]
        sizes = {**self.sizes, "dtype": self.dtype, "capacity": capacity, "pad_multiple": pad}
        return EPConfig(**sizes, overflow="drop", timeout=timeout)


def draw_case(seed: int, world_size: int, device: str = "cpu") -> Case:
    """Return the case of a seed; with more rounds on `"cuda"`, where its kernels are compiled first."""
    rng = random.Random(seed)
    # Past the largest block of tokens, and of columns, only now and then: those cases take long.
    small = ([1, 2, 3, 7, 8, 17, 32, 33, 64, 100, 130], [1, 2, 5, 16, 31, 32, 33, 48])
    hidden, tokens = rng.choice([small] * 8 + [([1, 3, 16], [300]), ([4100], [1, 5, 16])])
    sizes = {
        "num_experts": world_size * rng.choice([1, 1, 2, 3, 4, 5, 8]),
        "top_k": rng.choice([1, 2, 2, 3, 4, 6, 8]),
        "hidden_dim": rng.choice(hidden),
        "max_tokens_per_rank": rng.choice(tokens),
        "dtype": rng.choice(["bfloat16", "bfloat16", "float16", "float32", "float32", "float64"]),
        "num_lanes": rng.choice([1, 2, 2, 2, 3]),
    }
    most = world_size * sizes["max_tokens_per_rank"] * sizes["top_k"]
    layers: list[tuple[Capacity, int]] = []
    for _ in range(rng.choice([1, 1, 2])):
        pad = rng.choice([1, 1, 2, 3, 8, 16])
        enough = most + sizes["num_experts"] // world_size * (pad - 1)
        fixed = [-(-rows // pad) * pad for rows in (enough, rng.randint(1, enough))]
        layers.append((rng.choice(["exact", "exact", "exact", *fixed]), pad))
    forms = ["sync", "sync", "async", "pipelined", "pipelined", "checkpoint", "checkpoint async"]
    numbers = itertools.count()
    rounds = []
    for _ in range(rng.choice([1, 2, 2, 3]) * (8 if device == "cuda" else 1)):
        form = rng.choice(forms)
        lanes = rng.choices(range(sizes["num_lanes"]), k=rng.choice([1, 1, 2, 3]))
        if form == "pipelined":
            lanes = rng.sample(range(sizes["num_lanes"]), k=sizes["num_lanes"])
        backward = rng.choice(["each", "first first", "last first", "together"] * 2 + ["none"])
        steps = [_draw_step(rng, next(numbers), lane, len(layers), sizes, world_size) for lane in lanes]
        rounds.append(Round(form, backward, tuple(steps)))
    return Case(seed, sizes, tuple(layers), tuple(rounds))


def _draw_step(
    rng: random.Random, number: int, lane: int, layers: int, sizes: dict[str, Any], world_size: int
) -> Step:
    ranks, most = range(world_size), sizes["max_tokens_per_rank"]
    ragged = [rng.choice([0, 1, most, *[rng.randint(0, most)] * 3]) for _ in ranks]
    busy, some = rng.choice(ranks), rng.randint(1, most)
    tokens = [ragged, ragged, ragged, [most for _ in ranks], [0 for _ in ranks]]
    tokens.append([some if rank == busy else 0 for rank in ranks])
    routings = ["any", "any", "any", "skewed", "one expert", "one rank", "local", "masked"]
    if sizes["top_k"] <= sizes["num_experts"]:
        routings += ["distinct"] * 3
    strides = ["plain", "plain", "transposed", "sliced", "shifted"]
    return Step(
        number=number,
        lane=lane,
        layer=rng.randrange(layers),
        tokens=tuple(rng.choice(tokens)),
        routing=rng.choice(routings),
        ids_dtype=rng.choice(["int32", "int64"]),
        scores_dtype=rng.choice(["float32", "float32", "float64", sizes["dtype"]]),
        strides=(*rng.choices(strides, k=4), rng.choice([*strides, "expanded"])),
        constant=rng.random() < 0.15,
        twice=rng.random() < 0.25,
        special=rng.random() < 0.25,
        x_grad=tuple(rng.random() < 0.85 for _ in ranks),
        scores_grad=tuple(rng.random() < 0.85 for _ in ranks),
    )
