"""Benchmarks, instruments and the demonstration; `python -m bench` lists them."""
