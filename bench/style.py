"""How all pictures look."""

from __future__ import annotations

from typing import Any

# Blue and orange of Okabe and Ito: told apart with any colour vision.
BLUE, ORANGE, INK, GREY, PALE = "#0072B2", "#E69F00", "#1F2933", "#66717D", "#C9D1D8"

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
}


def short(count: float) -> str:
    """Return a count in a few characters.

    Example:
        >>> short(234), short(29_163), short(477_482), short(4_500_000)
        ('234', '29.2k', '477k', '4.5M')
    """
    if count < 1000:
        return f"{count:.0f}"
    if count < 1_000_000:
        return f"{count / 1e3:.1f}k" if count < 100_000 else f"{count / 1e3:.0f}k"
    return f"{count / 1e6:.1f}M"
