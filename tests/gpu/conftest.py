"""Tests of what only a GPU does; skipped, with the reason, where there is none."""

import pytest
import torch

from spikefuse.testing import Backends


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def backends():
    return Backends("cuda", ("triton",))
