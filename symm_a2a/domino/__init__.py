"""Micro-batches whose exchanges hide under one another's compute."""

from symm_a2a.domino.batches import group_batches, token_shares
from symm_a2a.domino.schedule import Domino
from symm_a2a.domino.stages import Stages

__all__ = ["Domino", "Stages", "group_batches", "token_shares"]
