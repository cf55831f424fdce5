"""The bytes that each kernel must move, term by term: the formulas of docs/performance.md.

Counted is what cannot be avoided. A kernel reads each byte it needs once, and writes each of its results
once: what it reads again, or has just written itself, it finds in a cache. Stores to other ranks go over
the link; the same stores arrive in the memory of others, so what others store here counts as received.

Left out, some hundred bytes a kernel: flags and cells that it reads, the table of the peers' addresses,
and the dispatcher's card. Flags that it stores count, 8 bytes for each rank, itself included.

Letters: `W` ranks, `T` tokens, `C` token capacity, `D` hidden, `P` hidden padded to 16 bytes, `K` top-k, `E`
experts, `L = E / W`, `R` rows at this rank, `B` token blocks, `s` bytes of an element, 4 bytes of a score.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

from bench.limits.load import Load

FLAG = 8
INDEX = 4
TOTAL = 8


@dataclass(frozen=True)
class Bytes:
    """Bytes of rows, and of all the rest."""

    payload: float = 0
    rest: float = 0

    @property
    def total(self) -> float:
        """Rows and the rest together."""
        return self.payload + self.rest

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.payload + other.payload, self.rest + other.rest)


@dataclass(frozen=True)
class Traffic:
    """What one kernel, or several, moves at one rank.

    Attributes:
        kernel: its name.
        reads: from this rank's memory.
        writes: to this rank's memory, in its own sections too.
        sent: stored to other ranks' memory.
        received: stored by other ranks to this one's memory meanwhile.
    """

    kernel: str
    reads: Bytes = Bytes()
    writes: Bytes = Bytes()
    sent: Bytes = Bytes()
    received: Bytes = Bytes()

    @property
    def in_memory(self) -> float:
        """All bytes that pass this rank's memory."""
        return self.reads.total + self.writes.total + self.received.total

    @property
    def over_link(self) -> float:
        """Bytes that pass the link in its busier direction."""
        return max(self.sent.total, self.received.total)


def total(kernel: str, traffics: list[Traffic]) -> Traffic:
    """Return the sum of several kernels' traffic."""
    return reduce(
        lambda a, b: Traffic(
            kernel, a.reads + b.reads, a.writes + b.writes, a.sent + b.sent, a.received + b.received
        ),
        traffics,
        Traffic(kernel),
    )


def forward(load: Load) -> list[Traffic]:
    """Return the traffic of a dispatch and its combine, kernel by kernel, in order."""
    counted = [count(load)] if load.counted_apart else []
    return [*counted, scatter(load), expand(load), gather(load), finish(load)]


def backward(load: Load) -> list[Traffic]:
    """Return the traffic of the backward of both, kernel by kernel, in order."""
    return [scatter_grad(load), expand_grad(load), gather_grad(load), finish_grad(load)]


def again(load: Load) -> list[Traffic]:
    """Return the traffic of a second dispatch and its backward, kernel by kernel, in order."""
    gathered = _gather(load, "gather again", scores=0, beside=0)
    finished = _finish(load, "finish again", slot_reads=0, slot_writes=0)
    return [replace(scatter_grad(load), kernel="scatter again"), expand_again(load), gathered, finished]


def count(load: Load) -> Traffic:
    """Slots of each expert and copies for each rank, of each token block and in all.

    Reads the ids, `8 K T`. Writes sums of every block, `4 (E + W) B`, the copies
    for each rank, `4 W`, and to every rank its counts of all experts and ranks, the mark, and a flag,
    `4 (E + W + 1) + 8` each.
    """
    counts = _counts(load)
    return Traffic(
        "count",
        reads=Bytes(rest=load.id_bytes * load.top_k * load.tokens),
        writes=Bytes(rest=_block_sums(load) + INDEX * load.ranks + counts),
        sent=Bytes(rest=load.others * counts),
        received=Bytes(rest=load.others * counts),
    )


