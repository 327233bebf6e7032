"""The few kernels that are written by hand: what tracing a step cannot express."""
