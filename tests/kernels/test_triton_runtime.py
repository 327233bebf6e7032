"""Threads that compile kernels, without a GPU."""

import subprocess
import sys

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
