"""`--link latency=0.02,gbps=1`: what a link is like, as text."""

from __future__ import annotations

import symm_a2a

_UNITS = {"ms": 1e-3, "us": 1e-6, "s": 1.0}


def parse_link(text: str) -> symm_a2a.Link:
    """Return the link that a text describes.

    Args:
        text: `latency=` in seconds, or with `ms`, `us` or `s` behind the number, and `gbps=`, billions of
            bits a second; either may be missing, for no time and no bound.

    Raises:
        ValueError: another text.

    Example:
        >>> parse_link("latency=20ms,gbps=1")
        Link(latency=0.02, bandwidth=125000000.0)
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        number = _number(value, _UNITS if name == "latency" else {})
        if name not in ("latency", "gbps") or name in values or number is None:
            raise ValueError(f"expected --link latency=SECONDS,gbps=NUMBER or one of the two, got {text!r}")
        values[name] = number
    latency, gbps = values.get("latency", 0.0), values.get("gbps", float("inf"))
    try:
        return symm_a2a.Link(latency=latency, bandwidth=gbps * 1e9 / 8)
    except symm_a2a.ConfigError as error:
        raise ValueError(f"--link {text}: {error}") from None


def describe(link: symm_a2a.Link) -> str:
    """Return a link in words.

    Example:
        >>> describe(parse_link("latency=20ms,gbps=1"))
        'latency 20 ms, 1 Gb/s'
    """
    speed = f", {link.bandwidth * 8 / 1e9:g} Gb/s" if link.bandwidth < float("inf") else ""
    return f"latency {link.latency * 1e3:g} ms{speed}"


def _number(text: str, units: dict[str, float]) -> float | None:
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        return float(text.removesuffix(unit)) * units.get(unit, 1.0)
    except ValueError:
        return None
