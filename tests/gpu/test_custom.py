"""tests/nn/test_custom.py on a GPU."""

from tests.nn.test_custom import *  # noqa: F403
