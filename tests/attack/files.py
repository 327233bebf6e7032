"""Damaged data files and checkpoints: read as they were, or refused by an error with their name."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import nir
import torch
from PIL import Image
from torch import nn

import spikefuse as sf
from spikefuse import data, isolated
from spikefuse.data import folder
from spikefuse.train import checkpoint
from spikefuse.train.cli import main
from tests.attack import archives
from tests.data.readers import READERS, limited_memory, mutated

SECONDS = 10
# What has a checksum of its own or of ours: damage must not change what is read.
CHECKED = {"IDX, compressed", "CIFAR-10, archive", "frames"}
MUTATIONS = 20
isolated.SECONDS = 5.0


@functools.cache
def trained() -> bytes:
    """Return a checkpoint of a small run."""
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    options = "--model mlp --neuron lif --epochs 1 -T 1 --batch-size 500 --device cpu --no-fuse"
    assert main(["train", *options.split(), "--out", str(folder)]) == 0
    return (folder / "last.ckpt").read_bytes()


def read_checkpoint(path: Path) -> Any:
    return checkpoint.load(path).weights


@functools.cache
def graph() -> bytes:
    """Return a file of NIR."""
    path = Path(tempfile.mkdtemp(dir=Path.cwd())) / "net.nir"
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(2), sf.LIF(0.9, 0.3), nn.Flatten()]
    net = sf.Temporal(nn.Sequential(*layers, nn.Linear(12, 4), sf.Recurrent(sf.CubaLIF(), 4)))
    nir.write(path, sf.to_nir(net, torch.zeros(1, 1, 2, 4, 4), dt=1e-3))
    return path.read_bytes()


def read_graph(path: Path) -> Any:
    return dict(sf.from_nir(path, dt=1e-3).named_parameters())


def same(a: Any, b: Any) -> bool:
    """Compare nested results, arrays and tensors included."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "shape"):
        return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))
    return bool(vars(a) == vars(b) if hasattr(a, "__dict__") else a == b)


def late(*args: object) -> None:
    raise TimeoutError("took too long")


def attempt(path: Path, read: Callable[[Path], Any]) -> tuple[Any, Exception | None]:
    """Return what is read of a file, or the error."""
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with limited_memory():
            return read(path), None
    except Exception as error:
        return None, error
    finally:
        signal.alarm(0)


def complaints(path: Path, error: Exception | None) -> list[str]:
    """Return an error unless it is one in words about a file of this folder."""
    is_expected = isinstance(error, ValueError | OSError) and not isinstance(error, TimeoutError)
    if error is None or (is_expected and str(path.parent) in str(error)):
        return []
    return [f"{type(error).__name__}: {error}"]


def restructured_checkpoint(rng: random.Random) -> list[str]:
    """Archives of other structure: none is loaded that PyTorch might read otherwise."""
    path = new_folder() / "last.ckpt"
    path.write_bytes(archives.packed(archives.unpacked(trained())))
    expected = read_checkpoint(path)
    for _ in range(MUTATIONS):
        content, refused, is_same = archives.restructured(trained(), rng)
        path.write_bytes(content)
        actual, error = attempt(path, read_checkpoint)
        found = complaints(path, error)
        if error is None and (refused or (is_same and not same(actual, expected))):
            found.append("it is read")
        if error is not None and isinstance(error.__cause__, MemoryError):
            found.append("it allocates what it claims")
        if found:
            return [f"checkpoint, see {path}", *found]
    shutil.rmtree(path.parent)
    return []


def odd_name(rng: random.Random) -> bytes:
    """Return the name of a file of images in other bytes than those of text."""
    names = (
        b"a",
        b"\xff\xfe",
        b"a\nb",
        b"-x",
        "å\u202e".encode(),
        b"n" * 200,
        b" ",
        b"%s",
        b"\x1b[1m",
    )
    ending = rng.choice(sorted(folder.ENDINGS)).encode()
    number = rng.randrange(10**6)
    return rng.choice(names) + b"%d" % number + rng.choice((ending, ending.upper()))


def write_odd(path: bytes, rng: random.Random) -> tuple[int, int, int] | None:
    """Write an image, and return its colour; or something else."""
    kind = rng.choice(
        ("image", "image", "other format", "FIFO", "socket", "folder", "link", "text")
    )
    colour = tuple(rng.randrange(256) for _ in range(3))
    if kind in ("image", "other format"):
        known = "JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF"
        others = "EPS", "TGA", "PCX", "SGI", "ICO", "ICNS"
        size = rng.randint(1, 40), rng.randint(1, 40)
        with open(path, "wb") as file:
            image = Image.new("RGB", size, colour)
            image.save(file, rng.choice(known if kind == "image" else others))
        return colour if kind == "image" and max(size) <= folder.MAX_ASPECT * min(size) else None
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "folder":
        os.mkdir(path)
    elif kind == "link":
        os.symlink(rng.choice((b"nothing", b"/dev/zero", b"/dev/stdin", b".", path)), path)
    else:
        with open(path, "wb") as file:
            file.write(rng.choice((b"", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n", bytes(64))))
    return None


def image_folder(rng: random.Random) -> list[str]:
    """Folders of images, and of what is none: only images are read, and no program is started."""
    path, colours, found = new_folder(), {}, []
    classes = [odd_name(rng) for _ in range(rng.randint(1, 3))]
    for part in (b"train", b"val"):
        for name in classes:
            inner = os.path.join(os.fsencode(path), part, name)
            os.makedirs(inner)
            for _ in range(rng.randint(1, 4)):
                file = os.path.join(inner, odd_name(rng))
                colours[os.fsdecode(file)] = write_odd(file, rng)
    with mock.patch("subprocess.Popen", side_effect=AssertionError("a program is started")):
        sets, error = attempt(path / "train", lambda _: data.load("imagenet", path, size=8))
        found += complaints(path / "train", error)
        for images in sets or ():
            for i, file in enumerate(images.files):
                actual, error = attempt(
                    file, lambda _, i=i, images=images: images[i : i + 1].pixels
                )
                found += complaints(file, error)
                colour = colours[str(file)]
                if (error is None) != (colour is not None):
                    found.append(f"{file} is {'not ' if error else ''}read")
                elif actual is not None:
                    mean = actual.float().mean((0, 2, 3))
                    if (mean - torch.tensor(colour)).abs().max() > 16:
                        found.append(f"{file} has colour {mean}, not {colour}")
    if not found:
        shutil.rmtree(path)
    return [f"folder {path}", *found] if found else []


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=Path.cwd()))


@isolated.one_process()
def case(seed: int) -> list[str]:
    rng = random.Random(seed)
    kind = rng.choice([*READERS, "checkpoint", "structure", "images", "NIR"])
    if kind == "structure":
        return restructured_checkpoint(rng)
    if kind == "images":
        return image_folder(rng)
    if kind == "checkpoint":
        name, good, read = "last.ckpt", trained(), read_checkpoint
    elif kind == "NIR":
        name, good, read = "net.nir", graph(), read_graph
    else:
        name, make, read = READERS[kind]
        good = make()
    path = new_folder() / name
    path.write_bytes(good)
    expected = read(path)
    for number in range(MUTATIONS):
        content = mutated(good, rng)
        path.write_bytes(content)
        actual, error = attempt(path, read)
        found = complaints(path, error)
        if kind in CHECKED and error is None and content != good and not same(actual, expected):
            found.append("other content is read")
        if found:
            return [f"{kind}, mutation {number}", *found]
    shutil.rmtree(path.parent)
    return []
