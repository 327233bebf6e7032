"""The folder of cached kernels: where it lies, and who may own and write it."""

from __future__ import annotations

import os
import pwd
import tempfile
from contextlib import nullcontext
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
    with pytest.raises(
        PermissionError, match=rf"{path}.* cached kernels, belongs to user \d+, .*set"
    ):
        cache_folder.private_directory()


@pytest.mark.parametrize("name", ["a", "a/link", "a/b"])
def test_ancestors_of_others_are_refused(tmp_path, monkeypatch, name):
    """Whoever owns a folder or link on the way can put another one in its place."""
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "link").symlink_to("b")
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "a" / "link" / "c"))
    assert cache_folder.private_directory() == tmp_path / "a" / "b" / "c" / "kernels"
    if os.geteuid():
        pytest.skip("needs root to give files away")
    os.chown(tmp_path / name, 12345, -1, follow_symlinks=False)
    with pytest.raises(PermissionError, match=rf"{tmp_path / name}, .* belongs to user 12345"):
        cache_folder.private_directory()


def test_ancestors_that_others_can_write(tmp_path, monkeypatch):
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "a"))
    cache_folder.private_directory()
    (tmp_path / "a").chmod(0o1777)  # as /tmp, where only owners replace files
    cache_folder.private_directory()
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(PermissionError, match=rf"other users can write {tmp_path}/a .*777"):
        cache_folder.private_directory()
    (tmp_path / "a").chmod(0o770)
    for is_own in (True, False):
        monkeypatch.setattr(cache_folder, "_is_own_group", lambda gid, own=is_own: own)
        with nullcontext() if is_own else pytest.raises(PermissionError, match="other users can"):
            cache_folder.private_directory()


def test_a_link_is_followed_but_its_target_keeps_its_mode_if_refused(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    other.chmod(0o757)
    folder.symlink_to(other)
    with pytest.raises(PermissionError, match="other users can write"):
        cache_folder.private_directory()
    assert mode(other) == 0o757
    assert not list(other.iterdir())
    folder.unlink()
    folder.symlink_to("kernels")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        cache_folder.private_directory()


def test_the_folder_of_another_library(tmp_path):
    cache_folder.check_foreign(tmp_path / "triton")
    assert mode(tmp_path / "triton") == 0o700
    (tmp_path / "open" / "key").mkdir(parents=True)
    (tmp_path / "open" / "key").chmod(0o777)
    with pytest.raises(PermissionError, match=rf"other users can write {tmp_path}/open/key "):
        cache_folder.check_foreign(tmp_path / "open")
    (tmp_path / "open").chmod(0o700)
    cache_folder.check_foreign(tmp_path / "open")


def test_a_user_without_a_home(tmp_path, monkeypatch):
    for name in ("HOME", "SPIKEFUSE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # KeyError
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"cache-{os.getuid()}" / "spikefuse" / "kernels"
    assert cache_folder.private_directory() == folder
    assert mode(folder.parents[1]) == 0o700
