"""Damaged data files and checkpoints: read as they were, or refused by an error with their name."""

from __future__ import annotations

import functools
import random
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import nir
import torch
from torch import nn

import spikefuse as sf
from spikefuse import hdf5
from spikefuse.train import checkpoint
from spikefuse.train.cli import main
from tests.data.readers import READERS, limited_memory, mutated

SECONDS = 10
# What has a checksum of its own or of ours: damage must not change what is read.
CHECKED = {"IDX, compressed", "CIFAR-10, archive", "frames"}
MUTATIONS = 20
hdf5.SECONDS = 5.0


@functools.cache
def trained() -> bytes:
    """Return a checkpoint of a small run."""
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    options = "--model mlp --neuron lif --epochs 1 -T 1 --batch-size 500 --device cpu"
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


def case(seed: int) -> list[str]:
    rng = random.Random(seed)
    kind = rng.choice([*READERS, "checkpoint", "NIR"])
    if kind == "checkpoint":
        name, good, read = "last.ckpt", trained(), read_checkpoint
    elif kind == "NIR":
        name, good, read = "net.nir", graph(), read_graph
    else:
        name, make, read = READERS[kind]
        good = make()
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    path, found = folder / name, []
    path.write_bytes(good)
    expected = read(path)
    signal.signal(signal.SIGALRM, late)
    for number in range(MUTATIONS):
        content = mutated(good, rng)
        path.write_bytes(content)
        signal.alarm(SECONDS)
        try:
            with limited_memory():
                actual = read(path)
            if kind in CHECKED and content != good and not same(actual, expected):
                found.append("other content is read")
        except (ValueError, OSError) as error:
            if str(folder) not in str(error) or isinstance(error, TimeoutError):
                found.append(f"{type(error).__name__}: {error}")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        finally:
            signal.alarm(0)
        if found:
            return [f"{kind}, mutation {number}", *found]
    shutil.rmtree(folder)
    return []
