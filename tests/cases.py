"""Random routings and a small model over them, for virtual worlds and for processes alike."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import symm_a2a
from symm_a2a import reference
from symm_a2a.kernels.blocks import INTERPRETED, Blocks, padded


@dataclass(frozen=True)
class Case:
    """Sizes and routing of one exchange over `len(tokens)` ranks."""

    num_local_experts: int
    top_k: int
    hidden_dim: int
    tokens: tuple[int, ...]
    skew: str
    masked: float
    ids_dtype: torch.dtype
    pad_multiple: int
    seed: int

    @property
    def world_size(self) -> int:
        return len(self.tokens)

    @property
    def num_experts(self) -> int:
        return self.num_local_experts * self.world_size

    def config(self, **changes: object) -> symm_a2a.EPConfig:
        fields = dict(
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_dim=self.hidden_dim,
            max_tokens_per_rank=max(1, *self.tokens),
            pad_multiple=self.pad_multiple,
        )
        return symm_a2a.EPConfig(**(fields | changes))

    def whole(self, capacity: int | str) -> int | str:
        """A capacity, up to the next multiple of the case's padding."""
        return capacity if capacity == "exact" else -(-capacity // self.pad_multiple) * self.pad_multiple

    def generator(self, step: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 1000 * step)

    def ids(self, step: int = 0) -> list[Tensor]:
        """Expert ids of every rank: duplicates within a token, masks, and the case's skew."""
        gen = self.generator(step)
        result = []
        for T in self.tokens:
            shape = (T, self.top_k)
            if self.skew == "one_expert":
                ids = torch.full(shape, int(torch.randint(self.num_experts, (), generator=gen)))
            elif self.skew == "one_rank":
                ids = torch.randint(self.num_local_experts, shape, generator=gen)
            else:
                ids = torch.randint(self.num_experts, shape, generator=gen)
            ids[torch.rand(shape, generator=gen) < self.masked] = -1
            result.append(ids.to(self.ids_dtype))
        return result

    def xs(self, dtype: torch.dtype, step: int = 0) -> list[Tensor]:
        """Rows that name their rank and token in the first columns; the rest is noise."""
        gen = self.generator(step)
        result = []
        for rank, T in enumerate(self.tokens):
            x = torch.randn(T, self.hidden_dim, generator=gen, dtype=torch.float64)
            x[:, 0] = torch.arange(T) + 1
            x[:, 1:2] = rank + 1
            result.append(x.to(dtype))
        return result

    def scores(self, dtype: torch.dtype, step: int = 0) -> list[Tensor]:
        gen = self.generator(step)
        return [torch.rand(T, self.top_k, generator=gen, dtype=torch.float64).to(dtype) for T in self.tokens]


def use_small_blocks(world: symm_a2a.VirtualWorld) -> None:
    """Run what follows in several programs of small tiles each, as on a GPU.

    Blocks for the interpreter are so large that sizes fit for a test would never reach a
    second program, a second strip, or a second block.
    """
    for dispatcher in world.dispatchers:
        for lane in dispatcher.arena.lanes:
            layout = lane.layout
            small = Blocks(
                assigned=4,
                tokens=4,
                small_tokens=2,
                strip=padded(layout.top_k),
                sums=2,
                counts=2,
                copies=8,
                send_rows=2,
                copy_rows=4,
                sum_rows=2,
                grad_rows=4,
                rows=2,
                columns=16,
                peers=min(2, padded(layout.world_size)),
                slots=1,
                vector=4,
                warps=4,
            )
            lane.channel = dataclasses.replace(lane.channel, programs=3, blocks=small)


def examples(some: int) -> int:
    """Examples for hypothesis to try: more by night, few where each has its kernels compiled."""
    return some * int(os.environ.get("SYMM_A2A_TEST_EXAMPLES", "1")) if INTERPRETED else min(3, some)


@st.composite
def placements_of(draw: Callable, world_size: int, num_experts: int) -> symm_a2a.Placement:
    """Any experts on any ranks, at least one place each, in any order, with shares or without."""
    rng = random.Random(draw(st.integers(0, 2**20)))
    everyone = range(world_size)
    ranks = [
        set(rng.sample(everyone, rng.choice([1, rng.randint(1, world_size)]))) for _ in range(num_experts)
    ]
    held = [
        rng.sample(mine, len(mine))
        for mine in ([e for e in range(num_experts) if w in ranks[e]] for w in everyone)
    ]
    shares = None
    if draw(st.booleans()):
        shares = tuple(tuple(rng.choice([0.0, 0.5, 1.0, 3.0]) + 1e-3 for _ in mine) for mine in held)
    return symm_a2a.Placement(tuple(map(tuple, held)), shares, draw(st.booleans()))


@st.composite
def cases(draw: Callable, max_ranks: int = 8, max_tokens: int = 12, max_hidden: int = 40) -> Case:
    world_size = draw(st.integers(1, max_ranks))
    num_local = draw(st.integers(1, 3))
    return Case(
        num_local_experts=num_local,
        top_k=draw(st.integers(1, num_local * world_size)),
        hidden_dim=draw(st.integers(1, max_hidden)),
        tokens=tuple(draw(st.lists(st.integers(0, max_tokens), min_size=world_size, max_size=world_size))),
        skew=draw(st.sampled_from(["none", "none", "one_expert", "one_rank"])),
        masked=draw(st.sampled_from([0.0, 0.3, 1.0])),
        ids_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        pad_multiple=draw(st.sampled_from([1, 1, 4, 5])),
        seed=draw(st.integers(0, 2**20)),
    )


def apply_experts(rows_RD: Tensor, tokens_per_expert_L: Tensor, weights_LDD: Tensor) -> Tensor:
    """`tanh(rows @ W_e)`, each expert's rows by its own weights; rows past the last are zeros."""
    counts = tokens_per_expert_L.tolist()
    parts = rows_RD[: sum(counts)].split(counts)
    out = [torch.tanh(part @ weight) for part, weight in zip(parts, weights_LDD, strict=True)]
    return torch.cat([*out, rows_RD[sum(counts) :] * 0])


def model(
    dispatch: Callable, combine: Callable, xs: list[Tensor], scores: list[Tensor], weights: list[Tensor]
) -> list[Tensor]:
    """Two MoE layers with residuals; `weights[layer][rank]` is `(L, D, D)`."""
    for layer_weights in weights:
        rows, counts, handles = dispatch(xs)
        ys = [apply_experts(*args) for args in zip(rows, counts, layer_weights, strict=True)]
        xs = [x + out for x, out in zip(xs, combine(ys, scores, handles), strict=True)]
    return xs


def reference_model(case: Case, ids: list[Tensor], xs: list, scores: list, weights: list, capacity="exact"):
    """`model` over the oracle."""
    route = (case.num_experts, case.pad_multiple, capacity)
    return model(
        lambda rows: (*reference.dispatch(rows, ids, *route), None),
        lambda ys, s, _: reference.combine(ys, s, ids, *route),
        xs,
        scores,
        weights,
    )
