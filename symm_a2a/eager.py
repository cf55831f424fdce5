"""Keeps compilers out of what launches kernels by itself, and not through an operator."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from symm_a2a.errors import EnvironmentUnsupportedError

Function = TypeVar("Function", bound=Callable[..., object])


def eager(function: Function) -> Function:
    """Let a function run as it is, between two graphs, when the code around it is compiled.

    Traced as one graph it raises `EnvironmentUnsupportedError`.
    """

    @functools.wraps(function)
    def run(*given: object, **named: object) -> object:
        if torch.compiler.is_compiling():
            raise EnvironmentUnsupportedError(
                f"expected eager mode, got {function.__name__} in compiled code, where a compiler would take "
                "an exchange apart; use dispatch and combine there"
            )
        # Not imported, nobody compiles; and the import takes a second.
        whole = _untraced(function) if "torch._dynamo" in sys.modules else function
        return whole(*given, **named)

    return run  # pyright: ignore[reportReturnType]


@functools.cache
def _untraced(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function, whose calls no compiler looks into."""
    return torch.compiler.disable(function)