def scatter(load: Load) -> Traffic:
    """One copy of a token's row to each rank that owns any of its experts, with a header.

    Reads every token's row once, `s D T`, its ids and scores, `(8 + 4) K T`, the sums that `count` left,
    `4 (E + W) B`, and the copies for each rank, `4 W`. Writes where the copies went, `4 W T` by rank and
    `4 K T` by slot. A copy is a row, `s P`, and a header of K records, `8 K`; each rank also gets a flag.

    Of few tokens it counts for itself: it reads no sums, and writes and sends what `count` would.
    """
    header = 2 * load.score_bytes * load.top_k
    slots = (load.id_bytes + load.score_bytes) * load.top_k * load.tokens
    places = INDEX * (load.ranks + load.top_k) * load.tokens
    tally = INDEX * load.ranks
    sums = _block_sums(load) + tally if load.counted_apart else 0
    words = FLAG if load.counted_apart else FLAG + _counts(load)
    written = places if load.counted_apart else places + tally
    return Traffic(
        "scatter",
        reads=Bytes(load.row * load.tokens, slots + sums),
        writes=Bytes(load.section_row * load.kept, header * load.kept + written + words),
        sent=Bytes(load.section_row * load.sent, header * load.sent + load.others * words),
        received=Bytes(load.section_row * load.received, header * load.received + load.others * words),
    )


def _counts(load: Load) -> int:
    """Bytes of one rank's counts of experts and ranks, with a mark and their flag."""
    return INDEX * (load.experts + load.ranks + 1) + FLAG


def _block_sums(load: Load) -> int:
    """Bytes of the sums of every token block."""
    return INDEX * (load.experts + load.ranks) * load.token_blocks


def expand(load: Load) -> Traffic:
    """Each received copy to the rows of its local experts.

    Reads the copies that came, `s P + 8 K` each, and the counts and marks of all ranks, `4 (E + W + 1) W`.
    Adds the counts to the dispatcher's totals, `8 (E + W W)`, written once each. Writes the rows, `s D R`,
    those of no slot included. Writes the row and the score of every slot of every copy that there is room
    for, `(4 + 4) K C W`, as handles are defined everywhere. Then the tally, the rows of each expert, a token,
    and a flag for every rank.
    """
    header = 2 * load.score_bytes * load.top_k
    index = (INDEX + load.score_bytes) * load.top_k * load.capacity * load.ranks
    tally = INDEX * (load.ranks + load.local_experts + 1)
    totals = TOTAL * (load.experts + load.ranks**2)
    small = tally + INDEX * load.local_experts + INDEX + FLAG
    return Traffic(
        "expand",
        reads=Bytes(
            load.section_row * load.copies_in,
            header * load.copies_in + INDEX * (load.experts + load.ranks + 1) * load.ranks,
        ),
        writes=Bytes(load.row * (load.rows + load.gap_rows), index + totals + small),
        sent=Bytes(rest=load.others * FLAG),
        received=Bytes(rest=load.others * FLAG),
    )


def expand_again(load: Load) -> Traffic:
    """Each copy of a second dispatch to the rows that the first one gave it.

    Reads the copies that came, `s P` each, where each one's rows are, `4 K`, and of the tally the copies
    received, the rows of each expert and the epoch, `4 (W + L + 1)`. Writes the rows, `s D R`, those of no
    slot included, a token, and a flag for every rank.
    """
    tally = INDEX * (load.ranks + load.local_experts + 1)
    return Traffic(
        "expand again",
        reads=Bytes(load.section_row * load.copies_in, INDEX * load.top_k * load.copies_in + tally),
        writes=Bytes(load.row * (load.rows + load.gap_rows), INDEX + FLAG),
        sent=Bytes(rest=load.others * FLAG),
        received=Bytes(rest=load.others * FLAG),
    )


def gather(load: Load) -> Traffic:
    """One row back for each copy: the weighted sum of its rows.

    Reads the rows, `s D R`, where each copy's are, `4 K`, the score of each, `4 R`, and of the tally the
    copies received and the dispatch's epoch, `4 (W + 1)`. A row back is `s P`; each rank gets a flag.
    """
    return _gather(load, "gather", load.score_bytes * load.rows, beside=0)


