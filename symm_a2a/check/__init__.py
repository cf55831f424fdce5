"""Random cases over real ranks, against the standard all-to-all and against fp64: is it right here?

A case is one arena with one or two dispatchers on it, and some rounds of one to three steps each; all
of it is drawn from the case's seed, on every rank alike. A step is a dispatch, per-expert arithmetic, a
combine, and the backward of all three. All rounds of a case run back to back, with every result still
held; then each step is compared with `symm_a2a.reference`, rows and counts bit by bit, and sums within
a bound of fp64. The standard all-to-all runs the steps too, where no static capacity is set, which it
does not know, and is held to the same.

Ranks sleep for random short times between phases, each by itself. What they find out goes to a journal,
one file a rank, so that a case that hangs or dies is known too.
"""

from symm_a2a.check.cases import draw_case
from symm_a2a.check.journal import Result
from symm_a2a.check.ranks import run_case, run_cases
from symm_a2a.check.run import check, soak

__all__ = ["Result", "check", "draw_case", "run_case", "run_cases", "soak"]
