"""Tests of what only a GPU does; skipped, with the reason, where there is none."""

import gc

import pytest
import torch

from spikefuse.testing import Backends


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def without_garbage():
    """Memory that a test measures does not change because garbage of earlier tests is freed."""
    gc.collect()


@pytest.fixture
def backends():
    return Backends("cuda", ("triton",))
