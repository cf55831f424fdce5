"""The fixed cases: few sets of sizes, as each has its kernels compiled, and several routings of each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from symm_a2a import EPConfig
from symm_a2a.check.cases import Case, Step
from symm_a2a.kernels.blocks import SMALL_TOKENS

PLAIN = ("plain",) * 5
SHIFTED = ("shifted", "sliced", "plain", "transposed", "expanded")


@dataclass(frozen=True)
class Planned:
    """A case of `symm_a2a.check`, and what that does not know of.

    Attributes:
        case: sizes, one dispatcher, steps without rounds.
        steps: of the case.
        world_size: W.
        num_programs: as in `EPConfig`.
    """

    case: Case
    steps: tuple[Step, ...]
    world_size: int
    num_programs: int | None = None

    def config(self) -> EPConfig:
        """Return the configuration of its dispatchers."""
        return replace(self.case.config(0), num_programs=self.num_programs)


def planned_case(name: str, device: str) -> Planned:
    """Return a case of `bench.gpu_check.parts.CASES`; smaller on a CPU.

    Raises:
        ValueError: there is no such case.
    """
    gpu = device != "cpu"
    large = SMALL_TOKENS + 80 if gpu else SMALL_TOKENS + 2
    match name:
        case "odd-bf16":
            sizes = _sizes(E=8, K=3, D=70, C=40, dtype="bfloat16")
            steps = _steps([(40, 0, 17, 1), (0, 0, 9, 0), (5, 40, 40, 2)], ["any", "one rank", "any"])
            steps[2] = replace(steps[2], strides=SHIFTED, special=True, ids_dtype="int32")
            return _planned(1, sizes, ("exact", 1), steps)
        case "padded-bf16":
            sizes = _sizes(E=16, K=4, D=2048 if gpu else 48, C=large, dtype="bfloat16")
            some = (large, SMALL_TOKENS, 0, SMALL_TOKENS + 1, 7, 0, 1, 33) if gpu else (large, 5)
            most = -(-len(some) * large * 4 // 16) * 16 + 16 * 16
            steps = _steps([some, some[::-1]], ["distinct", "skewed"])
            return _planned(2, sizes, (most, 16), steps if gpu else steps[:1])
        case "drops-fp32":
            sizes = _sizes(E=6, K=6, D=33, C=24, dtype="float32")
            steps = _steps([(24, 24), (3, 24), (0, 0)], ["any", "one rank", "any"])
            return _planned(3, sizes, (100, 5), steps)
        case "column-fp64":
            sizes = _sizes(E=3, K=2, D=1, C=9, dtype="float64")
            steps = _steps([(9, 3, 0), (1, 9, 9)], ["any", "masked"])
            return _planned(4, sizes, ("exact", 5), steps)
        case "budget-fp16":
            sizes = _sizes(E=64 if gpu else 16, K=8, D=1000 if gpu else 40, C=large, dtype="float16")
            some = (large, 3, SMALL_TOKENS, 0) if gpu else (large, 3, 0, 0)
            steps = _steps([some, some[::-1]], ["distinct", "one expert"])
            return _planned(5, sizes, (4 * large * 8, 1), steps if gpu else steps[:1], num_programs=7)
        case "twelve-ranks":
            sizes = _sizes(E=24, K=5, D=264 if gpu else 24, C=130 if gpu else 13, dtype="bfloat16")
            ragged = (130, 1, 0, 64, 17, 2, 129, 0, 33, 8, 5, 90) if gpu else (13, 1, 0, *[3] * 9)
            steps = _steps([ragged, ragged[::-1]], ["any", "local"])
            return _planned(6, sizes, ("exact", 1), steps if gpu else steps[:1])
    raise ValueError(f"expected a case of bench/gpu_check/parts.py, got {name}")


def between_ranks(capacity: int | str, lanes: int = 2) -> Planned:
    """Return the case of two rank processes: three steps, the last two for lanes of their own."""
    sizes = _sizes(E=8, K=3, D=70, C=40, dtype="bfloat16") | {"num_lanes": lanes}
    steps = _steps([(40, 3), (0, 31), (17, 40)], ["any", "distinct", "skewed"])
    for number in range(1, len(steps)):
        steps[number] = replace(steps[number], lane=number - 1)
    return _planned(7, sizes, (capacity, 1), steps)


def _sizes(*, E: int, K: int, D: int, C: int, dtype: str) -> dict[str, Any]:
    return dict(num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=C, dtype=dtype, num_lanes=1)


def _steps(tokens: list[tuple[int, ...]], routings: list[str]) -> list[Step]:
    numbers = itertools.count()
    return [
        Step(
            number=next(numbers), lane=0, layer=0, tokens=each, routing=routing, ids_dtype="int64",
            scores_dtype="float32", strides=PLAIN, constant=False, twice=False, special=False,
            x_grad=(True,) * len(each), scores_grad=(True,) * len(each),
        )
        for each, routing in zip(tokens, routings, strict=True)
    ]  # fmt: skip


def _planned(
    seed: int,
    sizes: dict[str, Any],
    layer: tuple[Any, int],
    steps: list[Step],
    num_programs: int | None = None,
) -> Planned:
    return Planned(Case(seed, sizes, (layer,), ()), tuple(steps), len(steps[0].tokens), num_programs)


def poison(device: str) -> None:
    """Leave NaN in the memory that the allocator gives out next: what nobody writes then shows."""
    for elements in [1 << 22 if device != "cpu" else 1 << 16, *[1 << 10] * 64]:
        torch.full((elements,), float("nan"), device=device)
