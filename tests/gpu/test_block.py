"""tests/nn/test_block.py on a GPU."""

from tests.nn.test_block import *  # noqa: F403
