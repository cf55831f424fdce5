"""What `python -m bench train` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HEAD_DIM = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a small mixture-of-experts model over local processes, once with each dispatcher.

    Both trainings start from the same weights and see the same batches, so their losses may differ by
    rounding only; where they differ by more, the exit code is 1. No GPU is needed: the kernels run in
    Triton's interpreter, and how long they take there says nothing about the library's speed.
    """

    ranks: int = 4
    """Processes; the experts are shared out among them."""
    steps: int = 50
    """Optimizer steps of each training."""
    tokens: int = 512
    """Tokens (bytes of text) of each rank in each step; a multiple of --context."""
    context: int = 64
    """Tokens of one sequence."""
    layers: int = 2
    """Transformer blocks, each with a layer of experts."""
    experts: int = 16
    """Experts of a layer, on all ranks together; a multiple of --ranks."""
    top_k: int = 2
    """Experts that each token is sent to."""
    dim: int = 128
    """Elements of a token's row; a multiple of 16, the size of an attention head."""
    learning_rate: float = 1e-2
    """Of AdamW at its peak; it rises over the first steps and falls to a tenth at the end."""
    seed: int = 0
    """Of the weights and the batches; the same seed gives the same curve."""
    dispatcher: Literal["both", "symm", "all_to_all"] = "both"
    """Which dispatcher to train with; only both can be compared."""
    out: Path = Path("out")
    """Folder of the picture, train.png."""
    json: Path | None = None
    """File to write the figures to, as one JSON object."""
    trace: Path | None = None
    """File to write the routing of all tokens to, for `python -m bench a2av --trace FILE`."""

    def check(self) -> None:
        """Check what the options must fulfil together.

        Raises:
            ValueError: says what was expected, and what came.
        """
        for name in ("ranks", "steps", "tokens", "context", "layers", "experts", "top_k", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected a positive --{name.replace('_', '-')}, got {getattr(self, name)}")
        if self.tokens % self.context:
            raise ValueError(
                f"expected --tokens to be a multiple of --context {self.context}, got {self.tokens}"
            )
        if self.experts % self.ranks:
            raise ValueError(
                f"expected --experts to be a multiple of --ranks {self.ranks}, got {self.experts}"
            )
        if self.top_k > self.experts:
            raise ValueError(f"expected --top-k of at most --experts {self.experts}, got {self.top_k}")
        if self.dim % HEAD_DIM:
            raise ValueError(f"expected --dim to be a multiple of {HEAD_DIM}, got {self.dim}")

    @property
    def names(self) -> tuple[str, ...]:
        """The dispatchers to train with, in the order of the trainings."""
        return ("symm", "all_to_all") if self.dispatcher == "both" else (self.dispatcher,)

    @property
    def slots(self) -> int:
        """(token, expert) pairs of one training: what a dispatcher without copies sends as rows."""
        return self.steps * self.layers * self.ranks * self.tokens * self.top_k
