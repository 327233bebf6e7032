"""Fixtures of the compiler's tests."""

import os

import pytest

from spikefuse.testing import Backends


@pytest.fixture
def backends():
    """The CPU alone: PyTorch's own operations differ on a GPU, where test_exactness compares whole
    neurons."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return Backends("cpu", ("numba", "triton") if interpreted else ("numba",))
