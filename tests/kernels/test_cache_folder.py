"""The folder of cached kernels: where it lies, and who may own and write it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spikefuse.kernels import cache_folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def give_away(path: Path, monkeypatch) -> None:
    """Let another user own the path, as far as this process can tell."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)


def test_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPIKEFUSE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder.directory() == tmp_path / ".cache" / "spikefuse" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder.directory() == tmp_path / "xdg" / "spikefuse" / "kernels"
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", "~/own")
    assert cache_folder.directory() == tmp_path / "own" / "kernels"


@pytest.mark.parametrize("umask", [0, 0o077])
def test_only_the_user_can_enter_it(folder, umask):
    before = os.umask(umask)
    try:
        assert cache_folder.private_directory() == folder
    finally:
        os.umask(before)
    assert mode(folder) == 0o700


def test_a_readable_folder_becomes_private(folder):
    folder.mkdir(0o755)
    (folder / "x.py").touch(0o644)
    cache_folder.private_directory()
    assert mode(folder) == 0o700


@pytest.mark.parametrize("writable", [0o720, 0o702])
def test_what_others_can_write_is_refused(folder, writable):
    folder.mkdir()
    folder.chmod(writable)
    message = rf"other users can write {folder} .*\(mode {writable:o}\): .*set SPIKEFUSE_CACHE_DIR"
    for _ in range(2):
        with pytest.raises(PermissionError, match=message):
            cache_folder.private_directory()
    folder.chmod(0o755)
    below = folder / "__pycache__" / "x.nbi"
    below.parent.mkdir()
    below.touch()
    below.chmod(0o660)
    with pytest.raises(PermissionError, match=rf"other users can write {below} "):
        cache_folder.private_directory()
    folder.chmod(0o700)  # nobody else reaches the file
    cache_folder.private_directory()


@pytest.mark.parametrize("name", [".", "x.py", "__pycache__/x.nbi"])
def test_what_others_own_is_refused(folder, monkeypatch, name):
    (folder / "__pycache__").mkdir(mode=0o700, parents=True)
    path = folder / name
    if name != ".":
        path.touch()
    give_away(path, monkeypatch)
    with pytest.raises(PermissionError, match=rf"kernels in {folder}.* belong to user \d+, .*set"):
        cache_folder.private_directory()
