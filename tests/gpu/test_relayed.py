"""tests/scan/test_state_passing.py on a GPU."""

from tests.scan.test_state_passing import *  # noqa: F403
