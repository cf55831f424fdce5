"""Other ways to move the rows, behind the same interface: to compare with, in results and in time."""

from symm_a2a.baselines.all_to_all import AllToAllTokenDispatcher

__all__ = ["AllToAllTokenDispatcher"]
