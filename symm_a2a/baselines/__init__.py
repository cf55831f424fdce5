"""Other ways to move the rows, behind the same interface: to compare with, in results and in time."""

from symm_a2a.baselines.all_gather import AllGatherHandle, AllGatherTokenDispatcher
from symm_a2a.baselines.all_to_all import AllToAllHandle, AllToAllTokenDispatcher
from symm_a2a.baselines.replicated import ReplicatedHandle, ReplicatedTokenDispatcher

__all__ = [
    "AllGatherHandle",
    "AllGatherTokenDispatcher",
    "AllToAllHandle",
    "AllToAllTokenDispatcher",
    "ReplicatedHandle",
    "ReplicatedTokenDispatcher",
]
