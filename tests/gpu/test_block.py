"""tests/block/test_block.py on a GPU."""

from tests.block.test_block import *  # noqa: F403
