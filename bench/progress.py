"""How far a command is."""

from __future__ import annotations

import shutil
import sys

from tqdm import tqdm


class Progress:
    """A bar where stderr is a terminal, some ten lines where it is not, nothing where it is not to show.

    Args:
        name: of what is done.
        steps: in all.
        show: whether to show anything.
        unit: what a step is called.
    """

    def __init__(self, name: str, steps: int, show: bool = True, unit: str = "step") -> None:
        self._name, self._steps, self._unit, self._done = f"{name:<10}", steps, unit, 0
        self._bar = None
        self._lines = show and not sys.stderr.isatty()
        if show and not self._lines:
            # Some containers' terminals have no size, where tqdm shows nothing; this gives 80 x 24 then.
            columns, lines = shutil.get_terminal_size()
            self._bar = tqdm(total=steps, desc=self._name, unit=unit, ncols=columns, nrows=lines)

    def advance(self, note: str) -> None:
        """Count one step.

        Args:
            note: shown with it.
        """
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()
        elif self._lines and (self._done in (1, self._steps) or self._done % max(10, self._steps // 10) == 0):
            print(
                f"{self._name} {self._unit} {self._done} of {self._steps}: {note}",
                file=sys.stderr,
                flush=True,
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
