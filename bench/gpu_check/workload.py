"""A layer's exchange at a named shape: all ranks in one world, experts that return their rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu_check.journal import require
from bench.gpu_check.rates import loads_of
from bench.limits.load import Load
from bench.shapes import SHAPES, Shape
from symm_a2a import EPConfig, Handle, VirtualWorld
from symm_a2a.kernels.blocks import SMALL_TOKENS

TINY: dict[str, dict[str, Any]] = {
    "olmoe": dict(tokens=SMALL_TOKENS + 2, hidden=20, experts=8, top_k=2, ranks=2),
    "dsv3": dict(tokens=9, hidden=24, experts=12, top_k=3, ranks=3),
    "small": dict(tokens=9, hidden=24, experts=12, top_k=3, ranks=3),
}
"""Sizes on a CPU."""

FEWEST = 256
"""Tokens of a rank below which nothing is worth timing."""


@dataclass(frozen=True)
class Variant:
    """One way to configure a shape.

    Attributes:
        name: for a reader.
        num_programs: as in `EPConfig`.
        rooms: capacity for so many times the rows of the busiest rank.
    """

    name: str
    num_programs: int | None = None
    rooms: int = 1


FULL = Variant("full grid")
VARIANTS = (FULL, Variant("64 programs", num_programs=64), Variant("full grid, twice the rows", rooms=2))


def shape_for(name: str, device: str) -> Shape:
    """Return a named shape with as many tokens as the device has memory for; a tiny one on a CPU.

    Raises:
        MemoryError: not even few tokens fit.
    """
    shape = SHAPES[name]
    if device == "cpu":
        return replace(shape, **TINY[name])
    # Of all there is, not of what is free just now: kernels that were compiled for a number fit that alone.
    room = 0.75 * torch.cuda.get_device_properties(torch.device(device)).total_memory
    while memory_of(shape) > room:
        if shape.tokens <= FEWEST:
            raise MemoryError(f"expected {memory_of(shape) >> 20} MiB for {shape}, got {int(room) >> 20} MiB")
        shape = replace(shape, tokens=shape.tokens // 2)
    return shape


def memory_of(shape: Shape) -> int:
    """Return about how many bytes all ranks of a shape need on one device, with room for twice the rows."""
    row, rows = shape.hidden * shape.dtype.itemsize, 2 * shape.tokens * shape.top_k
    symmetric = shape.config(num_lanes=1).symmetric_bytes(shape.ranks)
    index = 4 * 4 * shape.ranks * shape.tokens * shape.top_k
    return shape.ranks * (symmetric + row * (3 * rows + 6 * shape.tokens) + index)


class Workload:
    """A world at a shape, its inputs, and a forward and backward.

    Args:
        shape: the sizes.
        variant: how it is configured.
        device: where all ranks live.
    """

    def __init__(self, shape: Shape, variant: Variant, device: str) -> None:
        self.shape, W, T = shape, shape.ranks, shape.tokens
        generator = torch.Generator().manual_seed(11)
        # K different experts of each token, all equally likely.
        self._ids = [
            torch.rand(T, shape.experts, generator=generator).topk(shape.top_k).indices for _ in range(W)
        ]
        owners = torch.cat(self._ids).flatten() // (shape.experts // W)
        busiest = int(torch.bincount(owners, minlength=W).max())
        self.capacity = -(-variant.rooms * busiest // 128) * 128
        self.cfg: EPConfig = shape.config(
            num_lanes=1, capacity=self.capacity, num_programs=variant.num_programs
        )
        self.world = VirtualWorld(self.cfg, W, device)
        self._token_block = self.world.dispatchers[0].arena.lanes[0].channel.blocks.tokens
        on_device = torch.Generator(device).manual_seed(12)
        randn = partial(torch.randn, T, shape.hidden, dtype=shape.dtype, device=device, generator=on_device)
        self.ids = [ids.to(device) for ids in self._ids]
        self.xs = [randn().requires_grad_() for _ in range(W)]
        self.scores = [
            torch.rand(T, shape.top_k, device=device, generator=on_device).requires_grad_() for _ in range(W)
        ]
        self.grads = [randn() for _ in range(W)]

    def loads(self) -> list[Load]:
        """Return every rank's load."""
        return loads_of(self.cfg, self._ids, self.capacity, self._token_block)

    def forward(self) -> tuple[list[Tensor], list[Handle], list[Tensor]]:
        """Return rows, handles and outputs of every rank."""
        rows, _, handles = self.world.dispatch(self.xs, self.scores, self.ids)
        return rows, handles, self.world.combine(rows, handles)

    def backward(self, outs: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the gradients of every rank's tokens, then of their scores."""
        return torch.autograd.grad(outs, [*self.xs, *self.scores], self.grads)

    def step(self) -> None:
        """Run forward and backward."""
        self.backward(self.forward()[2])

    def check(self) -> None:
        """Check rows bit by bit, and all sums within the roundings of bfloat16, at full size.

        Raises:
            AssertionError: what is wrong, and where.
        """
        rows, _, outs = self.forward()
        with torch.no_grad():
            found = [text for rank, each in enumerate(rows) for text in self._misplaced(rank, each)]
        grads = self.backward(outs)
        W, unit = self.shape.ranks, torch.finfo(self.shape.dtype).eps / 2
        for rank in range(W):
            x, g, s = self.xs[rank].detach(), self.grads[rank], self.scores[rank].detach()
            total, dot = s.sum(1, keepdim=True), (x.float() * g.float()).sum(1, keepdim=True)
            size = (x.float() * g.float()).abs().sum(1, keepdim=True)
            # At most five roundings: a row's gradient, a rank's sum, the whole; more for higher orders.
            for what, ours, exact, bound in (
                ("out", outs[rank], x.float() * total, 5 * unit * x.float().abs() * total),
                ("gradient of x", grads[rank], g.float() * total, 5 * unit * g.float().abs() * total),
                ("gradient of scores", grads[W + rank], dot.expand_as(s), 1e-4 * size + 1e-6),
            ):
                wrong = ~((ours.float() - exact).abs() <= bound)
                if wrong.any():
                    found.append(f"rank {rank}: {what}: {int(wrong.sum())} of {ours.numel()} elements")
        require(found)

    def _misplaced(self, rank: int, rows: Tensor) -> list[str]:
        """Compare a rank's rows with all tokens' rows, sorted by expert; the rest are to be zeros."""
        L, K = self.shape.experts // self.shape.ranks, self.shape.top_k
        expert = torch.cat(self.ids).flatten()
        slot = (expert // L == rank).nonzero().squeeze(1)
        slot = slot[torch.sort(expert[slot], stable=True).indices]
        tokens = slot // K
        for first in range(0, len(tokens), 4096):
            some = tokens[first : first + 4096]
            if not torch.equal(rows[first : first + len(some)], _rows_at(self.xs, some)):
                return [f"rank {rank}: rows {first} to {first + len(some)} are not those of their tokens"]
        if rows[len(tokens) :].any():
            return [f"rank {rank}: rows past the last expert's are not zeros"]
        return []

    def close(self) -> None:
        """Give the memory back."""
        self.world.close()


def _rows_at(xs: list[Tensor], tokens: Tensor) -> Tensor:
    """Return the rows of tokens that are numbered over all ranks."""
    T = len(xs[0])
    result = torch.empty((len(tokens), xs[0].shape[1]), dtype=xs[0].dtype, device=xs[0].device)
    for rank, x in enumerate(xs):
        here = tokens // T == rank
        result[here] = x[tokens[here] % T]
    return result
