"""Batch norm, residual and neuron as one operation."""
