"""Where kernels run in this process; imported before any kernel is decorated."""

from __future__ import annotations

import logging
import os

import torch

from symm_a2a.errors import EnvironmentUnsupportedError

_log = logging.getLogger(__name__)


def choose_runtime() -> None:
    """Turn Triton's interpreter on where there is no GPU and nobody has decided.

    Triton reads `TRITON_INTERPRET` when a kernel is decorated, its own at its import: this runs
    at our import, and nothing here may import Triton before. A value that is set already stays:
    `TRITON_INTERPRET=0` compiles without a GPU, `=1` interprets beside one.
    """
    if "TRITON_INTERPRET" in os.environ:
        _log.info("TRITON_INTERPRET=%s is set: left as it is", os.environ["TRITON_INTERPRET"])
    elif torch.cuda.is_available():
        _log.info("CUDA device found: kernels are compiled")
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        _log.info("no CUDA device: kernels run in Triton's interpreter (TRITON_INTERPRET=1)")


def require_runnable(device: torch.device) -> None:
    """Raise where kernels cannot run on a device in this process.

    Raises:
        EnvironmentUnsupportedError: kernels are compiled, and the device is no GPU. Or they are
            interpreted, and Triton was imported before that was chosen, or is older than 3.7, with
            numpy 2.4 or newer, which refuses one-element arrays as bounds.
    """
    import numpy
    import triton
    from triton import knobs
    from triton import language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if not knobs.runtime.interpret:
        if device.type != "cuda":
            raise EnvironmentUnsupportedError(
                f"expected a cuda device, as kernels are compiled in this process, got {device}; "
                "set TRITON_INTERPRET=1 before the start to interpret them"
            )
        return
    if not isinstance(tl.sum, InterpretedFunction):
        raise EnvironmentUnsupportedError(
            "expected Triton's interpreter to be chosen before Triton is imported, got Triton imported "
            "first; import symm_a2a before the modules that import it, or set TRITON_INTERPRET=1"
        )
    if _version(triton.__version__) < (3, 7) and _version(numpy.__version__) >= (2, 4):
        raise EnvironmentUnsupportedError(
            f"expected triton >= 3.7 or numpy < 2.4 to interpret kernels, got triton {triton.__version__} "
            f"and numpy {numpy.__version__}; run: pip install 'numpy<2.4'"
        )


def _version(text: str) -> tuple[int, int]:
    """Return major and minor of a version."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
