"""tests/test_properties.py on a GPU."""

from tests.test_properties import *  # noqa: F403
