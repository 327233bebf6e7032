"""tests/compiler/test_relayed.py on a GPU."""

from tests.compiler.test_relayed import *  # noqa: F403
