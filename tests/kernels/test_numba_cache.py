"""The cache of machine code: damaged entries, full disks, folders that cannot be written."""

from __future__ import annotations

import importlib.util
import random
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pytest

from spikefuse.kernels import numba_cache, numba_runtime

MODULE = """
from spikefuse.kernels.numba_runtime import kernel
@kernel
def double(values):
    for i in range(values.size):
        values[i] = 2 * values[i]
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Import the kernel of `MODULE` as a new process would."""
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "own"))
    path = tmp_path / "some.py"
    path.write_text(MODULE)

    def imported() -> object:
        spec = importlib.util.spec_from_file_location("some_kernel", path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["some_kernel"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.double

    yield imported
    del sys.modules["some_kernel"]


def check(kernel: object, dtype: type = np.float32) -> None:
    values = np.arange(5, dtype=dtype)
    kernel(values)
    assert values.tolist() == [0, 2, 4, 6, 8]


def entries(tmp_path: Path, suffix: str) -> list[Path]:
    return sorted(tmp_path.rglob(f"*.{suffix}"))


def test_a_later_process_does_not_compile(load):
    for hits in (0, 1):
        kernel = load()
        check(kernel)
        assert sum(kernel.stats.cache_hits.values()) == hits


def test_the_cache_of_numba(load, monkeypatch):
    """In versions that lack what ours is made of."""
    monkeypatch.setattr(numba_runtime, "cache_of", None)
    for hits in (0, 1):
        kernel = load()
        check(kernel)
        assert sum(kernel.stats.cache_hits.values()) == hits


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_damaged_entry_is_compiled_again(load, tmp_path, suffix):
    check(load())
    (path,) = entries(tmp_path, suffix)
    content, rng = path.read_bytes(), random.Random(0)
    contents = [b"", content[:100], content[:-1]]
    for at in rng.sample(range(len(content)), 10):
        contents.append(
            content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        )
    noticed = 0
    for damaged in contents:
        path.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            check(load())
        for warning in found:
            assert f"{tmp_path}/own/kernels/" in str(warning.message)
            assert "/some.double-" in str(warning.message)
            assert "is damaged: its kernels are compiled again" in str(warning.message)
        noticed += len(found)
        kernel = load()
        check(kernel)
        assert sum(kernel.stats.cache_hits.values()) == 1
    # Some bits of an index do not matter, or make its key that of another kernel.
    assert noticed == len(contents) if suffix == "nbc" else noticed >= 3


def test_an_entry_of_other_types_is_not_used(load, tmp_path):
    check(load())
    kernel = load()
    check(kernel, np.float64)
    one, other = entries(tmp_path, "nbc")
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        check(load())


def test_a_full_disk_is_reported_and_survived(load, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.warns(
            RuntimeWarning, match=f"can't save compiled kernels to {tmp_path}.*: free"
        ):
            check(load())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check(load())
    assert len(entries(tmp_path, "nbc")) == 1


def test_machine_code_lies_in_the_private_folder_only(load, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "shared"))
    for cache_of in (numba_runtime.cache_of, None):
        monkeypatch.setattr(numba_runtime, "cache_of", cache_of)
        check(load())
        paths = entries(tmp_path, "nbc")
        assert paths
        assert all(path.is_relative_to(tmp_path / "own" / "kernels") for path in paths)
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "some.py"))
    with pytest.raises(OSError, match=r"can't write generated kernels to .*; set SPIKEFUSE"):
        load()


def test_a_folder_that_others_can_replace_is_refused_at_each_load(load, tmp_path):
    kernel = load()
    (tmp_path / "own").chmod(0o777)
    with pytest.raises(PermissionError, match=f"other users can write {tmp_path}/own "):
        check(kernel)


def test_an_edit_of_inlined_functions_is_noticed(load, monkeypatch):
    check(load())
    monkeypatch.setattr(numba_cache, "_inlined", lambda: b"another version")
    kernel = load()
    check(kernel)
    assert not kernel.stats.cache_hits
