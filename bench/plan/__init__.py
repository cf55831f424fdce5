"""Whether Domino will pay: its real schedule, replayed over a model of a machine."""
