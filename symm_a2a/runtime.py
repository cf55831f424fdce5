"""Where kernels run in this process; imported before any kernel is decorated."""

from __future__ import annotations

import logging
import os

import torch

_log = logging.getLogger(__name__)


def choose_runtime() -> None:
    """Turn Triton's interpreter on where there is no GPU and nobody has decided.

    Triton reads `TRITON_INTERPRET` when a kernel is decorated, so this runs once, at import. A
    value that is set already stays: `TRITON_INTERPRET=0` compiles without a GPU, `=1`
    interprets beside one.
    """
    if "TRITON_INTERPRET" in os.environ:
        _log.info("TRITON_INTERPRET=%s is set: left as it is", os.environ["TRITON_INTERPRET"])
    elif torch.cuda.is_available():
        _log.info("CUDA device found: kernels are compiled")
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        _log.info("no CUDA device: kernels run in Triton's interpreter (TRITON_INTERPRET=1)")
