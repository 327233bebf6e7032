"""Benchmarks: one script per figure or comparison, one runner, results in `benchmarks/results`."""
