"""Triton's interpreter where there is no GPU, and the backends."""

import os

import pytest
import torch

# Before anything imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from spikefuse.testing import Backends


@pytest.fixture
def backends():
    """The kernels that run on CPU tensors: Numba's, and Triton's in its interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Backends("cpu", ("numba", "triton"))
    # Triton compiles for the GPU here, where tests/gpu runs its kernels.
    return Backends("cpu", ("numba",))
