"""The frame cache: computed once, written atomically, invalidated by changes."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from spikefuse.data import DataError, Slicing, store, to_frames
from spikefuse.data.recordings import Recording, RecordingSet, make_recording
from spikefuse.data.store import load_frames

SIZE = (2, 6, 5)
SLICING = Slicing("number", 4, bits=4)


class Source:
    """Five recordings that count reads and can be interrupted."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "recordings"
        self.file.write_bytes(b"first content")
        self.reads, self.stop_after = 0, 5
        rng = np.random.default_rng(0)
        self.events = [
            make_recording(
                (*(rng.integers(0, n, 60) for n in (5, 6, 2)), np.arange(60)), SIZE, self.file
            )
            for _ in range(5)
        ]

    def __iter__(self) -> Iterator[Recording]:
        self.reads += 1
        for i, events in enumerate(self.events):
            if i == self.stop_after:
                raise KeyboardInterrupt
            yield events

    @property
    def recordings(self) -> RecordingSet:
        return RecordingSet(SIZE, np.array([3, 1, 4, 1, 5]), (self.file,), self.__iter__)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "cache"))
    return Source(tmp_path)


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "frames").iterdir())


def test_frames_are_computed_once_and_mapped(source: Source, tmp_path: Path) -> None:
    first = load_frames("name", source.recordings, SLICING)
    again = load_frames("name", source.recordings, SLICING)
    assert source.reads == 1
    assert len(cached(tmp_path)) == 1
    expected = np.stack([to_frames(events, SLICING) for events in source.events])
    for frames in (first, again):
        np.testing.assert_array_equal(frames.pixels.numpy(), expected)
        assert frames.labels.tolist() == [3, 1, 4, 1, 5]
        assert frames.labels.dtype == torch.int64
    # 60 values of 4 bits, 4 steps, 5 recordings, a checksum; the rest is the header.
    size, content = cached(tmp_path)[0].stat().st_size, 5 * 4 * 30 + 4
    assert 0 < size - content < 1024
    assert (size - content) % 64 == 0


def test_frames_are_read_when_indexed(source: Source, tmp_path: Path) -> None:
    frames = load_frames("name", source.recordings, SLICING)
    expected = frames[3:4].pixels.clone()
    path = cached(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[-2 * 4 * 30 - 4 : -4 * 30 - 4] = bytes(4 * 30)  # recording 3, behind the mapping's back
    with path.open("r+b") as file:
        file.write(content)
    assert expected.any()
    assert not frames[3:4].pixels.any()


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_files_larger_than_the_memory_are_mapped(tmp_path: Path) -> None:
    size = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(size)
        content = store.mapped(file)
        assert len(content) == size
        content[-1] = 5  # of the copy in memory
        file.seek(size - 1)
        assert file.read() == b"\0"
    (tmp_path / "sparse").unlink()


def test_changed_key_recomputes_frames(source: Source, tmp_path: Path) -> None:
    load_frames("name", source.recordings, SLICING)
    load_frames("other", source.recordings, SLICING)
    load_frames("name", source.recordings, dataclasses.replace(SLICING, num_steps=5))
    load_frames("name", source.recordings, dataclasses.replace(SLICING, by="time"))
    load_frames("name", source.recordings, dataclasses.replace(SLICING, bits=8))
    source.file.write_bytes(b"other content of the same dataset")
    load_frames("name", source.recordings, SLICING)
    assert source.reads == len(cached(tmp_path)) == 6


def test_changed_version_recomputes_frames(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_frames("name", source.recordings, SLICING)
    monkeypatch.setattr(store, "VERSION", store.VERSION + 1)
    load_frames("name", source.recordings, SLICING)
    assert source.reads == len(cached(tmp_path)) == 2


def test_an_interrupted_cache_leaves_nothing(source: Source, tmp_path: Path) -> None:
    source.stop_after = 3
    with pytest.raises(KeyboardInterrupt):
        load_frames("name", source.recordings, SLICING)
    assert cached(tmp_path) == []
    source.stop_after = 5
    assert len(load_frames("name", source.recordings, SLICING)) == 5


def test_a_killed_write_is_never_read(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the rename: the partial file remains and is ignored."""

    def killed(*args: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(os, "unlink", killed)
        with pytest.raises(SystemExit):
            load_frames("name", source.recordings, SLICING)
    (partial,) = cached(tmp_path)
    assert partial.suffix == ".partial"
    assert len(load_frames("name", source.recordings, SLICING)) == 5
    assert source.reads == 2


@pytest.mark.parametrize("change", ["cut", "longer", "header", "frame", "checksum"])
def test_a_damaged_cache_is_named(source: Source, tmp_path: Path, change: str) -> None:
    load_frames("name", source.recordings, SLICING)
    load_frames("name", source.recordings, SLICING)
    assert source.reads == 1
    path = cached(tmp_path)[0]
    content = bytearray(path.read_bytes())
    content[{"header": 20, "frame": -7, "checksum": -1}.get(change, 20)] ^= 1
    path.write_bytes({"cut": content[:-1], "longer": content + b"\0"}.get(change, content))
    with pytest.raises(DataError, match=r"is damaged: delete it") as caught:
        load_frames("name", source.recordings, SLICING)
    assert str(path) in str(caught.value)


def test_a_cache_that_cannot_be_written(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot write the frames of name .*SPIKEFUSE_CACHE_DIR"):
        load_frames("name", source.recordings, SLICING)


def test_default_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPIKEFUSE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.cache_directory() == tmp_path / "spikefuse" / "frames"


def test_folders_of_equal_names_sizes_and_dates(source: Source, tmp_path: Path) -> None:
    """Such as two copies of a dataset, and a file that was replaced with the date of the first."""
    (tmp_path / "other").mkdir()
    other, status = Source(tmp_path / "other"), source.file.stat()
    other.events.reverse()
    for file in (other.file, source.file):
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    first = load_frames("name", source.recordings, SLICING)
    second = load_frames("name", other.recordings, SLICING)
    assert torch.equal(first.pixels.flip(0), second.pixels)
    source.file.write_bytes(b"other content")
    os.utime(source.file, ns=(status.st_atime_ns, status.st_mtime_ns))
    load_frames("name", source.recordings, SLICING)
    assert (source.reads, other.reads) == (2, 1)
