"""Sparse event-driven training: spikes as index lists, and the layers that read them."""
