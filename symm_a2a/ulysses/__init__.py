"""Ulysses sequence parallelism: whole sequences for attention, parts of them elsewhere."""

from symm_a2a.ulysses.exchange import head_to_seq, seq_to_head
from symm_a2a.ulysses.group import SequenceGroup

__all__ = ["SequenceGroup", "head_to_seq", "seq_to_head"]
