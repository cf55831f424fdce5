"""The files that a command is to write, tried before its work."""

from __future__ import annotations

import contextlib
from pathlib import Path


def prepare(*files: Path | None) -> None:
    """Make the folder of each file, and try to write to it; what a file holds stays as it is.

    Args:
        files: that will be written; None for one that was not asked for.

    Raises:
        ValueError: says which file cannot be written, and why.
    """
    for file in files:
        if file is None:
            continue
        try:
            _try_to_write(file)
        except OSError as error:
            raise ValueError(
                f"expected a file that can be written, got {file}: {error.strerror or error}"
            ) from error


def _try_to_write(file: Path) -> None:
    # Where a file stands in the place of the folder, opening says so more clearly.
    with contextlib.suppress(FileExistsError):
        file.parent.mkdir(parents=True, exist_ok=True)
    existed = file.exists()
    file.open("ab").close()
    if not existed:
        # A run that is interrupted leaves no empty file.
        file.unlink()
