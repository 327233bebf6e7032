"""Fixtures of the tests of memory policies."""

import os

import pytest

from spikefuse.testing import Backends


@pytest.fixture
def backends():
    """The CPU alone: tests/gpu runs the same cases on a GPU, with deterministic convolutions."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return Backends("cpu", ("numba", "triton") if interpreted else ("numba",))
