"""When exchanges were launched, in flight and joined, and what was computed meanwhile."""

from symm_a2a.timeline.chrome import save_trace
from symm_a2a.timeline.exchanges import Compute, Exchange, FlightStats, Interval, Timeline
from symm_a2a.timeline.picture import save_picture
from symm_a2a.timeline.recorder import Recorder, Recording

__all__ = [
    "Compute",
    "Exchange",
    "FlightStats",
    "Interval",
    "Recorder",
    "Recording",
    "Timeline",
    "save_picture",
    "save_trace",
]
