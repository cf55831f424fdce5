"""What is compared: the ways to move rows, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import symm_a2a

DispatcherFactory = Callable[..., Any]
"""A dispatcher's class, or whatever takes `(cfg, group, device=...)` and gives a context manager."""

DISPATCHERS: dict[str, DispatcherFactory] = {
    "symm": symm_a2a.SymmTokenDispatcher,
    "all_to_all": symm_a2a.baselines.AllToAllTokenDispatcher,
}
