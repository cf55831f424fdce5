"""What is planned for: costs of micro-batches, and what they keep in memory, by their number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from bench.plan.computed import costs_of
from bench.plan.costs import Costs, Machine
from bench.plan.hardware import Profile
from bench.plan.memory import Memory, memory_of
from bench.plan.models import Model

Batches = Literal["split", "accumulated"]


class Work(Protocol):
    """A step's work, in whatever number of micro-batches."""

    @property
    def layers(self) -> int:
        """Layers of a rank."""
        ...

    @property
    def shared(self) -> bool:
        """Whether anything runs beside each combine in its own layer."""
        ...

    @property
    def checkpoint(self) -> bool:
        """Whether each layer is a checkpoint of its own."""
        ...

    @property
    def lanes(self) -> int:
        """The most lanes of the dispatcher."""
        ...

    @property
    def machine(self) -> Machine:
        """What exchanges share."""
        ...

    def batches(self, num_micro_batches: int) -> int:
        """Return the batches that so many micro-batches are, which run one after another without Domino."""
        ...

    def costs(self, num_micro_batches: int, variation: float = 0.0) -> list[Costs]:
        """Return the costs of each micro-batch."""
        ...

    def memory(self, num_micro_batches: int) -> Memory | None:
        """Return what a step keeps; None where nobody knows."""
        ...


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A model's layers on a machine; see `work.Work`.

    Attributes:
        model: sizes.
        profile: the machine.
        tokens: of each rank in a batch.
        ranks: W.
        layers: of a rank.
        context: tokens of a sequence, none of which is cut.
        lanes: the most.
        exact: whether rows are as many as arrive.
        checkpoint: whether each layer is a checkpoint of its own.
        how: micro-batches are parts of one batch, or whole batches whose gradients accumulate.
        bytes_per_parameter: kept of each weight.
    """

    model: Model
    profile: Profile
    tokens: int
    ranks: int
    layers: int
    context: int
    lanes: int = 2
    exact: bool = True
    checkpoint: bool = False
    how: Batches = "split"
    bytes_per_parameter: float

    @property
    def shared(self) -> bool:
        """Whether the model has shared experts."""
        return self.model.shared > 0

    @property
    def machine(self) -> Machine:
        """Latency and contention of the profile."""
        return Machine(self.profile.latency, self.profile.contention)

    def batches(self, num_micro_batches: int) -> int:
        """Return the batches that so many micro-batches are."""
        return num_micro_batches if self.how == "accumulated" else 1

    def micro_tokens(self, num_micro_batches: int) -> list[int]:
        """Return the tokens of each micro-batch: whole sequences, as evenly as they go.

        Raises:
            ValueError: there are fewer sequences.
        """
        M = num_micro_batches
        if self.how == "accumulated":
            return [self.tokens] * M
        sequences = self.tokens // self.context
        if sequences < M:
            raise ValueError(
                f"expected a sequence for each of {M} micro-batches, got {sequences} of {self.context} "
                "tokens in a batch; lower --context or --micro-batches, raise --tokens, or take "
                "--batches accumulated"
            )
        return [self.context * (sequences // M + (m < sequences % M)) for m in range(M)]

    def costs(self, num_micro_batches: int, variation: float = 0.0) -> list[Costs]:
        """Return the costs of each micro-batch."""
        sizes = self.micro_tokens(num_micro_batches)
        known = {
            size: costs_of(
                self.model, self.profile, tokens=size, ranks=self.ranks, layers=self.layers,
                context=self.context, exact=self.exact, variation=variation,
            )
            for size in set(sizes)
        }  # fmt: skip
        return [known[size] for size in sizes]

    def memory(self, num_micro_batches: int) -> Memory:
        """Return what a step keeps."""
        return memory_of(
            self.model,
            self.micro_tokens(num_micro_batches),
            ranks=self.ranks,
            layers=self.layers,
            lanes=min(num_micro_batches, self.lanes),
            bytes_per_parameter=self.bytes_per_parameter,
            checkpoint=self.checkpoint,
        )
