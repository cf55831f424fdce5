"""Every error the library raises on purpose.

All derive from `SymmA2AError`; where a built-in class fits as well, the error is also a
`ValueError` (the caller can fix the argument) or a `RuntimeError` (the environment, a
peer, or the order of calls is at fault).
"""

from __future__ import annotations


class SymmA2AError(Exception):
    """Base class of the library's errors."""


class ConfigError(SymmA2AError, ValueError):
    """A size, capacity or dtype that the library cannot work with."""


class InputError(SymmA2AError, ValueError):
    """A tensor of the wrong shape, dtype, device or content."""


class ExpertIdError(InputError):
    """An expert id outside `[-1, num_experts)`; nothing was sent for that slot."""


class CapacityError(SymmA2AError, RuntimeError):
    """More rows arrived than a static capacity holds; the surplus was dropped."""


class EnvironmentUnsupportedError(SymmA2AError, RuntimeError):
    """This machine, group or build cannot run the requested backend."""


class LaneBusyError(SymmA2AError, RuntimeError):
    """A launch in a lane whose last exchange has not been joined."""


class JoinedTwiceError(SymmA2AError, RuntimeError):
    """A pending exchange was joined a second time."""


class DoubleBackwardError(SymmA2AError, RuntimeError):
    """A backward that was to be differentiated itself; exchanges have no second derivative."""


class ScheduleError(SymmA2AError, RuntimeError):
    """A micro-batch that cannot be interleaved with others as it is written."""


class RecordingError(SymmA2AError, RuntimeError):
    """A timeline that was asked for while another is recorded, or before its recording has ended."""


class ClosedError(SymmA2AError, RuntimeError):
    """A dispatcher was used after it, or its arena, was closed."""


class ExchangeError(SymmA2AError, RuntimeError):
    """An exchange that cannot complete; the arena refuses further work."""

    def again(self) -> ExchangeError:
        """Return the same error, never raised, to be kept.

        One that was raised holds the frames that it passed through, and all their tensors.
        """
        return type(self)(*self.args)


class PeerTimeoutError(ExchangeError, TimeoutError):
    """A peer did not take part in an exchange within the configured timeout."""


class PeerLostError(ExchangeError):
    """A peer ended, or gave up, while this rank waited for it."""


class ProtocolError(ExchangeError):
    """Debug mode found something in symmetric memory that no rank should have written."""


class ExchangeMismatchError(ExchangeError):
    """A peer runs another operation, or another dispatch, than this rank does."""
