"""Readers given damaged files: they read them or raise an error that names the file."""

from __future__ import annotations

import contextlib
import gzip
import io
import pickle
import random
import resource
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from spikefuse.data import cifar, files, folder, heidelberg, store
from spikefuse.data.cifar10_dvs import read_cifar10_dvs
from spikefuse.data.dvs_gesture import LISTS, find_dvs_gesture
from spikefuse.data.folder import read_image
from spikefuse.data.mnist import read_idx
from spikefuse.data.nmnist import read_nmnist
from spikefuse.data.sound import read_wav
from tests.data import writing

MUTATIONS = 200
MEMORY = 1 << 29  # that a reader may allocate
INTEGERS = (b"\xff\xff\xff\x7f", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", bytes(4))
COLUMNS = writing.random_columns(40, (34, 34), 0)
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 3072), np.uint8)


def idx() -> bytes:
    return b"\0\0\x08\x03" + np.array([2, 5, 5], ">u4").tobytes() + PIXELS[0, :50].tobytes()


def batch() -> bytes:
    return b"\1" + PIXELS[0].tobytes() + b"\2" + PIXELS[1].tobytes()


def pickled() -> bytes:
    return pickle.dumps({b"labels": [1, 2], b"data": PIXELS}, protocol=3)


def archive() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in cifar.CIFAR10.batches:
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = len(batch())
            tar.addfile(member, io.BytesIO(batch()))
    return file.getvalue()


def gestures() -> bytes:
    x, y, p, t = COLUMNS
    return writing.aedat3_bytes((x, y, p, t + 1_000_000), 10, 1)


def image(form: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS[:1].reshape(32, 32, 3)).save(file, form)
    return file.getvalue()


def speech() -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        for name, dtype in (("times", np.float16), ("units", np.uint16)):
            data_set = h5.create_dataset(f"spikes/{name}", (3,), h5py.vlen_dtype(dtype))
            for i in range(3):
                data_set[i] = np.arange(5, dtype=dtype)
        h5["labels"] = np.arange(3, dtype=np.uint16)
    return file.getvalue()


def frames() -> bytes:
    file = io.BytesIO()
    np.save(file, PIXELS[:, :40].reshape(2, 4, 10))
    return file.getvalue() + zlib.crc32(PIXELS[:, :40].tobytes()).to_bytes(4, "little")


def read_speech(path: Path) -> None:
    list(heidelberg.recordings_in(path, 20).read())


def trials() -> bytes:
    return b"user00_train.aedat\n"


def table() -> bytes:
    return b"class,startTime_usec,endTime_usec\n1,1000000,1200000\n2,1200000,1300001\n"


def read_gestures(path: Path) -> None:
    for name, make in {"user00_train.aedat": gestures, "user00_train_labels.csv": table}.items():
        if name != path.name:
            (path.parent / name).write_bytes(make())
    for name in LISTS:
        if name != path.name:
            (path.parent / name).write_bytes(trials())
    for recordings in find_dvs_gesture(path.parent):
        list(recordings.read())


def read_batches(path: Path) -> Any:
    return cifar._parse(cifar.CIFAR10, "labels", path, path.read_bytes())


def read_archive(path: Path) -> Any:
    return cifar._read_archive(cifar.CIFAR10, path)


def batch100() -> bytes:
    return b"\1\2" + PIXELS[0].tobytes() + b"\2\3" + PIXELS[1].tobytes()


def pickled100() -> bytes:
    labels = {b"fine_labels": [1, 2], b"coarse_labels": [2, 3]}
    return pickle.dumps({**labels, b"data": PIXELS}, protocol=3)


def read_batches100(path: Path) -> Any:
    return cifar._parse(cifar.CIFAR100, "fine_labels", path, path.read_bytes())


def annotations() -> bytes:
    return b"val_0.JPEG\tn01\t0\t32\t44\t62\nval_1.JPEG\tn02\t52\t55\t57\t59\n"


