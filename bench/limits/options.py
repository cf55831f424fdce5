"""What `python -m bench limits` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.limits.hardware import HARDWARE

TABLES = ("shapes", "bytes", "forward", "backward", "peaks")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compute what the kernels move for named shapes, and the shortest times in which hardware could.

    Nothing is measured: bytes follow from the shapes, under uniform routing and with an exact capacity, and
    times from published peaks. docs/performance.md explains both.
    """

    shape: tuple[str, ...] = ()
    """Named shapes: olmoe, dsv3 and others of bench/shapes.py; none means all."""
    hardware: tuple[str, ...] = tuple(HARDWARE)
    """Devices: h200-copy, h100, h200, b200, mi300x."""
    table: tuple[str, ...] = TABLES
    """Tables to print: shapes, bytes, forward, backward, peaks."""
    markdown: bool = False
    """Print the tables as docs/performance.md has them."""
    json: Path | None = None
    """File to write all figures to, as one JSON object."""

    def check(self) -> None:
        """Check that every name is known.

        Raises:
            ValueError: says what was expected, and what came.
        """
        # Not with the module: shapes need the library, and options are read before a command is chosen.
        from bench.shapes import SHAPES

        for option, known in (("shape", SHAPES), ("hardware", HARDWARE), ("table", TABLES)):
            for name in getattr(self, option):
                if name not in known:
                    raise ValueError(f"expected --{option} to be of {', '.join(known)}, got {name}")

    @property
    def shapes(self) -> tuple[str, ...]:
        """The names of the shapes, all of them where none was given."""
        from bench.shapes import SHAPES

        return self.shape or tuple(SHAPES)
