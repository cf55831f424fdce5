"""Sequence exchanges with all ranks in one process: bits that move, sums in their order, the protocol."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import symm_a2a
from symm_a2a import InputError, SequenceGroup
from symm_a2a.config import DTYPES
from symm_a2a.kernels.channel import EPOCH_SHIFT
from symm_a2a.kernels.ulysses import MAX_TOKENS, Kind, Sizes, describe_card
from symm_a2a.kernels.ulysses_take import take_heads
from symm_a2a.ulysses.lane import SequenceLane
from tests.cases import examples

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
CPU = torch.device("cpu")
# How x lies in memory: every way keeps its shape and contents.
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "fused": lambda x: torch.cat([x, x + 1, x], 2)[:, :, : x.shape[2]],
    "shifted": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "dim first": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
}


def numbered(shape, dtype, start=0):
    """A tensor whose elements all differ in their bits, NaNs and subnormal numbers included."""
    integers = INTEGERS[dtype.itemsize]
    return torch.arange(start, start + math.prod(shape)).to(integers).view(dtype).view(shape)


def bits(x):
    return x.contiguous().view(INTEGERS[x.dtype.itemsize])


def expected(kind, xs, replicas=1):
    """What every rank gets, from the whole tensor; replicas are added up in rank order."""
    W = len(xs)
    if kind == Kind.SEQ_TO_HEAD:
        return torch.cat(xs, 1).repeat_interleave(replicas, 2).chunk(W, 2)
    sequences = torch.cat(xs, 2)
    if replicas > 1:
        wide = sequences.double() if sequences.dtype == torch.float64 else sequences.float()
        total = torch.zeros_like(wide[:, :, ::replicas])
        for replica in range(replicas):
            total += wide[:, :, replica::replicas]
        sequences = total.to(sequences.dtype)
    return [sequences[:, r * (len_ := sequences.shape[1] // W) : (r + 1) * len_] for r in range(W)]


def step(lanes, kind, xs, replicas=1):
    """One exchange on every rank: all launch before any joins."""
    sizes = Sizes.of(kind, xs[0].shape, xs[0].dtype, len(lanes), replicas)
    for lane, x in zip(lanes, xs, strict=True):
        lane.launch(kind, x, sizes)
    return [lane.join(kind, x, sizes)[0] for lane, x in zip(lanes, xs, strict=True)]


def use_small_tiles(lanes):
    """Run what follows in several programs of several small tiles, as on a GPU."""
    for lane in lanes:
        lane.channel = dataclasses.replace(lane.channel, programs=3, tile_bytes=128)


@settings(max_examples=examples(25))
@given(
    W=st.integers(1, 4), b=st.integers(0, 2), s=st.integers(0, 4), H=st.integers(1, 3), d=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES), small=st.booleans(),
)  # fmt: skip
def test_every_bit_arrives_where_it_belongs(W, b, s, H, d, dtype, small):
    lanes = SequenceLane.world(W, max(1, W * b * s * H * d * dtype.itemsize), CPU)
    if small:
        use_small_tiles(lanes)
    shapes = {Kind.SEQ_TO_HEAD: (b, s, W * H, d), Kind.HEAD_TO_SEQ: (b, W * s, H, d)}
    for (kind, shape), (turn, lay) in itertools.product(shapes.items(), enumerate(LAYOUTS.values())):
        start, count = 1 + 1000 * turn, math.prod(shape)
        xs = [lay(numbered(shape, dtype, start + rank * count)) for rank in range(W)]
        for ours, theirs in zip(step(lanes, kind, xs), expected(kind, xs), strict=True):
            assert ours.shape == theirs.shape
            assert ours.is_contiguous()
            assert torch.equal(bits(ours), bits(theirs))


@settings(max_examples=examples(12))
@given(
    heads=st.integers(1, 2), replicas=st.integers(2, 3), s=st.integers(0, 2), d=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES), layout=st.sampled_from(sorted(LAYOUTS)), small=st.booleans(),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_replicas_get_their_head_and_are_added_up_in_rank_order(
    heads, replicas, s, d, dtype, layout, small, seed
):
    W, gen = heads * replicas, torch.Generator().manual_seed(seed)
    lanes = SequenceLane.world(W, max(1, 2 * W * s * d * dtype.itemsize), CPU)
    if small:
        use_small_tiles(lanes)
    shape = (2, s, heads, d)
    xs = [LAYOUTS[layout](numbered(shape, dtype, rank * math.prod(shape))) for rank in range(W)]
    for ours, theirs in zip(
        step(lanes, Kind.SEQ_TO_HEAD, xs, replicas), expected(Kind.SEQ_TO_HEAD, xs, replicas), strict=True
    ):
        assert torch.equal(bits(ours), bits(theirs))
    # Large and small ones: another order of the sum, or a rounding in between, would show.
    grads = [torch.randn(2, W * s, 1, d, generator=gen, dtype=torch.float64) for _ in range(W)]
    grads = [LAYOUTS[layout]((g * 10 ** (r % 4)).to(dtype)) for r, g in enumerate(grads)]
    for ours, theirs in zip(
        step(lanes, Kind.HEAD_TO_SEQ, grads, replicas),
        expected(Kind.HEAD_TO_SEQ, grads, replicas),
        strict=True,
    ):
        assert ours.shape == shape
        assert torch.equal(ours, theirs)


def test_a_rank_that_is_ahead_overwrites_nothing():
    """It may launch once more before its peers have joined, not twice: then it waits for their launch."""
    lanes = SequenceLane.world(2, 1024, CPU)
    shape = (1, 2, 4, 3)
    sizes = Sizes.of(Kind.SEQ_TO_HEAD, shape, torch.float32, 2, 1)
    rounds = [
        [numbered(shape, torch.float32, 1 + 100 * rank + 1000 * n) for rank in (0, 1)] for n in range(6)
    ]
    lanes[0].launch(Kind.SEQ_TO_HEAD, rounds[0][0], sizes)
    for n, xs in enumerate(rounds):
        ahead, behind = n % 2, 1 - n % 2
        lanes[behind].launch(Kind.SEQ_TO_HEAD, xs[behind], sizes)
        theirs = expected(Kind.SEQ_TO_HEAD, xs)
        ours = lanes[behind].join(Kind.SEQ_TO_HEAD, xs[behind], sizes)[0]
        assert torch.equal(bits(ours), bits(theirs[behind]))
        if n + 1 < len(rounds):
            lanes[behind].launch(Kind.SEQ_TO_HEAD, rounds[n + 1][behind], sizes)
        ours = lanes[ahead].join(Kind.SEQ_TO_HEAD, xs[ahead], sizes)[0]
        assert torch.equal(bits(ours), bits(theirs[ahead]))


def test_what_did_not_arrive_is_nan_and_is_reported():
    lanes = SequenceLane.world(3, 1024, CPU)
    x = torch.ones(1, 2, 3, 4)
    sizes = Sizes.of(Kind.SEQ_TO_HEAD, x.shape, x.dtype, 3, 1)
    step(lanes, Kind.SEQ_TO_HEAD, [x] * 3)
    step(lanes, Kind.SEQ_TO_HEAD, [x] * 3)
    for lane in lanes[:2]:
        lane.launch(Kind.SEQ_TO_HEAD, x, sizes)
    out = torch.zeros(sizes.output_shape(Kind.SEQ_TO_HEAD, 3))
    take_heads(lanes[0].channel, Kind.SEQ_TO_HEAD, out, torch.zeros(1), sizes)
    assert out.isnan().all()
    with pytest.raises(symm_a2a.ExchangeError, match=r"number 3, .* peer 2 has not launched it yet"):
        lanes[0].raise_reports()
    assert [int(word) >> EPOCH_SHIFT for word in lanes[2].channel.ready[1]] == [3, 3, 1]


CHANGES = {
    "batch": (Kind.SEQ_TO_HEAD, Sizes(3, 4, 6, 8, torch.float32, 1), r"\(3, 4, 6, 8\) torch.float32"),
    "tokens": (Kind.SEQ_TO_HEAD, Sizes(2, 5, 6, 8, torch.float32, 1), r"\(2, 5, 6, 8\) torch.float32"),
    "heads": (Kind.SEQ_TO_HEAD, Sizes(2, 4, 9, 8, torch.float32, 1), r"\(2, 4, 9, 8\) torch.float32"),
    "dim": (Kind.SEQ_TO_HEAD, Sizes(2, 4, 6, 9, torch.float32, 1), r"\(2, 4, 6, 9\) torch.float32"),
    "dtype": (Kind.SEQ_TO_HEAD, Sizes(2, 4, 6, 8, torch.bfloat16, 1), r"\(2, 4, 6, 8\) torch.bfloat16"),
    "swapped": (Kind.SEQ_TO_HEAD, Sizes(4, 2, 6, 8, torch.float32, 1), r"\(4, 2, 6, 8\) torch.float32"),
    "replicas": (Kind.SEQ_TO_HEAD, Sizes(2, 4, 1, 8, torch.float32, 3), r"\(2, 4, 1, 8\).*for 3 ranks"),
    "empty": (Kind.SEQ_TO_HEAD, Sizes(2, 0, 6, 8, torch.float32, 1), r"\(2, 0, 6, 8\) torch.float32"),
    "direction": (Kind.HEAD_TO_SEQ, Sizes(2, 4, 6, 8, torch.float32, 1), r"head_to_seq of \(2, 12, 2, 8\)"),
    "growth": (Kind.GROWTH, Sizes(2, 4, 6, 8, torch.float32, 1), r"growth for an exchange of \(2, 4, 6, 8\)"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_that_disagree_are_refused_on_every_rank(change, odd):
    lanes = SequenceLane.world(3, 4096, CPU)
    usual = Kind.SEQ_TO_HEAD, Sizes(2, 4, 6, 8, torch.float32, 1)
    theirs = [CHANGES[change][:2] if rank == odd else usual for rank in range(3)]
    xs = [torch.ones(sizes.input_shape(kind, 3), dtype=sizes.dtype) for kind, sizes in theirs]
    for lane, x, (kind, sizes) in zip(lanes, xs, theirs, strict=True):
        lane.launch(kind, x, sizes)
    for rank, (lane, x, (kind, sizes)) in enumerate(zip(lanes, xs, theirs, strict=True)):
        with pytest.raises(symm_a2a.ExchangeMismatchError, match=CHANGES[change][2]) as caught:
            lane.join(kind, x, sizes)
        assert "seq_to_head of (2, 4, 6, 8) torch.float32 on rank" in str(caught.value)
        assert f"on rank {rank} and" in str(caught.value)
        with pytest.raises(symm_a2a.ExchangeMismatchError) as again:
            lane.launch(kind, x, sizes)
        assert str(again.value) == str(caught.value)


def test_cards_tell_all_sizes_apart_and_are_read_back():
    changed = [sizes for _, sizes, _ in CHANGES.values()]
    cards = {(kind, sizes): sizes.card(kind) for kind in Kind for sizes in changed}
    assert len(set(cards.values())) == len(cards)
    assert all(word >= 2**32 for card in cards.values() for word in card)
    assert all(word < 2**63 for card in cards.values() for word in card)
    most = Sizes(2, MAX_TOKENS // 2 - 1, 2**16 - 1, 2**24 - 1, torch.float64, 4095)
    assert describe_card(most.card(Kind.SEQ_TO_HEAD), W=8) == (
        "seq_to_head of (2, 8388607, 65535, 16777215) torch.float64, each head for 4095 ranks"
    )


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((1, MAX_TOKENS, 1, 1), "b \\* s, tokens of a rank < 16777216, got 16777216"),
        ((0, MAX_TOKENS, 1, 1), "s < 16777216"),
        ((1, 1, 1 << 16, 1), "h, heads < 65536"),
        ((1, 1, 1, 1 << 24), "d < 16777216"),
    ],
)
def test_sizes_that_cannot_be_told_to_peers(shape, text):
    x = torch.empty(1).expand(shape)
    with SequenceGroup(device="cpu") as group, pytest.raises(InputError, match=text):
        symm_a2a.seq_to_head(x, group)


@pytest.mark.parametrize("max_bytes", [1, 255, 256, 257, 10**6])
@pytest.mark.parametrize("W", [2, 3, 8])
def test_memory_is_what_was_announced(W, max_bytes):
    (lane, *_) = SequenceLane.world(W, max_bytes, CPU)
    assert lane.memory.arenas[0].nbytes == SequenceGroup.symmetric_bytes(max_bytes, W)
    assert SequenceGroup.symmetric_bytes(max_bytes, W) - 2 * max_bytes < 512 + 256 * (2 + W)
    assert lane.channel.payload.data_ptr() % 16 == lane.memory.arenas[0].data_ptr() % 16


def test_no_byte_outside_of_the_results_is_written():
    """Abort words, ready words, cards and the other turn's memory stay as they were."""
    lanes = SequenceLane.world(2, 1000, CPU)
    before = [lane.memory.arenas[lane.memory.rank].clone() for lane in lanes]
    step(lanes, Kind.SEQ_TO_HEAD, [torch.ones(1, 5, 2, 25, dtype=torch.float32)] * 2)
    for lane, old in zip(lanes, before, strict=True):
        new, channel = lane.memory.arenas[lane.memory.rank].clone(), lane.channel
        for region in (channel.ready[1], channel.cards[1], channel.payload[1, :1000]):
            region.zero_()
        now = lane.memory.arenas[lane.memory.rank]
        assert not torch.equal(new, old)
        assert torch.equal(now, old)
