"""Kernels that pointwise tracing cannot express: products with spikes that are few."""
