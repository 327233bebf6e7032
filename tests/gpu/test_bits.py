"""tests/kernels/test_bits.py on a GPU."""

from tests.kernels.test_bits import *  # noqa: F403
