"""Measurements behind the figures in README.md: one script per figure, one runner."""
