"""Programs that tests start in other processes. tests/conftest.py lets them find the package."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SECONDS = 90.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(*arguments: str | Path, folder: Path | None = None) -> subprocess.Popen[str]:
    """Start Python with one thread, in a folder, with its errors among its output."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def torchrun(
    count: int, *arguments: str | Path, folder: Path | None = None
) -> subprocess.Popen[str]:
    """Start a program in `count` processes of this machine, connected through a free port."""
    job = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)
    return start(*job, *arguments, folder=folder)


def forkserver() -> Any:
    """The context of processes that share one import of what any of them needs: a process has one
    such server, and the modules are those of its first start."""
    context = multiprocessing.get_context("forkserver")
    # Also Lightning, whose import takes longer than a run. What is not installed is left out.
    lightning, interpreter = "spikefuse.train.run", "triton.runtime.interpreter"
    context.set_forkserver_preload(
        ["spikefuse.testing", "torch._dynamo", interpreter, lightning, "tests.preloaded"]
    )
    return context


def job(rank: int, count: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives to one of its processes."""
    return {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
            "LOCAL_RANK": str(rank)}  # fmt: skip


def together(count: int, function: Callable[..., Any], *args: Any) -> None:
    """Run `function(*args)` in several processes as torchrun would, but without the imports of
    each, and wait for all to succeed."""
    context, port = forkserver(), free_port()
    errors = context.Queue()
    jobs = [job(rank, count, port) for rank in range(count)]
    started = [context.Process(target=_report, args=(errors, j, function, args)) for j in jobs]
    for process in started:
        process.start()
    try:
        for _ in started:
            error = errors.get(timeout=SECONDS)
            assert not error, error
    finally:
        for process in started:
            process.kill()
            process.join()


def _report(errors: Any, job: dict[str, str], function: Callable[..., Any], args: Any) -> None:
    """Run a function in a new process, and send the traceback of its error, or ""."""
    os.environ.update(job)
    torch.set_num_threads(1)
    try:
        function(*args)
    except BaseException:
        errors.put(traceback.format_exc())
    else:
        errors.put("")


def ended(process: subprocess.Popen[str], seconds: float = SECONDS) -> str:
    """Wait for a process to end and return its output; stop it if it takes too long."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes
        pytest.fail(f"no end after {seconds} s: {process.communicate()[0]}")


def finish(process: subprocess.Popen[str], seconds: float = SECONDS) -> str:
    """Wait for a process to succeed and return its output."""
    output = ended(process, seconds)
    assert process.returncode == 0, output
    return output


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
