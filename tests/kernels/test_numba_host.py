"""Kernels over ranges run every item once, on any kind of threads."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from spikefuse.kernels import numba_host
from spikefuse.kernels.numba_host import MIN_TASK, shared
from spikefuse.kernels.numba_runtime import kernel
from tests.kernels.ranges import add

OPENMP = "openmp" in torch.__config__.parallel_info().lower() and sys.platform == "linux"
WAYS = ["python", *["openmp"] * OPENMP]


@pytest.fixture(params=WAYS, autouse=True)
def way(request, monkeypatch):
    monkeypatch.setattr(numba_host, "_has_openmp", request.param == "openmp")
    return request.param


@pytest.fixture
def five_threads(own_threads):
    torch.set_num_threads(5)


@kernel
def describe(first, last, found, array, more):
    for i in range(first, last):
        found[i] = 1000 * array.ndim + 100 * len(more[1]) + array.size


@kernel
def claim(first, last, sums):
    if first > 0:
        sums[0] = np.empty(1 << 58)[0]


def test_openmp_is_shared_with_torch():
    assert (numba_host._register_openmp() is not None) == OPENMP


@pytest.mark.usefixtures("five_threads")
@pytest.mark.parametrize(("count", "unit"), [(1, 16), (80, 16), (81, 16), (1000, 1), (4, 1)])
def test_every_item_once(count, unit):
    sums, values = np.zeros(count, np.float32), np.arange(count, dtype=np.float32)
    more = (np.ones(count, np.int32), 2)
    for _ in range(3):
        shared(add, count, unit, 5 * MIN_TASK, sums, values, np.float32(0.5), True, more)
    np.testing.assert_array_equal(sums, 3 * (0.5 * values + 3))


@pytest.mark.usefixtures("five_threads")
def test_each_argument_type_has_its_own_machine_code():
    wide, shorts = np.arange(400.0), np.arange(100, dtype=np.int16)
    kinds = (wide[:100], wide[::4], wide[:100].astype(np.float32), shorts)
    for values in (*kinds, *kinds):
        sums = np.zeros(100)
        shared(add, 100, 1, 5 * MIN_TASK, sums, values, 2.0, True, (shorts, 0.5))
        np.testing.assert_array_equal(sums, 2.0 * values + shorts + 0.5)


@pytest.mark.usefixtures("five_threads")
def test_similar_argument_types():
    flat = np.arange(64.0)
    read_only = flat.copy()
    read_only.flags.writeable = False
    square = flat.reshape(8, 8)
    for _ in range(2):
        for array in (flat, square, read_only, square.T, square[:, ::2]):
            for more in ((1, (2,)), (1, (2, 3))):
                found = np.zeros(100, np.int64)
                shared(describe, 100, 1, 5 * MIN_TASK, found, array, more)
                assert (found == 1000 * array.ndim + 100 * len(more[1]) + array.size).all()


@pytest.mark.usefixtures("five_threads")
def test_calls_from_several_python_threads():
    def run(k):
        sums = np.zeros(1000, np.float32)
        for _ in range(20):
            more = (np.full(1000, k), 1)
            shared(add, 1000, 1, 5 * MIN_TASK, sums, sums.copy(), np.float32(0), True, more)
        return sums

    with ThreadPoolExecutor(4) as pool:
        for k, sums in enumerate(pool.map(run, range(8))):
            np.testing.assert_array_equal(sums, 20 * (k + 1))


def test_small_work_stays_on_one_thread(monkeypatch):
    monkeypatch.setattr(numba_host, "_run", None)
    monkeypatch.setattr(numba_host, "_on_python_threads", None)
    sums = np.zeros(100, np.float32)
    shared(add, 100, 1, MIN_TASK, sums, sums.copy(), 1.0, True, (sums.copy(), 1))
    np.testing.assert_array_equal(sums, 1)


@pytest.mark.usefixtures("five_threads")
def test_a_thread_out_of_memory():
    with pytest.raises(MemoryError):
        shared(claim, 100, 1, 5 * MIN_TASK, np.zeros(100))


FEWER = """
import numpy as np, torch
from spikefuse.kernels.numba_host import MIN_TASK, shared
from tests.kernels.ranges import add

torch.set_num_threads(4)
sums = np.zeros(100, np.float32)
shared(add, 100, 1, 4 * MIN_TASK, sums, sums + 1, 1.0, True, (sums + 1, 1))
assert (sums == 3).all(), sums
"""


def test_fewer_threads_than_requested(way):
    if way == "openmp":
        environment = os.environ | {"OMP_THREAD_LIMIT": "2"}
        subprocess.run([sys.executable, "-c", FEWER], env=environment, check=True, timeout=120)


FORK = """
import os, sys, time
import torch, spikefuse as sf
from spikefuse.kernels import numba_host

numba_host._has_openmp = sys.argv[1] == "openmp"
torch.set_num_threads(2)
x = torch.randn(8, 64, 1024)
expected = sf.LIF()(x).numpy()
# The child does not inherit these threads.
assert numba_host._has_openmp == (numba_host._pool is None)
child = os.fork()
if child == 0:
    same = (sf.LIF()(x).numpy() == expected).all()
    os._exit(0 if same else 3)
for _ in range(600):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        raise SystemExit(os.waitstatus_to_exitcode(status))
    time.sleep(0.1)
os.kill(child, 9)
raise SystemExit("the child hangs")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_its_own_threads(way):
    subprocess.run([sys.executable, "-c", FORK, way], check=True, timeout=120)


FAULTS = """
import resource
import torch
import spikefuse

before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.zeros(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.is_file() or "[madvise]" not in HUGE_PAGES.read_text(),
    reason="needs Linux with huge pages on request",
)
def test_large_tensors_of_pytorch_have_huge_pages():
    def faults(setting):
        environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": setting}
        if not setting:
            del environment["THP_MEM_ALLOC_ENABLE"]
        command = [sys.executable, "-c", FAULTS]
        return int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)

    assert faults("0") > 10_000  # pages of 4 KiB
    # The kernel may have none at once where memory is in pieces.
    assert min(faults("") for _ in range(3)) < 5_000
