"""tests/test_exactness.py on a GPU."""

from tests.test_exactness import *  # noqa: F403
