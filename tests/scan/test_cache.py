"""Generated source on disk: atomic, keyed by what it was made of, found by the next process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import spikefuse as sf
from spikefuse.scan import cache

SOURCE = "VALUE = {}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache directory of its own, which need not exist."""
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "a" / "b"))
    known = set(sys.modules)
    yield tmp_path / "a" / "b" / "kernels"
    for name in set(sys.modules) - known:
        if name.startswith("spikefuse_test_"):
            del sys.modules[name]


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_file())


def test_written_once_and_imported(folder):
    module = cache.load(SOURCE.format(1), "Name", "test")
    assert module.VALUE == 1
    (name,) = files(folder)
    assert (folder / name).read_text() == SOURCE.format(1)
    written = (folder / name).stat().st_mtime_ns
    assert cache.load(SOURCE.format(1), "Name", "test") is module
    del sys.modules[module.__name__]
    assert cache.load(SOURCE.format(1), "Name", "test").VALUE == 1
    assert (folder / name).stat().st_mtime_ns == written


@pytest.mark.parametrize("content", ["", "VALUE = 2\n", "VALUE = 1\n# \0"])
def test_a_damaged_or_edited_file_is_written_again(folder, content):
    module = cache.load(SOURCE.format(1), "Name", "test")
    (name,) = files(folder)
    (folder / name).write_text(content)
    del sys.modules[module.__name__]
    with pytest.warns(RuntimeWarning, match=f"{name} was damaged or edited"):
        assert cache.load(SOURCE.format(1), "Name", "test").VALUE == 1
    assert (folder / name).read_text() == SOURCE.format(1)


def test_a_file_that_can_not_be_read_is_named(folder):
    module = cache.load(SOURCE.format(1), "Name", "test")
    (name,) = files(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    del sys.modules[module.__name__]
    with pytest.raises(OSError, match=f"can't read the generated kernels in .*/{name}: Is a dir"):
        cache.load(SOURCE.format(1), "Name", "test")


def test_the_key_is_the_source(folder, monkeypatch):
    cache.load(SOURCE.format(1), "Name", "test")
    cache.load(SOURCE.format(2), "Name", "test")
    assert len(files(folder)) == 2
    monkeypatch.setattr(cache, "_compiler_hash", lambda: b"another compiler")
    cache.load(SOURCE.format(1), "Name", "test")
    assert len(files(folder)) == 3


def test_the_compilers_hash_covers_its_source():
    cache._compiler_hash.cache_clear()
    assert len(cache._compiler_hash()) == 32
    assert cache._compiler_hash() is cache._compiler_hash()


def test_a_half_written_file_is_never_seen(folder, monkeypatch):
    def interrupted(source: str, target: Path) -> None:
        assert files(folder) == [Path(source).name]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(OSError, match="No space left on device; set SPIKEFUSE_CACHE_DIR"):
        cache.load(SOURCE.format(1), "Name", "test")
    assert files(folder) == []


def test_broken_source_is_not_remembered(folder):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache.load("1 / 0\n", "Name", "test")


def test_many_writers_of_one_file(folder):
    folder.mkdir(parents=True)
    path, text = folder / "x.py", SOURCE.format(1) * 1000
    threads = [threading.Thread(target=cache._write, args=(path, text)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files(folder) == ["x.py"]
    assert path.read_text() == text


class Fresh(sf.Neuron):
    """No other test has the kernels of this one."""

    v = sf.State()

    def step(self, x, v):
        v = 0.123456 * v - x
        return v, (v,)


def test_a_directory_that_can_not_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "below"
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(folder))
    x = torch.rand(2, 3)
    message = f"can't write generated kernels to {folder}/kernels: .*; set SPIKE"
    with pytest.raises(OSError, match=message):
        Fresh()(x)
    # Once it can be, the same neuron runs.
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "other"))
    neuron = Fresh()
    assert torch.equal(neuron(x), neuron(x, impl="reference"))


PROGRAM = """
import torch, spikefuse as sf
from spikefuse.scan.program import _by_name
x = torch.randn(20, 2, 6, requires_grad=True)
sf.IF()(x).sum().backward()
kernels = [
    kernel
    for program in _by_name.values()
    for module in program.modules.values()
    for name, kernel in vars(module).items()
    if name in ("forward", "backward")
]
stats = [kernel.stats for kernel in kernels]
print(sum(len(s.cache_misses) for s in stats), sum(len(s.cache_hits) for s in stats))
"""


def test_two_processes_compile_once(tmp_path):
    environment = {**os.environ, "SPIKEFUSE_CACHE_DIR": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    misses, hits = zip(*(map(int, words.split()) for words in said), strict=True)
    assert (sum(misses), sum(hits)) == (2, 2)
