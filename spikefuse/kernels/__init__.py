"""The few kernels that are written by hand, for what tracing a step cannot express: statistics of
norms, spikes as bits, and products with spikes that are few."""
