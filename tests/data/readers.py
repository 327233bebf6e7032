"""Readers of data files, with good content for each, damage to it and a limit of memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import pickle
import random
import resource
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from spikefuse.data import cifar, event_files, heidelberg, listing, store
from spikefuse.data.cifar10_dvs import read_cifar10_dvs
from spikefuse.data.dvs_gesture import LISTS, find_dvs_gesture
from spikefuse.data.folder import read_image
from spikefuse.data.mnist import read_idx
from spikefuse.data.nmnist import read_nmnist
from spikefuse.data.sound import read_wav
from tests.data import writing

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
    return listing._read_table(path, "\t", path.parent / "images", ["n01", "n02"])


def read_labels(path: Path) -> Any:
    return listing._read_table(path, ",", path.parent, None)


def by_faery(ending: str) -> Callable[[], bytes]:
    def make() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"a{ending}"
            writing.write_by_faery(path, COLUMNS, (34, 34))
            return path.read_bytes()

    return make


def arrays() -> bytes:
    file = io.BytesIO()
    np.savez(file, **dict(zip("xypt", COLUMNS, strict=True)))
    return file.getvalue()


def columns() -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as h5:
        for name, values in zip("xypt", COLUMNS, strict=True):
            h5[name] = values
    return file.getvalue()


def read_events(path: Path) -> Any:
    return event_files.read_events(path, "34x34")


def evt21() -> bytes:
    x, y, p, t = COLUMNS
    words = [8 << 60]
    words += (p << 60 | (t & 63) << 54 | x << 43 | y << 32 | 1).tolist()
    return b"% evt 2.1\n% end\n" + np.array(words, "<u8").tobytes()


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
    "annotations": ("val_annotations.txt", annotations, read_annotations),
    "labels": ("labels.csv", lambda: b'file,label\nlabels.csv,"a cat"\n', read_labels),
    "SHD": ("a.h5", speech, read_speech),
    "AEDAT 4": ("a.aedat4", by_faery(".aedat4"), read_events),
    "EVT 2.1": ("a.raw", evt21, read_events),
    "EVT 3": ("a.raw", by_faery(".raw"), read_events),
    "ES": ("a.es", by_faery(".es"), read_events),
    "DAT": ("a.dat", by_faery(".dat"), read_events),
    "CSV": ("a.csv", lambda: b"t,x,y,p\n1,2,3,0\n2,4,5,1\n", read_events),
    "NumPy": ("a.npz", arrays, read_events),
    "HDF5": ("a.h5", columns, read_events),
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
