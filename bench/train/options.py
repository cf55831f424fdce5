"""What `python -m bench train` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from symm_a2a import Link

HEAD_DIM = 16

DispatcherName = Literal["symm", "all_to_all", "all_gather", "replicated", "local"]
BOTH: tuple[DispatcherName, ...] = ("symm", "all_to_all")
"""What "both" stands for."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a small mixture-of-experts model over local processes, once with each dispatcher or schedule.

    All trainings start from the same weights and see the same batches, so their losses may differ by
    rounding only; where they differ by more, the exit code is 1. No GPU is needed: the kernels run in
    Triton's interpreter, and how long they take there says nothing about the library's speed.

    With --schedule domino the same dispatcher trains twice: with the whole batch at once, then in
    micro-batches whose exchanges hide under each other's compute. Over an emulated --link the two can be
    told apart.
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
    dispatcher: tuple[Literal["both", DispatcherName], ...] = ("both",)
    """Which dispatchers to train with, one after another; the first is compared with each of the others.
    both: symm and all_to_all. all_gather: all tokens to all ranks, and a reduce-scatter back. replicated:
    tokens are not shared out, every rank computes the whole batch of --ranks x --tokens, but for the experts;
    its combine is an all-reduce. local: experts are not shared out, every rank has them all: data parallelism
    alone. Schedules are compared with symm."""
    schedule: Literal["sync", "domino"] | None = None
    """Compare schedules in place of dispatchers: whichever is named, both train, side by side."""
    micro_batches: int | None = None
    """Parts of each rank's sequences that Domino interleaves, with --schedule; 2 if not given."""
    link: str | None = None
    """A link between ranks to emulate for the symm dispatcher: latency in seconds (or with ms, us behind it),
    gbps in billions of bits a second, either or both, as in latency=20ms,gbps=1."""
    out: Path = Path("out")
    """Folder of the picture: train.png, or domino.png and domino.trace.json."""
    json: Path | None = None
    """File to write the figures to, as one JSON object."""
    trace: Path | None = None
    """File to write the routing of all tokens to, for `python -m bench a2av --trace FILE`."""

    def check(self) -> None:
        """Check what the options must fulfil together.

        Raises:
            ValueError: says what was expected, and what came.
        """
        for name in (
            "ranks", "steps", "tokens", "context", "layers", "experts", "top_k", "dim", "num_micro_batches",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                option = name.removeprefix("num_").replace("_", "-")
                raise ValueError(f"expected a positive --{option}, got {getattr(self, name)}")
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
        self._check_schedule()

    def _check_schedule(self) -> None:
        if not self.dispatcher:
            raise ValueError("expected at least one --dispatcher, got none")
        others = " and ".join(self.dispatchers) if "symm" not in self.dispatchers else None
        if self.emulated_link and others:
            raise ValueError(f"expected --link with --dispatcher symm or both, got {others}, without a link")
        if self.schedule is None:
            if self.micro_batches is not None:
                raise ValueError(
                    "expected --schedule domino beside --micro-batches, got --micro-batches "
                    f"{self.micro_batches} alone"
                )
            return
        if others:
            raise ValueError(
                f"expected --dispatcher symm with --schedule, whose exchanges overlap, got {others}"
            )
        sequences = self.tokens // self.context
        if sequences % self.num_micro_batches:
            raise ValueError(
                "expected the sequences of a rank, --tokens / --context, to be a multiple of --micro-batches "
                f"{self.num_micro_batches}, got {sequences}"
            )

    @property
    def num_micro_batches(self) -> int:
        """M, the micro-batches of Domino."""
        return 2 if self.micro_batches is None else self.micro_batches

    @property
    def emulated_link(self) -> Link | None:
        """What `--link` describes.

        Raises:
            ValueError: it describes nothing.
        """
        # Here: the help of the commands is shown without torch.
        from bench.train.link import parse_link

        return None if self.link is None else parse_link(self.link)

    @property
    def names(self) -> tuple[str, ...]:
        """The trainings, in their order: by dispatcher, or with Domino by schedule."""
        if self.schedule is not None:
            return ("sync", "domino")
        return self.dispatchers

    @property
    def dispatchers(self) -> tuple[DispatcherName, ...]:
        """The dispatchers, each once, in their order."""
        names: list[DispatcherName] = []
        for name in self.dispatcher:
            names += BOTH if name == "both" else (name,)
        return tuple(dict.fromkeys(names))

    @property
    def slots(self) -> int:
        """(token, expert) pairs of one training: what a dispatcher without copies sends as rows."""
        return self.steps * self.layers * self.ranks * self.tokens * self.top_k
