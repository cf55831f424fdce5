"""What a process holds of the machine: to see that nothing is left of what was closed."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

_SHARED_MEMORY = "/dev/shm"


class Footprint(NamedTuple):
    """What this process holds.

    Attributes:
        descriptors: open files, sockets and pipes.
        mappings: of shared memory, by a name or without.
        resident_bytes: of memory, shared pages included, those that are free again not.
    """

    descriptors: int
    mappings: int
    resident_bytes: int


def footprint() -> Footprint:
    """Look at what this process holds now."""
    # Freed pages stay with a process until it gives them back; not every C library can be asked to.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    with open("/proc/self/maps") as maps:
        mappings = sum(_SHARED_MEMORY in line for line in maps)
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    # One of them is the folder's own.
    return Footprint(len(os.listdir("/proc/self/fd")) - 1, mappings, pages * os.sysconf("SC_PAGE_SIZE"))


def shared_names() -> set[str]:
    """Return the names in the machine's shared memory, but of semaphores, which have one for a moment."""
    names = os.listdir(_SHARED_MEMORY) if os.path.isdir(_SHARED_MEMORY) else []
    return {name for name in names if not name.startswith("sem.")}
