"""Triton's interpreter where there is no GPU, and the backends."""

import os

import pytest

# Before anything imports torch: what several workers have to themselves of the cores, as threads
# of PyTorch that wait for each other keep others from working.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))

import torch

# Before anything imports Triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from spikefuse.kernels import numba_threads
from spikefuse.testing import Backends


@pytest.fixture
def own_threads():
    """A test may set the number of threads, of PyTorch and of Numba's kernels."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(own_threads):
    """Also where each worker has one core."""
    torch.set_num_threads(2)


@pytest.fixture
def any_threads(own_threads, monkeypatch):
    """Work of any size goes to as many threads as a test sets."""
    monkeypatch.setattr(numba_threads, "MIN_TASK", 1)


@pytest.fixture
def backends():
    """The kernels that run on CPU tensors: Numba's, and Triton's in its interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Backends("cpu", ("numba", "triton"))
    # Triton compiles for the GPU here, where tests/gpu runs its kernels.
    return Backends("cpu", ("numba",))
