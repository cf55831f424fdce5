"""The narrowing of sums, bit by bit, and what the kernels rely on in the interpreter's casts."""

import pytest
import torch
import triton
import triton.language as tl

from symm_a2a.kernels.rounding import narrow, widen


@triton.jit
def _narrow_kernel(wide_ptr, narrow_ptr, back_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    value = narrow(tl.load(wide_ptr + i), narrow_ptr.dtype.element_ty)
    tl.store(narrow_ptr + i, value)
    tl.store(back_ptr + i, widen(value, tl.float32))


def run(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    n = triton.next_power_of_2(len(values))
    wide = torch.zeros(n, dtype=values.dtype)
    wide[: len(values)] = values
    out, back = torch.empty(n, dtype=dtype), torch.empty(n)
    _narrow_kernel[(1,)](wide, out, back, n)
    return out[: len(values)], back[: len(values)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_as_torch_does(dtype):
    gen = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=gen, dtype=torch.int64).to(torch.int32)
    if dtype == torch.float16:  # numpy, which converts there, warns of what it makes infinite
        bits = torch.where((bits & 0x7FFFFFFF) < 0x47000000, bits, 0)
    # Random bits, and every pattern that lies on, or next to, a tie between two bfloat16 numbers.
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    ties = [high + 0x8000, high + 0x8001, high + 0x7FFF] if dtype == torch.bfloat16 else []
    values = torch.cat([bits, *ties]).view(torch.float32)
    ours, _ = run(values, dtype)
    theirs = values.to(dtype)
    assert torch.equal(ours.isnan(), theirs.isnan())
    real = ~theirs.isnan()
    assert torch.equal(ours[real].view(torch.int16), theirs[real].view(torch.int16))


def test_every_bfloat16_widens_exactly():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    _, back = run(every, torch.bfloat16)
    real = ~every.isnan()
    assert torch.equal(back[real].view(torch.int32), every[real].view(torch.int32))
    assert back[~real].isnan().all()