def gather_grad(load: Load) -> Traffic:
    """One row back for each copy, the sum of its rows' gradients, and its score gradients.

    As `gather`, with score gradients in place of scores; they go along, `4 K` for each copy.
    """
    beside = load.score_bytes * load.top_k
    return _gather(load, "gather of gradients", beside * load.copies_in, beside)


def _gather(load: Load, kernel: str, scores: float, beside: int) -> Traffic:
    slots = INDEX * load.top_k * load.copies_in + scores
    return Traffic(
        kernel,
        reads=Bytes(load.row * load.rows, slots + INDEX * (load.ranks + 1)),
        writes=Bytes(load.section_row * load.kept, beside * load.kept + FLAG),
        sent=Bytes(load.section_row * load.received, beside * load.received + load.others * FLAG),
        received=Bytes(load.section_row * load.sent, beside * load.sent + load.others * FLAG),
    )


def finish(load: Load) -> Traffic:
    """For each token the sum of the rows that came back.

    Reads these rows, `s D` for each copy of this rank's tokens, where they are, `4 W T`, and the dispatch's
    epoch. Writes the sums, `s D T`, a token, and a flag for every rank.
    """
    return _finish(load, "finish", slot_reads=0, slot_writes=0)


def finish_grad(load: Load) -> Traffic:
    """For each token the sum of the row gradients that came back, for each slot its score gradient.

    As `finish`; also reads each slot's copy, `4 K T`, and the score gradient of each slot that is not masked,
    and writes the score gradients of all slots, `4 K T`.
    """
    slots = load.top_k * load.tokens
    return _finish(
        load,
        "finish of gradients",
        slot_reads=INDEX * slots + load.score_bytes * load.slots,
        slot_writes=load.score_bytes * slots,
    )


def _finish(load: Load, kernel: str, slot_reads: float, slot_writes: float) -> Traffic:
    places = INDEX * load.ranks * load.tokens
    return Traffic(
        kernel,
        reads=Bytes(load.row * load.copies_out, places + INDEX + slot_reads),
        writes=Bytes(load.row * load.tokens, slot_writes + INDEX + FLAG),
        sent=Bytes(rest=load.others * FLAG),
        received=Bytes(rest=load.others * FLAG),
    )


def scatter_grad(load: Load) -> Traffic:
    """One copy of a token's output gradient to each rank that its row went to.

    Reads every token's gradient once, `s D T`, where its copies are, `4 W T`, and the copies for each
    rank with the dispatch's epoch, `4 (W + 1)`. A copy is a row, `s P`, without a header; each rank gets
    two flags.
    """
    return Traffic(
        "scatter of gradients",
        reads=Bytes(load.row * load.tokens, INDEX * (load.ranks * load.tokens + load.ranks + 1)),
        writes=Bytes(load.section_row * load.kept, 2 * FLAG),
        sent=Bytes(load.section_row * load.sent, load.others * 2 * FLAG),
        received=Bytes(load.section_row * load.received, load.others * 2 * FLAG),
    )


def expand_grad(load: Load) -> Traffic:
    """For each received gradient and each of its slots, the row's gradient and the score's.

    Reads the gradients that came, `s D` each, the experts' outputs, `s D R`, where each copy's rows are,
    `4 K`, the score of each row, `4 R`, and of the tally the copies received, the rows of each expert and the
    epoch, `4 (W + L + 1)`.
    Writes the rows' gradients, `s D R`, those of no slot included; the score gradient of every slot that
    there is room for, `4 K C W`; a token, and a flag for every rank.
    """
    slots = INDEX * load.top_k * load.copies_in + load.score_bytes * load.rows
    tally = INDEX * (load.ranks + load.local_experts + 1)
    scores = load.score_bytes * load.top_k * load.capacity * load.ranks
    return Traffic(
        "expand of gradients",
        reads=Bytes(load.row * (load.copies_in + load.rows), slots + tally),
        writes=Bytes(load.row * (load.rows + load.gap_rows), scores + INDEX + FLAG),
        sent=Bytes(rest=load.others * FLAG),
        received=Bytes(rest=load.others * FLAG),
    )
