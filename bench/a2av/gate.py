"""The gate: is a result right? Each function returns what is wrong with it, in words, or nothing."""

from __future__ import annotations

import torch
from torch import Tensor

Faults = list[str]


def same(what: str, actual: Tensor, expected: Tensor) -> Faults:
    """Compare bit by bit, shape and dtype included."""
    faults = _kind(what, actual, tuple(expected.shape), expected.dtype)
    if faults or torch.equal(actual, expected):
        return faults
    wrong_N = (actual != expected).reshape(len(actual), -1).any(1).nonzero().flatten()
    first = int(wrong_N[0])
    got, wanted = (t[first].flatten()[:4].tolist() for t in (actual, expected))
    return [
        f"{what}: {len(wrong_N)} of {len(actual)} differ, number {first} first: expected {wanted}, got {got}"
    ]


def near(what: str, actual: Tensor, expected: Tensor, budget: Tensor, dtype: torch.dtype) -> Faults:
    """Compare with sums in fp64; `budget` is how far off each may be."""
    faults = _kind(what, actual, tuple(expected.shape), dtype)
    if faults:
        return faults
    # The negation: a difference that is not a number is too large.
    too_far = ~((actual.double() - expected).abs() <= budget)
    if not too_far.any():
        return []
    place = tuple(too_far.nonzero()[0].tolist())
    return [
        f"{what}: {int(too_far.sum())} of {actual.numel()} are off, {place} first: expected "
        f"{expected[place].item():.6g} within {budget[place].item():.2g}, got {actual[place].item():.6g}"
    ]


def rounding(roundings: int, terms: int, dtype: torch.dtype) -> float:
    """Return how far a sum may be off, as a share of the sum of its terms' sizes.

    First order analysis: a unit roundoff for each rounding to the dtype, and one more for what the
    analysis leaves out; the terms are multiplied and added up in fp32.

    Example:
        >>> rounding(1, 0, torch.bfloat16) == 2 * 2**-8
        True
    """
    return (roundings + 1) * torch.finfo(dtype).eps / 2 + 2 * terms * torch.finfo(torch.float32).eps / 2


def _kind(what: str, actual: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Faults:
    got = f"{tuple(actual.shape)} {actual.dtype}"
    wanted = f"{shape} {dtype}"
    return [] if got == wanted else [f"{what}: expected {wanted}, got {got}"]
