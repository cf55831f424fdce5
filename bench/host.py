"""Ranks without GPUs: processes whose kernels run in Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Have the ranks that are started in here run kernels in the interpreter, also where there is a GPU."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
