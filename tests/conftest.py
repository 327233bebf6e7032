"""Devices, backends, threads and programs for all tests.

A test that takes `backends` (or `device`) runs once on the CPU and, if there is an NVIDIA GPU, once
more on it. `pytest -m gpu` selects all that runs on the GPU: these cases, and the tests in
tests/gpu/ of what only a GPU does.
"""

import atexit
import gc
import os
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck

# Programs that tests start import the package and the helpers of the tests from this source tree.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Before torch is imported: workers of pytest-xdist share the cores, and threads of PyTorch that
# wait for each other would slow down the other workers.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# Before CUDA is initialized: workers use different GPUs, and each sees all of them.
if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.device_count() > 1:
    every = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    first = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])

# Before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from spikefuse.graph import fuse_norms
from spikefuse.kernels import numba_host
from spikefuse.testing import Backends
from tests import interpreter

# How long an example takes to make says nothing on a busy machine.
hypothesis.settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

DEVICES = [pytest.param("cpu")]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


interpreter.hasten()


def pytest_collection_finish():
    """Collect garbage less often: Numba's compiler and Triton's interpreter allocate many small
    objects, and each collection would also traverse all imported modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    # Else extension modules report leaks at exit. Only after the last collection of pytest.
    atexit.register(gc.unfreeze)


@pytest.fixture(params=DEVICES)
def backends(request):
    """A device, and the implementations that run on it. Triton's kernels run on a CPU too, in its
    interpreter, unless there is a GPU."""
    if request.param == "cuda":
        return Backends("cuda", ("triton",))
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return Backends("cpu", ("numba", "triton") if interpreted else ("numba",))


@pytest.fixture
def device(backends):
    return backends.device


@pytest.fixture(autouse=True)
def fixed_algorithms():
    """Many tests compare bit for bit, and training lets cuDNN search for the fastest algorithms,
    for the rest of the process and anew in each thread."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


@pytest.fixture(autouse=True, scope="module")
def blocks_of_any_size():
    """Fuse on a CPU where it does not pay, so that small inputs suffice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse_norms, "MIN_VALUES", 0)
        yield


@pytest.fixture
def own_threads():
    """Restore the number of threads of PyTorch and of Numba's kernels after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(own_threads):
    """Use two threads, even if each worker has a single core."""
    torch.set_num_threads(2)


@pytest.fixture
def any_threads(own_threads, monkeypatch):
    """Split work of any size among the threads that the test sets."""
    monkeypatch.setattr(numba_host, "MIN_TASK", 1)
