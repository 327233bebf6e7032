"""tests/kernels/test_norm.py on a GPU."""

from tests.kernels.test_norm import *  # noqa: F403
