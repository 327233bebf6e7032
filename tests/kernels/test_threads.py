"""Compilation in small threads, while a process forks, and as one exits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest

from spikefuse.kernels import threads
from spikefuse.kernels.numba_runtime import global_compiler_lock
from spikefuse.kernels.threads import STACK, compiling, enough_stack, import_module, on_thread

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


def test_threads_that_are_started_at_once():
    """Each with enough stack, though the size is a setting of the process."""
    before, sizes = threading.stack_size(1 << 16), []
    entered, left = threading.Event(), threading.Event()

    def start():
        with enough_stack():
            entered.set()
            left.wait()
            sizes.append(threading.stack_size())

    try:
        with enough_stack():
            thread = threading.Thread(target=start)
            thread.start()
            entered.wait(0.1)  # it has to wait
        left.set()
        thread.join()
        assert (sizes, threading.stack_size()) == ([STACK], 1 << 16)
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
    # A lock of another thread would be held for ever.
    assert status_of_child(lock.acquire) == 0
    done.set()
    thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_lock_that_is_named_while_a_fork_waits(monkeypatch):
    """As where a thread imports Numba."""
    first, second = threading.RLock(), threading.RLock()
    monkeypatch.setattr(threads, "_locks", [first])
    begun = threading.Event()

    def run():
        with first:
            begun.set()
            time.sleep(0.1)
            threads.hold_at_fork(second)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    threads._acquire()
    assert not on_thread(second.acquire, False)
    threads._release()
    thread.join()
    assert on_thread(first.acquire, False)
    assert on_thread(second.acquire, False)


def test_a_fork_waits_for_imports(tmp_path, monkeypatch):
    code = "import threading, time\nthread = threading.current_thread()\ntime.sleep(0.3)\n"
    (tmp_path / "slow_import.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=import_module, args=("slow_import",))
    thread.start()
    while "slow_import" not in sys.modules:
        time.sleep(0.001)
    assert status_of_child(import_module, "slow_import") == 0
    thread.join()
    # An import of Numba takes more stack than a thread may have.
    assert import_module("slow_import").thread is not thread


def status_of_child(function, *args):
    """Fork, and return the status of a child that calls a function, within 10 seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside other threads
        child = os.fork()
    if child == 0:
        signal.alarm(10)
        function(*args)
        os._exit(0)
    return os.waitpid(child, 0)[1]
