"""File locks between processes."""

from __future__ import annotations

import time

import pytest

from spikefuse.kernels import file_lock


def test_a_lock_is_waited_for_until_the_timeout(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(file_lock, "TIMEOUT", 1.0)

    def seconds() -> float:
        start = time.monotonic()
        with file_lock.locked(str(path)), file_lock.locked(str(path)):
            return time.monotonic() - start

    path = tmp_path / "x.py"
    assert seconds() < file_lock.TIMEOUT  # nothing to lock
    path.touch()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert seconds() >= file_lock.TIMEOUT
    assert seconds() < file_lock.TIMEOUT
    with file_lock.locked(str(path)), path.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
