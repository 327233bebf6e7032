"""Threads that compile kernels, without a GPU."""

import contextlib
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from spikefuse.kernels import triton_runtime
from spikefuse.kernels.triton_runtime import TritonLaunch

# One thread, which works until Python begins to exit.
BEGIN = """
import os, threading, time
os.cpu_count = lambda: 1
import torch
from spikefuse.kernels.triton_runtime import TritonLaunch, _compilers

begun = threading.Event()

def work():
    begun.set()
    threading.main_thread().join(0.5)
    print("compiled", flush=True)

def ahead():
    launch = TritonLaunch(object(), (1, 1, 1), (), 4, torch.device("cuda", 0))
    launch._compile = lambda kinds: work()
    launch.compile_ahead([])
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return done.stdout


def test_exit_waits_only_for_what_is_being_compiled() -> None:
    assert run("for _ in range(3): ahead()\nbegun.wait()") == "compiled\n"


def test_calls_on_other_threads_go_on_while_python_exits() -> None:
    code = """
def late():
    threading.main_thread().join(1)  # Python has shut the compilers down by then
    ahead()
    print("called", flush=True)

_compilers()
threading.Thread(target=late).start()
"""
    assert run(code) == "called\n"


@pytest.mark.parametrize("version", [(3, 6), (3, 7)])
def test_kernels_are_compiled_ahead(version, monkeypatch):
    """Until version 3.6, the C code that starts a kernel must not be loaded by several threads."""
    pytest.importorskip("triton")
    loaded = []
    driver = SimpleNamespace(launcher_cls=lambda *given: loaded.append(given))
    monkeypatch.setattr("triton.runtime.driver._active", driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(triton_runtime, "_triton_version", lambda: version)

    class Kernel:
        def warmup(self, *arguments, grid, **options):
            self.arguments = arguments
            return SimpleNamespace(src="source", metadata="metadata")

    kernel = Kernel()
    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(triton_runtime, "_compilers", lambda: threads)
        for size in (1, 2):  # of a grid, which share a variant
            launch = TritonLaunch(kernel, (size, 1, 1), (7,), 4, torch.device("cuda", 0))
            launch.compile_ahead([torch.ones(1), torch.uint8], [None], params=[0.5])
    assert kernel.arguments == (torch.float32, torch.uint8, None, 0.5, 7)
    assert not loaded


def test_the_current_stream(monkeypatch):
    pytest.importorskip("triton")
    driver = SimpleNamespace(get_current_stream=lambda index: 10 + index)
    monkeypatch.setattr("triton.runtime.driver._active", driver)
    assert triton_runtime.current_stream(1) == 11
    monkeypatch.setattr("triton.runtime.driver._active", SimpleNamespace())
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream if index == 2 else None)
    assert triton_runtime.current_stream(2) == 7


def test_what_triton_does_once_in_a_process(monkeypatch):
    cache = pytest.importorskip("triton.runtime.cache")
    driver = SimpleNamespace(get_current_target=lambda: None)
    monkeypatch.setattr("triton.runtime.driver._active", driver)
    cache.triton_key.cache_clear()
    triton_runtime._prepare()
    assert cache.triton_key.cache_info().currsize == 1


def test_compiling_leaves_the_filters_of_warnings_to_other_threads(monkeypatch):
    """Until version 3.7, Triton changes the filters, which all threads share, at each node."""
    generator = pytest.importorskip("triton.compiler.code_generator")
    driver = SimpleNamespace(get_current_target=lambda: None)
    monkeypatch.setattr("triton.runtime.driver._active", driver)
    monkeypatch.setattr(triton_runtime, "_triton_version", lambda: (3, 6))
    monkeypatch.setattr(generator, "warnings", warnings)
    triton_runtime._prepare()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with generator.warnings.catch_warnings():
            generator.warnings.simplefilter("ignore", DeprecationWarning)
            warnings.warn("another thread", DeprecationWarning, stacklevel=1)
            generator.warnings.warn("a kernel", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["another thread", "a kernel"]
