"""A rank's process, as a word that other processes can look at: which machine, and is it still there?"""

from __future__ import annotations

import os
from typing import NamedTuple


class Process(NamedTuple):
    """A process of some machine.

    Attributes:
        boot: of its machine, until that boots again.
        namespace: of its process id; a container may have its own.
        pid: there.
        started: ticks after the boot; a later process may get the same id.
    """

    boot: str
    namespace: int
    pid: int
    started: int

    @classmethod
    def this(cls) -> Process:
        """Return the process that asks."""
        return cls(boot_id(), _namespace(), os.getpid(), _state_and_start(os.getpid())[1])

    @classmethod
    def parse(cls, text: str) -> Process:
        """Return the process of a text."""
        boot, *numbers = text.split()
        return cls(boot, *map(int, numbers))

    @property
    def text(self) -> str:
        """The process, in a word that travels."""
        return " ".join(map(str, self))

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended: not where this process cannot see it."""
        if (self.boot, self.namespace) != (boot_id(), _namespace()):
            return False
        try:
            state, started = _state_and_start(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX" or started != self.started


def boot_id() -> str:
    """Return what tells this machine, as it runs now, from all others."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _state_and_start(pid: int) -> tuple[str, int]:
    # The name of the program, in parentheses, may hold anything.
    with open(f"/proc/{pid}/stat", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], int(fields[19])
