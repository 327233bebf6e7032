"""Run a compiled step over time: programs, memory layout, launches, and the autograd op."""
