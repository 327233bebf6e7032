"""Hand-written kernels that tracing cannot express: norm statistics, spike bits, pooling."""
