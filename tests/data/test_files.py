"""Atomic downloads from a local server, and the default folder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import http.server
import os
import pwd
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spikefuse.data import DataError, files
from spikefuse.data.files import DownloadSource, default_directory, locate, replacing
from spikefuse.data.folder import read_image

CONTENT = {"a.gz": b"first file", "b.gz": b"second file"}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def source(tmp_path: Path) -> Iterator[DownloadSource]:
    folder = tmp_path / "published"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        checksums = {name: hashlib.sha256(c).hexdigest() for name, c in CONTENT.items()}
        yield DownloadSource("letters", f"http://127.0.0.1:{server.server_port}/", checksums)
        server.shutdown()
        thread.join()


def files_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_downloads_missing_files(source: DownloadSource, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / "a").write_bytes(b"mine")  # plain, outside the folder, and not to be replaced
    found = locate(source, root, download=True)
    assert found == {"a.gz": root / "a", "b.gz": root / "letters" / "b.gz"}
    assert found["b.gz"].read_bytes() == CONTENT["b.gz"]
    assert files_below(root) == ["a", "letters/b.gz"]


def test_downloads_only_on_request(source: DownloadSource, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"letters: a\.gz is neither in .*--download"):
        locate(source, tmp_path / "data", download=False)
    assert not (tmp_path / "data").exists()


def test_a_wrong_checksum_leaves_nothing(source: DownloadSource, tmp_path: Path) -> None:
    wrong = dataclasses.replace(source, sha256={"a.gz": "0" * 64})
    with pytest.raises(DataError, match="checksum, so nothing was saved"):
        locate(wrong, tmp_path / "data", download=True)
    assert files_below(tmp_path / "data") == []


def test_unavailable_file_is_named(source: DownloadSource, tmp_path: Path) -> None:
    wrong = dataclasses.replace(source, sha256={"c.gz": "0" * 64})
    with pytest.raises(DataError, match=r"cannot download http://.*c\.gz .*HTTPError") as caught:
        locate(wrong, tmp_path / "data", download=True)
    assert "\n" not in str(caught.value)
    assert files_below(tmp_path / "data") == []


def test_default_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "CHECKOUT", tmp_path / "checkout")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPIKEFUSE_DATA", raising=False)
    local = tmp_path / "checkout" / "data"
    local.mkdir(parents=True)
    assert default_directory().parts[-2:] == ("spikefuse", "data")  # not a checkout
    (tmp_path / "checkout" / "pyproject.toml").touch()
    assert default_directory() == local
    monkeypatch.setenv("SPIKEFUSE_DATA", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("SPIKEFUSE_DATA")
    local.rmdir()
    assert default_directory().parts[-2:] == ("spikefuse", "data")


def test_replacing_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise RuntimeError
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "new")]


@pytest.mark.parametrize("name", ["folder", "missing/file"])
def test_replacing_names_the_path_that_it_cannot_write(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    with pytest.raises(OSError, match=f"directory: '{path}'$"), replacing(path) as temporary:
        temporary.write_text("new")


def test_writers_of_one_file_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as one:
        one.write_text("one")
        with replacing(path) as other:
            other.write_text("another")
        assert path.read_text() == "another"
    assert path.read_text() == "one"


@pytest.mark.parametrize("read", [files.read_bytes, lambda path: read_image(path, 8)])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    """Reading a FIFO would wait for a writer."""
    os.mkfifo(tmp_path / "3.png")
    for path in (tmp_path / "3.png", tmp_path):
        with pytest.raises(files.DataError, match=rf"cannot read {path}: it is not a regular"):
            read(path)


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # KeyError
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert files.user_cache() == tmp_path / f"cache-{os.getuid()}" / "spikefuse"


def test_a_process_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is not to blame."""
    pytest.importorskip("h5py")
    (tmp_path / "a.h5").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(DataError, match=r"cannot read .*a\.h5: .*No such file .*python"):
        next(files.read_isolated(tmp_path / "a.h5", "event_columns.py", "h5py"))


def test_the_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the system caches are given back when memory is needed."""
    monkeypatch.setattr(files, "CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("9000\n")
    (tmp_path / "memory.stat").write_text("anon 5000\nactive_file 1000\ninactive_file 2500\n")
    for limit, expected in ("10000", 4500), ("4000", 0):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert files.free_memory() == expected
    (tmp_path / "memory.max").write_text("max\n")
    assert files.free_memory() > 1 << 20
