"""The disk cache of frames, which are computed once and memory-mapped.

A file contains the magic bytes, the length of the header as uint64, the header (JSON), the labels
as int64 and the packed frames, all little-endian. Files are written atomically.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spikefuse.data.files import DataError
from spikefuse.data.frames import Frames, Slicing, pack_frames, to_frames
from spikefuse.data.recordings import Recording, RecordingSet

MAGIC = b"spikefr\n"
# Part of every key: increase it when the same recordings would give different frames.
VERSION = 1
ENVIRONMENT = "SPIKEFUSE_CACHE_DIR"


def cache_directory() -> Path:
    """Return the folder of the cache: $SPIKEFUSE_CACHE_DIR/frames, else in the user's cache."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen).expanduser() / "frames"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "spikefuse" / "frames"


def load_frames(name: str, recordings: RecordingSet, slicing: Slicing) -> Frames:
    """Load the frames of `recordings` from the cache, computing them first if necessary.

    The file's name contains a hash of the name, the slicing, the recordings' files with sizes and
    dates, and a version, so that a change in any of them leads to new frames.

    Args:
        name: name of the dataset and its part, such as "nmnist-train".
        recordings: the recordings.
        slicing: how to cut a recording.

    Raises:
        DataError: a recording is damaged, or the cache cannot be written or is damaged.
    """
    key = _key(name, recordings, slicing)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_directory() / f"{name}-{digest[:16]}.frames"
    if not path.exists():
        try:
            _write(path, key, recordings, slicing)
        except OSError as error:
            raise DataError(
                f"cannot write the frames of {name} to {path.parent} ({error.strerror or error}): "
                f"set {ENVIRONMENT} to a writable folder with enough space"
            ) from error
    return _open(path, key)


def _key(name: str, recordings: RecordingSet, slicing: Slicing) -> dict[str, Any]:
    files = hashlib.sha256()
    for file in recordings.files:
        status = file.stat()
        files.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return {
        "name": name,
        "version": VERSION,
        "slicing": asdict(slicing),
        "shape": list(recordings.size),
        "examples": len(recordings),
        "files": files.hexdigest(),
    }


def _write(path: Path, key: dict[str, Any], recordings: RecordingSet, slicing: Slicing) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(".partial", f"{path.stem}-", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_header(key))
            file.write(recordings.labels.astype("<i8").tobytes())
            for events in _progress(recordings.read(), len(recordings), key["name"]):
                file.write(pack_frames(to_frames(events, slicing), slicing.bits).tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _progress(events: Iterator[Recording], total: int, name: str) -> Iterator[Recording]:
    try:
        from tqdm import tqdm
    except ImportError:
        print(f"{name}: computing the frames of {total} recordings", file=sys.stderr)
        return events
    # disable=None shows the bar on terminals only.
    return iter(tqdm(events, f"{name}: frames", total, unit="rec", disable=None))


def _header(key: dict[str, Any]) -> bytes:
    text = json.dumps(key).encode()
    length = -(-(len(MAGIC) + 8 + len(text)) // 64) * 64  # aligns the labels and frames
    text = text.ljust(length - len(MAGIC) - 8)
    return MAGIC + struct.pack("<Q", len(text)) + text


def _open(path: Path, key: dict[str, Any]) -> Frames:
    """Map a file into memory after checking its header and size."""
    header, num, slicing = _header(key), key["examples"], key["slicing"]
    shape, num_steps, bits = tuple(key["shape"]), slicing["num_steps"], slicing["bits"]
    step_bytes = -(-int(np.prod(shape)) * bits // 8)
    try:
        with path.open("rb") as file:
            found = file.read(len(header))
        size = path.stat().st_size
        expected = len(header) + num * (8 + num_steps * step_bytes)
        if found != header or size != expected:
            raise DataError(f"{path} is damaged: delete it, and it will be recomputed")
        # Copy-on-write, because torch expects writable arrays; nothing writes to this one.
        content = np.memmap(path, np.uint8, "c", len(header))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    labels = content[: 8 * num].view("<i8").astype(np.int64)
    packed = torch.from_numpy(content[8 * num :]).view(num, num_steps, step_bytes)
    return Frames(packed, torch.from_numpy(labels), shape, bits)
