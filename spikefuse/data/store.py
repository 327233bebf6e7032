"""The disk cache of frames, which are computed once and memory-mapped.

A file is a NumPy array of packed frames, uint8 `[N, T, S]`, and their CRC-32 in the last four
bytes. Files are written atomically.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

import numpy as np
import torch

from spikefuse.data.files import DataError, replacing, user_cache
from spikefuse.data.frames import Frames, Slicing, pack, to_frames
from spikefuse.data.recordings import Recording, RecordingSet
from spikefuse.data.sound import Sound

CHECKSUM_BYTES = 4
# Part of every key: increase it when the frames of the same recordings change.
VERSION = 6
ENVIRONMENT = "SPIKEFUSE_CACHE_DIR"


def cache_directory() -> Path:
    """Return the folder of the cache: $SPIKEFUSE_CACHE_DIR/frames, else in the user's cache."""
    chosen = os.environ.get(ENVIRONMENT)
    return (Path(chosen).expanduser() if chosen else user_cache()) / "frames"


def load_parts(name: str, parts: Sequence[RecordingSet], slicing: Slicing) -> tuple[Frames, ...]:
    """Load the frames of the recordings for (training, test) or (training, validation, test)."""
    names = ("train", "test") if len(parts) == 2 else ("train", "valid", "test")
    pairs = zip(names, parts, strict=True)
    return tuple(load_frames(f"{name}-{part}", own, slicing) for part, own in pairs)


def load_frames(name: str, recordings: RecordingSet, slicing: Slicing) -> Frames:
    """Load the frames of `recordings` from the cache, computing them first if necessary.

    The file name contains a hash of the name, the slicing, the recordings' files with their
    folders, sizes and dates, and a version: a change in any of them leads to new frames.

    Args:
        name: name of the dataset with its split, such as "nmnist-train".

    Raises:
        DataError: a recording is damaged, or the cache cannot be written or is damaged.
    """
    path = cache_directory() / f"{name}-{_digest(name, recordings, slicing)}.npy"
    step_bytes = -(-int(np.prod(recordings.size)) * slicing.bits // 8)
    shape = (len(recordings), slicing.num_steps, step_bytes)
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary, temporary.open("wb") as file:
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                checksum = 0
                for events in _progress(recordings.read(), len(recordings), name):
                    frames = to_frames(events, slicing).reshape(slicing.num_steps, -1)
                    content = pack(frames, slicing.bits).tobytes()
                    checksum = zlib.crc32(content, checksum)
                    file.write(content)
                file.write(checksum.to_bytes(CHECKSUM_BYTES, "little"))
        except OSError as error:
            raise DataError(
                f"cannot write the frames of {name} to {path.parent} ({error.strerror or error}): "
                f"set {ENVIRONMENT} to a writable folder with enough space"
            ) from error
    packed = torch.from_numpy(_map(path, shape))
    labels = torch.from_numpy(recordings.labels.astype(np.int64))
    return Frames(packed, labels, recordings.size, slicing.bits)


def _digest(name: str, recordings: RecordingSet, slicing: Slicing) -> str:
    key = json.dumps([name, VERSION, asdict(slicing), recordings.size, recordings.labels.tolist()])
    digest = hashlib.sha256(key.encode())
    for file in recordings.files:
        status = file.stat()
        # Whoever replaces a file may restore the date of its content (cp -p, tar), but not ctime.
        dates = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n"
        digest.update(os.fsencode(file.absolute()) + dates.encode())
    return digest.hexdigest()[:16]


def _progress(
    events: Iterator[Recording | Sound], total: int, name: str
) -> Iterator[Recording | Sound]:
    try:
        from tqdm import tqdm
    except ImportError:
        print(f"{name}: computing the frames of {total} recordings", file=sys.stderr)
        return events
    # disable=None shows the bar on terminals only.
    return iter(tqdm(events, f"{name}: frames", total, unit="rec", disable=None))


def mapped(file: IO[bytes]) -> np.ndarray:
    """Map a file into memory, uint8 `[bytes]`, which it may exceed.

    Pages are copied on write, because torch expects writable arrays; nothing writes here.
    """
    if sys.platform != "linux":
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    # Linux would refuse a mapping that may be written and is larger than memory and swap.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)  # without a name in 3.11
    content = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(content, np.uint8)


def _map(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Map a file into memory after checking its header, size and checksum."""
    try:
        with path.open("rb") as file:
            # np.load would allocate as many bytes as a damaged header of another version claims.
            if np.lib.format.read_magic(file) == (1, 0):
                header = np.lib.format.read_array_header_1_0(file)
                size = file.tell() + math.prod(shape) + CHECKSUM_BYTES
                whole = path.stat().st_size == size
                if whole and header == (shape, False, np.dtype(np.uint8)):
                    frames = mapped(file)[file.tell() : -CHECKSUM_BYTES].reshape(shape)
                    file.seek(-CHECKSUM_BYTES, os.SEEK_END)
                    if zlib.crc32(frames.data) == int.from_bytes(file.read(), "little"):
                        return frames
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception:  # the parser of a damaged header may raise anything
        pass
    raise DataError(f"{path} is damaged: delete it, and it will be recomputed")