def read_annotations(path: Path) -> Any:
    (path.parent / "images").mkdir(exist_ok=True)
    for i in range(2):
        (path.parent / "images" / f"val_{i}.JPEG").touch()
    return folder._annotated(path.parent, ["n01", "n02"])


READERS: dict[str, tuple[str, Callable[[], bytes], Callable[[Path], Any]]] = {
    "IDX": ("a.idx", idx, read_idx),
    "IDX, compressed": ("a.gz", lambda: gzip.compress(idx()), read_idx),
    "CIFAR-10": ("data_batch_1.bin", batch, read_batches),
    "CIFAR-10, pickled": ("data_batch_1", pickled, read_batches),
    "CIFAR-10, archive": ("a.tar.gz", archive, read_archive),
    "CIFAR-100": ("train.bin", batch100, read_batches100),
    "CIFAR-100, pickled": ("train", pickled100, read_batches100),
    "PNG": ("a.png", lambda: image("png"), lambda path: read_image(path, 16)),
    "JPEG": ("a.jpg", lambda: image("jpeg"), lambda path: read_image(path, 16)),
    "BMP": ("a.bmp", lambda: image("bmp"), lambda path: read_image(path, 16)),
    "WebP": ("a.webp", lambda: image("webp"), lambda path: read_image(path, 16)),
    "PPM": ("a.ppm", lambda: image("ppm"), lambda path: read_image(path, 16)),
    "N-MNIST": ("a.bin", lambda: writing.nmnist_bytes(COLUMNS), read_nmnist),
    "AEDAT 2": (
        "a.aedat",
        lambda: writing.aedat2_bytes(np.arange(20), np.arange(20)),
        read_cifar10_dvs,
    ),
    "AEDAT 3": ("user00_train.aedat", gestures, read_gestures),
    "trials": (LISTS[0], trials, read_gestures),
    "table of gestures": ("user00_train_labels.csv", table, read_gestures),
    "annotations": (folder.ANNOTATIONS, annotations, read_annotations),
    "SHD": ("a.h5", speech, read_speech),
    "WAV": (
        "a.wav",
        lambda: writing.wav_bytes(PIXELS[0, :400]),
        lambda path: read_wav(path).samples,
    ),
    "frames": ("a.npy", frames, lambda path: store._map(path, (2, 4, 10))),
}


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Truncate `content`, or change up to 16 places, half of the time within a header."""
    if rng.random() < 0.15:
        return content[: rng.randrange(len(content))]
    data = bytearray(content)
    limit = rng.choice((64, len(data)))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(min(limit, len(data)))
        change = rng.randrange(5)
        if change == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            data[at] = rng.randrange(256)
        elif change == 2:
            data[at : at + 4] = rng.choice(INTEGERS)
        elif change == 3:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 8)))
        else:
            del data[at : min(at + rng.choice((1, 4, 8)), len(data) - 1)]
    return bytes(data)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let allocations fail that a small file cannot justify."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def _limited_memory() -> Iterator[None]:
    with limited_memory():
        yield


def check(path: Path, content: bytes, read: Callable[[Path], Any]) -> bool:
    """Whether the file is read; otherwise, the error must name it or one that belongs to it."""
    path.write_bytes(content)
    message = ""
    try:
        read(path)
    except (ValueError, OSError) as error:
        message = str(error)
    assert not message or str(path.parent) in message
    return not message


@pytest.mark.usefixtures("_limited_memory")
@pytest.mark.parametrize("kind", READERS)
def test_mutations_are_read_or_named(tmp_path: Path, kind: str) -> None:
    name, make, read = READERS[kind]
    good, rng = make(), random.Random(kind)
    assert check(tmp_path / name, good, read)
    assert not check(tmp_path / name, b"", read)
    for other, (_, make_other, _) in READERS.items():
        if other.partition(",")[0] != kind.partition(",")[0]:  # compressed content is recognized
            check(tmp_path / name, make_other(), read)
    for _ in range(20 if kind == "SHD" else MUTATIONS):  # SHD takes two processes each
        check(tmp_path / name, mutated(good, rng), read)


def many_recordings() -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        for name, dtype in (("times", np.float16), ("units", np.uint16)):
            kind = h5py.vlen_dtype(dtype)
            h5.create_dataset(f"spikes/{name}", (2**31,), kind, chunks=(100,))
        h5.create_dataset("labels", (2**31,), np.uint16, chunks=(100,))
    return file.getvalue()


def narrow_image() -> bytes:
    file = io.BytesIO()
    Image.new("L", (1_000_000, 1)).save(file, "png")
    return file.getvalue()


PACKET = struct.pack("<hhiiiiii", 1, 1, 8, 4, 0, 2**31 - 1, 2**31 - 1, 2**31 - 1)
CLAIMS = {
    "IDX": b"\0\0\x08\x01" + struct.pack(">I", 2**31),
    "CIFAR-10, pickled": b"\x80\x03Nr" + struct.pack("<I", 2**31) + b".",
    "AEDAT 3": b"#!AER-DAT3.1\r\n#!END-HEADER\r\n" + PACKET,
    "PNG": narrow_image(),
    "SHD": many_recordings(),
    "frames": b"\x93NUMPY\x02\0" + struct.pack("<I", 2**32 - 1),
}


@pytest.mark.usefixtures("_limited_memory")
@pytest.mark.parametrize("kind", CLAIMS)
def test_claimed_sizes_are_not_allocated(tmp_path: Path, kind: str) -> None:
    name, _, read = READERS[kind]
    assert not check(tmp_path / name, CLAIMS[kind], read)


def test_decompressed_content_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_DECOMPRESSED", 2 * files.CHUNK)
    assert check(tmp_path / "a.gz", gzip.compress(bytes(2 * files.CHUNK)), files.read_bytes)
    assert not check(tmp_path / "a.gz", gzip.compress(bytes(2 * files.CHUNK + 1)), files.read_bytes)
    large = b"\0\0\x08\x01" + struct.pack(">I", 3 * files.CHUNK) + bytes(3 * files.CHUNK)
    assert check(tmp_path / "a.idx", large, read_idx)  # limited by the size of the file itself
    assert not check(tmp_path / "a.idx", gzip.compress(large), read_idx)


def test_an_idx_file_is_decompressed_up_to_the_size_in_its_header(tmp_path: Path) -> None:
    content = gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 1) + bytes(1 << 26), 1)
    tracemalloc.start()
    assert not check(tmp_path / "a.gz", content, read_idx)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


@pytest.mark.parametrize(
    "dims", [[1] * 255, [0, 2**32 - 1, 2**32 - 1, 2**32 - 1], [2**32 - 1] * 255]
)
def test_an_idx_file_of_absurd_dimensions(tmp_path: Path, dims: list[int]) -> None:
    header = b"\0\0\x08" + struct.pack(f">B{len(dims)}I", len(dims), *dims)
    assert not check(tmp_path / "a.idx", header + b"\1", read_idx)
    assert not check(tmp_path / "a.idx", header, read_idx)


VLEN = h5py.vlen_dtype(np.float32)
HUGE = np.dtype(("f8", (1 << 27,)))


@pytest.mark.usefixtures("_limited_memory")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("labels", h5py.string_dtype()),
        ("labels", [("a", "i4")]),
        ("labels", "S2000000000"),
        ("labels", VLEN),
        ("spikes/times", HUGE),
        ("spikes/units", "S2000000000"),
        ("spikes/times", h5py.vlen_dtype(np.dtype("S2000000000"))),
        ("spikes/units", np.float32),
    ],
)
def test_elements_of_other_types(tmp_path: Path, name: str, dtype: Any) -> None:
    types = {"labels": np.int64, "spikes/times": VLEN, "spikes/units": VLEN}
    for changed in (types, {**types, name: dtype}):
        file = io.BytesIO()
        with h5py.File(file, "w") as h5:
            for key, kind in changed.items():
                h5.create_dataset(key, (3,), kind, chunks=(1,))
        assert check(tmp_path / "a.h5", file.getvalue(), read_speech) == (changed is types)
