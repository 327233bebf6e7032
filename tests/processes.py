"""Programs that tests start in other processes. tests/conftest.py lets them find the package."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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
