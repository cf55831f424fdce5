"""Pictures of a benchmark's CSV, from the CSV alone."""
