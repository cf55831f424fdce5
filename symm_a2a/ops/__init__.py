"""Operators with autograd: the only package that knows autograd contexts."""

from symm_a2a.ops.synchronous import combine, dispatch, dispatch_again
from symm_a2a.ops.table import enter_lane

__all__ = ["combine", "dispatch", "dispatch_again", "enter_lane"]
