"""The table of sizes, for many layouts; and the grids and registers that follow from it."""

import dataclasses
import itertools

import pytest
import torch

from symm_a2a import EPConfig, SymmTokenDispatcher
from symm_a2a.kernels import blocks
from symm_a2a.kernels.channel import REGISTERS

LAYOUTS = [
    EPConfig(
        num_experts=experts * ranks, top_k=top_k, hidden_dim=hidden, max_tokens_per_rank=tokens, dtype=dtype
    ).layout(ranks)
    for experts, ranks, top_k, hidden, tokens, dtype in itertools.product(
        (1, 8),
        (1, 2, 3, 8, 64),
        (1, 3, 8, 40, 200),
        (8, 2048),
        (1, 100, 4096),
        (torch.bfloat16, torch.float64),
    )
]


@pytest.mark.parametrize("wide", [False, True])
def test_tiles_give_every_thread_16_bytes_and_cover_what_they_must(wide):
    for layout in LAYOUTS:
        sizes = blocks._compiled(layout, wide=wide)
        for rows in (sizes.send_rows, sizes.copy_rows, sizes.sum_rows, sizes.grad_rows, sizes.rows):
            assert rows * sizes.columns * layout.dtype.itemsize >= 16 * 32 * sizes.warps
        # Rows of a block of headers, or of tokens, are handled within it.
        assert sizes.copies % sizes.copy_rows == 0
        assert sizes.tokens % sizes.send_rows == sizes.small_tokens % sizes.send_rows == 0
        assert all(n >= 1 and n & (n - 1) == 0 for n in dataclasses.astuple(sizes)[:-1])


def launched(programs, residency, work, warps=4, multiprocessors=132):
    """The grid and the options that a launch gets."""
    cfg = EPConfig(num_experts=2, top_k=1, hidden_dim=4, max_tokens_per_rank=2, dtype=torch.float32)
    with SymmTokenDispatcher(cfg, device="cpu") as dispatcher:
        channel = dispatcher.arena.lanes[0].channel
        channel = dataclasses.replace(
            channel, programs=programs, multiprocessors=multiprocessors,
            blocks=dataclasses.replace(channel.blocks, warps=warps),
        )  # fmt: skip
        seen = []

        class Kernel:
            def __getitem__(self, grid):
                return lambda **options: seen.append((grid, options))

        channel.launch(Kernel(), work, residency)()
    ((grid,), options) = seen[0]
    return grid, options


def test_grids_are_of_the_work_of_the_device_or_of_the_budget():
    assert launched(None, 8, 10**6)[0] == 8 * 132
    assert launched(None, 8, 77)[0] == 77
    assert launched(None, 8, 0)[0] == 1
    assert launched(64, 1, 10**6, warps=16)[0] == 64
    assert launched(64, 1, 5, warps=16)[0] == 5
    assert launched(None, None, 10**6) == (1, {})


@pytest.mark.parametrize(("residency", "warps"), [(8, 4), (10, 4), (7, 4), (3, 4), (1, 16)])
def test_registers_leave_room_for_the_programs_that_fill_a_multiprocessor(residency, warps):
    options = launched(None, residency, 100, warps)[1]
    threads = 32 * options["num_warps"]
    assert options["num_warps"] == warps
    assert options["maxnreg"] % 8 == 0
    assert options["maxnreg"] * threads * residency <= REGISTERS
    assert (options["maxnreg"] + 8) * threads * residency > REGISTERS
    assert options["maxnreg"] <= 255


def test_a_budget_reaches_the_lanes_of_a_gpu_and_not_the_interpreter():
    cfg = EPConfig(
        num_experts=2, top_k=1, hidden_dim=4, max_tokens_per_rank=2, dtype=torch.float32, num_programs=9
    )
    with SymmTokenDispatcher(cfg, device="cpu") as dispatcher:
        assert [lane.channel.programs for lane in dispatcher.arena.lanes] == [1, 1]
    with pytest.raises(ValueError, match="expected num_programs to be a positive int, got 0"):
        dataclasses.replace(cfg, num_programs=0)
