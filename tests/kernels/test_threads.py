"""Compilation in small threads, while a process forks, and as one exits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings

import pytest

from spikefuse.kernels.numba_runtime import global_compiler_lock
from spikefuse.kernels.threads import STACK, compiling, enough_stack, on_thread

# Its own definition, so that there is something to compile.
PROGRAM = """
import atexit, threading, torch
import spikefuse as sf

class Own(sf.Neuron):
    v = sf.State()

    def step(self, x, v):
        v = 0.25 * v + x * {factor}
        return v, (v,)

threading.stack_size(1 << 16)
atexit.register(lambda: print(Own()(torch.ones(2, 1, 1)).sum().item()))
"""


def test_a_first_call_at_exit_with_small_threads(tmp_path):
    code = PROGRAM.format(factor=2.0 + os.getpid())
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert float(run.stdout) == 2.25 * (2.0 + os.getpid())


def test_the_stack_of_threads():
    before = threading.stack_size(1 << 16)
    try:
        with enough_stack():
            assert threading.stack_size() == STACK
        assert threading.stack_size() == 1 << 16
        assert on_thread(max, 1, 2) == 2
    finally:
        threading.stack_size(before)


def test_errors_of_threads():
    with pytest.raises(RuntimeError, match="own"):
        on_thread(_fail)


def _fail():
    raise RuntimeError("own")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("lock", [compiling, global_compiler_lock], ids=["tracing", "compiling"])
def test_a_fork_waits_for_compilers(lock):
    is_held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            done.wait(0.2)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside other threads
        child = os.fork()
    if child == 0:
        # A lock of another thread would be held for ever.
        with lock:
            os._exit(0)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
