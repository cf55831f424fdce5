"""Where the processes that are started next run kernels: in Triton's interpreter, or compiled."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def interpreted() -> contextlib.AbstractContextManager[None]:
    """Have processes that are started in here interpret kernels, also where there is a GPU."""
    return _setting("1")


def compiled() -> contextlib.AbstractContextManager[None]:
    """Have processes that are started in here compile kernels, also where there is no GPU."""
    return _setting("0")


@contextlib.contextmanager
def _setting(value: str) -> Iterator[None]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
