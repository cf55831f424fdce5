"""Routing traces: which experts the tokens of a run were sent to, in a file.

A trace is a NumPy `.npz` archive of plain arrays; nothing in it is pickled.

    format       int64 ()                the version of this format, 1
    num_experts  int64 ()                E, of one layer, on all ranks together
    ids          int32 (S, M, W, T, K)   the expert of each slot: step, layer, rank, token, k

Ids are in `[0, E)`, or -1 for a slot that is masked. All ranks have T tokens; a rank with fewer has
masked ones. `python -m bench train --trace FILE` writes one, `python -m bench a2av --trace FILE` reads it.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1


@dataclass(frozen=True, eq=False)
class Trace:
    """The routing of a run.

    Attributes:
        ids: int32 `(S, M, W, T, K)`, see the module.
        num_experts: E.

    Raises:
        ValueError: what does not fit the format.
    """

    ids: np.ndarray
    num_experts: int

    def __post_init__(self) -> None:
        ids = self.ids
        if ids.dtype != np.int32 or ids.ndim != 5:
            raise ValueError(
                f"expected ids as int32 (steps, layers, ranks, tokens, top_k), got {ids.dtype} {ids.shape}"
            )
        if 0 in ids.shape:
            raise ValueError(f"expected at least one id in every dimension, got {ids.shape}")
        if self.num_experts < 1:
            raise ValueError(f"expected num_experts of at least 1, got {self.num_experts}")
        low, high = int(ids.min()), int(ids.max())
        if low < -1 or high >= self.num_experts:
            raise ValueError(f"expected ids in [-1, {self.num_experts}), got {low if low < -1 else high}")

    def layer(self, step: int, layer: int) -> np.ndarray:
        """Return `(W, T, K)`, the ids of one layer in one step; negative numbers count from the end.

        Raises:
            ValueError: there is no such step or layer.
        """
        for name, number, there in (("step", step, self.ids.shape[0]), ("layer", layer, self.ids.shape[1])):
            if not -there <= number < there:
                raise ValueError(f"expected a {name} in [-{there}, {there}) of the trace, got {number}")
        return self.ids[step, layer]


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Given a name, NumPy would add a suffix of its own to it.
    with path.open("wb") as file:
        np.savez_compressed(
            file,
            format=np.int64(FORMAT),
            num_experts=np.int64(trace.num_experts),
            ids=trace.ids.astype(np.int32),
        )


def read_trace(path: Path) -> Trace:
    """Read a trace and check it.

    Raises:
        ValueError: there is no such file, or it is no trace; names the file, and what is wrong.
    """
    try:
        return _read(path)
    except OSError as error:
        raise ValueError(f"expected a readable trace at {path}, got {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(
            f"{path} is no routing trace, as `python -m bench train --trace FILE` writes them: {error}"
        ) from error


def _read(path: Path) -> Trace:
    with _archive(path) as archive:
        missing = {"format", "num_experts", "ids"} - set(archive.files)
        if missing:
            raise ValueError(
                f"expected arrays format, num_experts and ids, got no {', '.join(sorted(missing))}"
            )
        for name in ("format", "num_experts"):
            array = _array(archive, name)
            if array.shape != () or array.dtype.kind not in "iu":
                raise ValueError(f"expected {name} to be one integer, got {array.dtype} {array.shape}")
        if archive["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {archive['format']}")
        return Trace(_array(archive, "ids"), int(archive["num_experts"]))


# What NumPy itself says of files and arrays that are not plain advises to load pickles.
def _archive(path: Path) -> Any:
    try:
        archive = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise ValueError("expected a .npz archive, got a damaged file or another kind of file") from None
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError("expected a .npz archive, got a single array")
    return archive


def _array(archive: Any, name: str) -> np.ndarray:
    try:
        array = archive[name]
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        array = None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"expected {name} as a plain array of numbers, got objects or damaged data")
    return array
