"""The demonstration: a mixture-of-experts model trained over local processes, with several dispatchers."""
