"""Block alignment, against plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symm_a2a import InputError, align_blocks
from symm_a2a.kernels import align
from tests.cases import examples


def plain(ids, num_experts, block_size, expert_map):
    """Return sorted slots, experts of blocks, and the places they take."""
    flat = ids.flatten().tolist()
    places, blocks = [], []
    for expert in range(num_experts):
        mine = [slot for slot, e in enumerate(flat) if e == expert]
        mine += [len(flat)] * (-len(mine) % block_size)
        places += mine
        blocks += [expert if expert_map is None else int(expert_map[expert])] * (len(mine) // block_size)
    return places, blocks


def check(ids, num_experts, block_size, expert_map=None):
    sorted_row_ids, expert_of_block, total = align_blocks(ids, num_experts, block_size, expert_map)
    places, blocks = plain(ids, num_experts, block_size, expert_map)
    N = ids.numel()
    assert total.tolist() == [len(places)]
    assert sorted_row_ids.tolist() == places + [N] * (len(sorted_row_ids) - len(places))
    assert expert_of_block.tolist() == blocks + [-1] * (len(expert_of_block) - len(blocks))
    assert len(sorted_row_ids) == block_size * len(expert_of_block)
    assert {t.dtype for t in (sorted_row_ids, expert_of_block, total)} == {torch.int32}


@settings(max_examples=examples(60))
@given(
    st.integers(0, 90), st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 2, 3, 8, 16, 100]),
    st.sampled_from([torch.int32, torch.int64]), st.booleans(), st.integers(0, 2**16),
)  # fmt: skip
def test_random_routings(T, K, E, block_size, dtype, mapped, seed):
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, E, (T, K), generator=gen).to(dtype)
    expert_map = torch.randint(-1, E, (E,), generator=gen).to(torch.int32) if mapped else None
    check(ids, E, block_size, expert_map)


@pytest.mark.parametrize("skew", ["even", "one expert", "masked"])
def test_many_programs(skew, monkeypatch):
    """Blocks of slots so small that there are many, and more than are summed at once."""
    monkeypatch.setattr(align, "BLOCK", 16)
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 5, (700,), generator=gen)
    if skew == "one expert":
        ids[:] = 3
    if skew == "masked":
        ids[:] = -1
    check(ids, 5, 7)


def test_rows_of_a_dispatch_lie_in_blocks_already():
    counts_L = torch.tensor([8, 0, 16])
    ids = torch.arange(3).repeat_interleave(counts_L)
    found = align_blocks(ids, 3, 8)
    assert found.sorted_row_ids[:24].tolist() == list(range(24))
    assert found.expert_of_block[:3].tolist() == [0, 2, 2]


def test_strides_do_not_matter_and_what_is_out_of_range_is_left_out():
    ids = torch.tensor([[1, 0, 9], [1, -7, 2]]).T
    check(torch.where((ids < 0) | (ids > 2), -1, ids), 3, 2)
    expected = align_blocks(torch.where((ids < 0) | (ids > 2), -1, ids), 3, 2)
    assert all(map(torch.equal, align_blocks(ids, 3, 2), expected))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3), 2, 4), "dtype int32 or int64, got torch.float32"),
        ((torch.zeros(3, dtype=torch.int64), 0, 4), "num_experts to be a positive int, got 0"),
        ((torch.zeros(3, dtype=torch.int64), 2, 2**31), r"block_size < 2147483648, got 3 \+ 2 \* 2147483648"),
        ((torch.zeros(3, dtype=torch.int64), 2, 2.0), "block_size to be a positive int, got 2.0"),
        (
            (torch.zeros(3, dtype=torch.int64), 2, 4, torch.zeros(3, dtype=torch.int32)),
            r"expert_map_E of shape \(2,\), dtype int32, on cpu, got \(3,\)",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        align_blocks(*arguments)
