"""What is measured, and the inputs and results of one rank: all of it follows from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.ulysses.options import Op, Options

DEFAULTS: dict[str, dict[str, int]] = {
    "gpu": dict(heads=32, dim=128),
    "interpreted": dict(heads=8, dim=16),
}
TOKENS: dict[str, tuple[int, ...]] = {"gpu": (4096, 32768), "interpreted": (16,)}


@dataclass(frozen=True)
class Case:
    """One operation on one shape; every backend runs it.

    Attributes:
        op: the operation.
        ranks: W.
        batch: b.
        tokens: s, of a rank.
        heads: h, of all ranks.
        dim: d.
        dtype: its name.
    """

    op: Op
    ranks: int
    batch: int
    tokens: int
    heads: int
    dim: int
    dtype: str

    @property
    def element(self) -> torch.dtype:
        """The dtype."""
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """Of one rank's tensor, in either layout."""
        return self.batch * self.tokens * self.heads * self.dim * self.element.itemsize

    @property
    def title(self) -> str:
        """The case in a few words."""
        return f"{self.op} ({self.batch}, {self.tokens}, {self.heads}, {self.dim}) {self.dtype}"


def plan(options: Options, ranks: int, mode: str) -> list[Case]:
    """Return the cases, the same list on every rank.

    Raises:
        ValueError: the heads do not divide among the ranks.
    """
    heads = options.heads or DEFAULTS[mode]["heads"]
    if heads % ranks:
        raise ValueError(f"expected --heads to be a multiple of {ranks} ranks, got {heads}")
    return [
        Case(op, ranks, options.batch, tokens, heads, options.dim or DEFAULTS[mode]["dim"], options.dtype)
        for tokens in options.tokens or TOKENS[mode]
        for op in options.op
    ]


class Problem:
    """Random contents of whole sequences, and one rank's parts of them.

    Args:
        case: the sizes.
        rank: whose parts.
        device: where they are.
        seed: of the contents, the same on every rank.
    """

    def __init__(self, case: Case, rank: int, device: torch.device, seed: int) -> None:
        self.case, self.rank, self.device = case, rank, device
        self._gen = torch.Generator().manual_seed(seed)
        self.x, self.factor, self.grad = self._draw(), self._draw(), self._draw()

    def _draw(self) -> Tensor:
        case = self.case
        shape = (case.batch, case.ranks * case.tokens, case.heads, case.dim)
        return torch.randn(shape, generator=self._gen, dtype=torch.float32).to(case.element)

    def by_sequence(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens, all heads."""
        return whole.chunk(self.case.ranks, 1)[self.rank].contiguous().to(self.device)

    def by_heads(self, whole: Tensor) -> Tensor:
        """Return this rank's heads, all tokens."""
        return whole.chunk(self.case.ranks, 2)[self.rank].contiguous().to(self.device)
