"""The machine that a plan is for: published peaks, or figures of one's own, and what is reached of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from bench.limits.hardware import HARDWARE
from bench.plan import assumptions
from bench.plan.assumptions import CHIPS, LINKED_RANKS


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One rank's device, and the way to the others. Bytes and operations a second, seconds, shares.

    Attributes:
        name: of the hardware.
        flops: of dense bf16 matrix products at best.
        memory: bytes a second at best.
        link: bytes a second to all other ranks together, in one direction, at best.
        capacity: bytes of memory.
        latency: seconds from the last byte's leaving until kernels behind the flag run.
        overhead: seconds of the host for each kernel.
        contention: the share of compute's speed lost while a launch sends.
        gemm_efficiency: of `flops`, in large products.
        memory_efficiency: of `memory`.
        link_efficiency: of `link`.
        half_speed_rows: rows of a matrix at which a product runs at half of its speed.
    """

    name: str
    flops: float
    memory: float
    link: float
    capacity: float
    latency: float = assumptions.LATENCY
    overhead: float = assumptions.LAUNCH_OVERHEAD
    contention: float = assumptions.CONTENTION
    gemm_efficiency: float = assumptions.GEMM_EFFICIENCY
    memory_efficiency: float = assumptions.MEMORY_EFFICIENCY
    link_efficiency: float = assumptions.LINK_EFFICIENCY
    half_speed_rows: float = assumptions.HALF_SPEED_ROWS

    def changed(self, **figures: float | None) -> Profile:
        """Return the profile with other figures; None leaves one as it is.

        Raises:
            ValueError: a figure out of range.
        """
        given = {name: figure for name, figure in figures.items() if figure is not None}
        for name, figure in given.items():
            share = name == "contention" or name.endswith("efficiency")
            zero = name in ("contention", "latency", "overhead", "half_speed_rows")
            above, below = figure > 0 or (zero and figure == 0), not share or figure <= 1
            if not (above and below):
                expected = ("at least 0" if zero else "more than 0") + (" and at most 1" if share else "")
                raise ValueError(f"expected {name} of {expected}, got {figure}")
        return replace(self, **given)


def named(name: str, ranks: int, link: float | None = None) -> Profile:
    """Return the profile of published hardware.

    Args:
        name: one of `CHIPS`.
        ranks: W, which says how much of a link without a switch can be used.
        link: bytes a second of another link.

    Raises:
        ValueError: an unknown name, or ranks that no published link joins.
    """
    if name not in CHIPS:
        raise ValueError(f"expected --hardware to be one of {', '.join(CHIPS)}, got {name}")
    if link is None and ranks > LINKED_RANKS:
        raise ValueError(
            f"expected at most {LINKED_RANKS} ranks, which the link of {name} joins, got {ranks}; give "
            "--link with the bandwidth that is between machines"
        )
    hardware, chip = HARDWARE[name], CHIPS[name]
    return Profile(
        name=name,
        flops=chip.flops,
        memory=hardware.memory,
        link=link or hardware.link_among(max(2, ranks)),
        capacity=chip.capacity,
    )


def from_file(path: Path, base: Profile) -> Profile:
    """Return a profile with the figures of a JSON file in place of a base's.

    Raises:
        ValueError: no such file, no JSON object, or a name or figure that cannot be.
    """
    known = [field.name for field in fields(Profile) if field.name != "name"]
    figures = read_object(path)
    for name, figure in figures.items():
        if name == "name" and isinstance(figure, str):
            continue
        if name not in known:
            raise ValueError(f"expected figures of {', '.join(known)} in {path}, got {name}")
        if isinstance(figure, bool) or not isinstance(figure, (int, float)):
            raise ValueError(f"expected {name} in {path} to be a number, got {figure!r}")
    title = figures.pop("name", path.stem)
    return replace(base.changed(**figures), name=title)


def read_object(path: Path) -> dict:
    """Return the object in a JSON file.

    Raises:
        ValueError: says what is wrong with the file.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"expected a file that can be read, got {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, got {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected one JSON object in {path}, got {type(found).__name__}")
    return found


def figures_of(profile: Profile) -> dict:
    """Return the profile's figures by name."""
    return asdict(profile)
