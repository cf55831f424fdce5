"""For tests of this library and of code that uses it: ranks as processes, and a guard on operators."""

from symm_a2a.testing.failures import RankError, RankFailure
from symm_a2a.testing.guard import HiddenSyncError, OpGuard
from symm_a2a.testing.ranks import run_ranks

__all__ = ["HiddenSyncError", "OpGuard", "RankError", "RankFailure", "run_ranks"]
