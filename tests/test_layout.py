"""The arena: regions that do not overlap, sizes exact to the byte, limits that are checked."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import symm_a2a
from symm_a2a import EPConfig
from symm_a2a.layout import ALIGNMENT, ArenaLayout


def config(**changes):
    fields = dict(num_experts=8, top_k=2, hidden_dim=5, max_tokens_per_rank=3)
    return EPConfig(**(fields | changes))


@given(
    world_size=st.integers(1, 9),
    num_local=st.integers(1, 5),
    top_k=st.integers(1, 9),
    hidden=st.integers(1, 300),
    tokens=st.integers(1, 70),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    lanes=st.integers(1, 3),
)
def test_regions_are_aligned_disjoint_and_fill_the_arena(
    world_size, num_local, top_k, hidden, tokens, dtype, lanes
):
    layout = ArenaLayout(world_size, world_size * num_local, top_k, hidden, tokens, dtype, lanes)
    spans = [(0, layout.abort.nbytes)]
    for lane in range(lanes):
        start = layout.lane_offset(lane)
        spans += [(start + r.offset, start + r.offset + r.nbytes) for r in layout.regions.values()]
    spans.sort()
    for (begin, end), (after, _) in zip(spans, [*spans[1:], (layout.nbytes, 0)], strict=True):
        assert begin % ALIGNMENT == 0
        assert end <= after < end + ALIGNMENT
    assert layout.padded_hidden * dtype.itemsize % 16 == 0
    assert 0 <= layout.padded_hidden - hidden < 16 // dtype.itemsize


def test_the_size_known_before_is_the_size_allocated():
    for changes in (
        {},
        {"num_lanes": 3, "dtype": torch.float64},
        {"hidden_dim": 129, "max_tokens_per_rank": 17},
    ):
        cfg = config(**changes)
        for world_size in (1, 4):
            with symm_a2a.VirtualWorld(cfg, world_size, "cpu") as world:
                for dispatcher in world.dispatchers:
                    for arena in dispatcher.arena.memory.arenas:
                        assert arena.numel() == cfg.symmetric_bytes(world_size)


def test_the_published_example():
    cfg = EPConfig(num_experts=64, top_k=8, hidden_dim=7168, max_tokens_per_rank=4096)
    rows = 2 * 8 * 4096 * 7168 * 2  # scatter and gather, one row a copy, bfloat16
    headers, scores = 8 * 4096 * 8 * 8, 8 * 4096 * 8 * 4
    counts, flags = 10 * 256, 5 * 256  # counts of 64 experts and 8 ranks and a mark, of 8 ranks: 2336 bytes
    assert cfg.symmetric_bytes(world_size=8) == 2 * (rows + headers + scores + counts + flags) + 256


@pytest.mark.parametrize(
    ("capacity", "pad", "rows"),
    # 3 tokens of two slots; two local experts; at most 4 ranks' rows.
    [
        (1.0, 1, 6), (0.5, 1, 3), (0.01, 1, 1), (1.1, 1, 7), (4.0, 1, 24), (9.5, 1, 24),
        (1.0, 8, 24), (4.0, 5, 35), (32, 8, 32), ("exact", 8, "exact"),
    ],
)  # fmt: skip
def test_a_capacity_factor_is_of_the_mean(capacity, pad, rows):
    assert config(capacity=capacity, pad_multiple=pad).capacity_rows(4) == rows
    assert rows == "exact" or rows % pad == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts to be a positive int, got 0"),
        ({"top_k": 2.0}, "top_k to be a positive int, got 2.0"),
        ({"dtype": torch.int8}, "dtype to be one of"),
        ({"capacity": "most"}, 'capacity to be "exact", a positive int'),
        ({"capacity": 0}, 'capacity to be "exact", a positive int'),
        ({"capacity": True}, "a positive float for a capacity factor, got True"),
        ({"capacity": 0.0}, "a positive float for a capacity factor, got 0.0"),
        ({"capacity": float("inf")}, "a positive float for a capacity factor, got inf"),
        ({"capacity": float("nan")}, "a positive float for a capacity factor, got nan"),
        ({"overflow": "ignore"}, "overflow to be"),
        ({"timeout": 0}, "timeout to be a positive number"),
        ({"timeout": float("nan")}, "timeout to be a positive number"),
        ({"timeout": float("inf")}, "timeout to be a positive number"),
        ({"timeout": "60"}, "timeout to be a positive number"),
        ({"capacity": 10, "pad_multiple": 8}, "capacity to be a multiple of pad_multiple = 8"),
        ({"capacity": 1 << 31}, "capacity < 2147483648"),
        ({"pad_multiple": 1 << 20}, "pad_multiple < 65536"),
    ],
)
def test_a_bad_value_is_named(changes, message):
    with pytest.raises(symm_a2a.ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({}, 3, "got 8 experts for 3 ranks"),
        (
            {"num_experts": 40000, "top_k": 1, "capacity": 1.0, "pad_multiple": 65535},
            1,
            "capacity factor of fewer than 2147483648 rows, got 26",
        ),
        ({"max_tokens_per_rank": 1 << 23}, 8, "max_tokens_per_rank < 8388608, got 8388608"),
        ({"max_tokens_per_rank": 1 << 22, "top_k": 64}, 1, "top_k \\* local experts < 2147483648"),
        (
            {"max_tokens_per_rank": 1 << 22, "top_k": 64},
            8,
            "ranks \\* max_tokens_per_rank \\* top_k < 2147483648",
        ),
    ],
)
def test_a_size_past_the_limits_is_refused_before_anything_is_allocated(changes, world_size, message):
    cfg = config(**changes)
    with pytest.raises(symm_a2a.ConfigError, match=message):
        cfg.symmetric_bytes(world_size)


def test_a_capacity_factor_is_taken_as_it_is_written_and_for_ranks_that_fit():
    cfg = config(capacity=1.1, pad_multiple=1, max_tokens_per_rank=50, top_k=2, num_experts=8)
    assert cfg.capacity_rows(4) == 110
    with pytest.raises(symm_a2a.ConfigError, match="divisible by the number of ranks"):
        cfg.capacity_rows(3)
    for ranks in (0, -1, 2.0, "2", None):
        with pytest.raises(symm_a2a.ConfigError, match="world_size to be a positive int, got"):
            cfg.capacity_rows(ranks)
        with pytest.raises(symm_a2a.ConfigError, match="world_size to be a positive int, got"):
            config().symmetric_bytes(ranks)
    assert config(capacity=np.float64(1.25), pad_multiple=1).capacity_rows(4) == 8
    for wrong in (np.float32(1.25), np.array([1, 2])):
        with pytest.raises(symm_a2a.ConfigError, match="for a capacity factor, got"):
            config(capacity=wrong)
