"""Between the dtype of rows and that of sums: exact one way, to nearest even the other way."""

import triton
import triton.language as tl

from symm_a2a.kernels.blocks import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """`value` in `dtype`, rounded to nearest, ties to even; NaN stays NaN.

    A GPU rounds so in its conversion. Triton's interpreter cuts bfloat16 off instead, which
    doubles the error and biases it towards zero; there the bits are rounded by hand.

    Example: 1 + 2**-8 lies between the bfloat16 numbers 1 and 1 + 2**-7, and becomes 1;
    1 + 3 * 2**-8 becomes 1 + 2**-6.
    """
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        # Adding must not carry a NaN's last bits into infinity; bit 22 makes it a quiet NaN.
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, rounded)
        return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def widen(value, dtype: tl.constexpr):
    """`value` in a wider `dtype`, exactly.

    Triton's interpreter widens subnormal bfloat16 numbers wrongly; there their bits are moved.
    """
    if _INTERPRETED and value.dtype == tl.bfloat16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True).to(dtype)
    return value.to(dtype)
