"""What `python -m bench plot` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draw a benchmark's CSV: latency, bandwidth, speed-up, and who sent how much to whom.

    The pictures are made of the file alone, so they can be made anywhere and at any time.
    """

    csv: tyro.conf.Positional[Path]
    """File that `python -m bench a2av` wrote."""
    out: Path = Path("out")
    """Folder of the pictures."""
    json: Path | None = None
    """File to write what is drawn to: the setting, and each case with its metrics."""
