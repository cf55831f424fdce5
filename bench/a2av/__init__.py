"""The microbenchmark of the exchanges: dispatch, combine, both with backward, counts, flags, even."""
