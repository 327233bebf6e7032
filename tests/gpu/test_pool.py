"""tests/kernels/test_pool.py and tests/nn/test_pool.py on a GPU."""

from tests.kernels.test_pool import *  # noqa: F403
from tests.nn.test_pool import *  # noqa: F403
