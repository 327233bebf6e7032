"""Threads that lack cores wait actively for a short time only."""

import os
import subprocess
import sys
from queue import Queue
from types import SimpleNamespace

import pytest
import torch

from spikefuse.kernels import busy

OPENMP = "openmp" in torch.__config__.parallel_info().lower() and sys.platform == "linux"


@pytest.fixture
def machine(monkeypatch):
    """Eight cores, a clock, and the share of the time for which threads wait for cores."""
    machine = SimpleNamespace(time=0.0, waited=0.0, share=0.0)

    def monotonic():
        machine.time += 1.0
        machine.waited += machine.share
        return machine.time

    monkeypatch.setattr(busy, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(busy, "_waited", lambda: machine.waited)
    monkeypatch.setattr(busy.os, "sched_getaffinity", lambda _: range(8))
    return machine


@pytest.mark.parametrize(("threads", "size"), [(8, 2), (5, 5), (20, 2), (2, None)])
def test_a_second_pool_while_threads_lack_cores(machine, threads, size):
    sizes = Queue()
    watch = busy.Watch(lambda function, data, size, flags: sizes.put(size))
    watch.look(threads)
    assert watch.end is None
    for machine.share in (0.5, 0.05, 0.5):
        watch.look(threads)
        assert (watch.end is None) == (size is None)
    end, machine.share = watch.end, 0.0
    watch.look(threads)
    assert watch.end is None
    if size is not None:
        assert sizes.get(timeout=60) == size
        assert end.wait(0)
    assert sizes.empty()


# Two threads have two cores when OpenMP is loaded, and one core later. Processor time is
# independent of other processes.
PINNED = """
import os, time
cores = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, cores)
import numpy as np, torch
from spikefuse.kernels.numba_host import shared
from tests.kernels.ranges import add

os.sched_setaffinity(0, cores[:1])
x = torch.ones(1 << 18)
arguments = np.zeros(1 << 18), x.numpy(), 1.0, True, (x.numpy(), 1)

def seconds(function, *args):
    begin = time.process_time()
    for _ in range(6):
        function(*args)
    return time.process_time() - begin

spinning = seconds(torch.relu, x)
for _ in range(20):
    shared(add, 1 << 18, 16, 1 << 18, *arguments)
layer, kernel = seconds(torch.relu, x), seconds(shared, add, 1 << 18, 16, 1 << 18, *arguments)
assert max(layer, kernel) < spinning / 4, (spinning, layer, kernel)
"""


@pytest.mark.skipif(not OPENMP, reason="needs PyTorch with OpenMP on Linux")
def test_threads_on_one_core():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    environment.pop("OMP_WAIT_POLICY", None)
    subprocess.run([sys.executable, "-c", PINNED], env=environment, check=True, timeout=300)
