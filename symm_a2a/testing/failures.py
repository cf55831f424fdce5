"""What becomes of ranks that do not return."""

from __future__ import annotations

from dataclasses import dataclass

from symm_a2a.errors import SymmA2AError


@dataclass(frozen=True)
class RankFailure:
    """What became of one rank: its traceback, or how it ended and where it was."""

    rank: int
    text: str


class RankError(SymmA2AError, RuntimeError):
    """Ranks of `run_ranks` failed, died or did not finish.

    Args:
        world_size: how many ranks there were.
        failures: those that did not return, the first failure first; but those that only lost a peer
            (`PeerLostError`) last, as a peer's own error may take longer to tell.
    """

    def __init__(self, world_size: int, failures: tuple[RankFailure, ...]) -> None:
        """Keep both; the message is made of them."""
        super().__init__(world_size, failures)
        self.world_size = world_size
        self.failures = failures

    def __str__(self) -> str:
        """Return every failing rank's traceback, the first failure first."""
        ranks = ", ".join(str(failure.rank) for failure in self.failures)
        parts = [f"expected {self.world_size} ranks to return, got failures, the first one first: {ranks}"]
        parts += [f"---- rank {failure.rank} ----\n{failure.text.rstrip()}" for failure in self.failures]
        return "\n\n".join(parts)
