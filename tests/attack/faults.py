"""Faults: training that is killed at any time and resumed, and damaged kernels in the cache."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.data.readers import mutated
from tests.train.runs import assert_same_run

OPTIONS = "--neuron lif --epochs 8 -T 2 --batch-size 128 --device cpu"
MODELS = ("mlp", "mlp --encoding poisson --neuron plif")
# SIGTERM before its handler is installed, and after.
KILLED = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
KERNELS = """
import torch, spikefuse as sf
class Own(sf.Neuron):
    v = sf.State()
    def step(self, x, v):
        h = 0.375 * v + x
        return h, (0.5 * h,)
x = torch.arange(24.0).view(4, 6).requires_grad_()
a, b = (torch.autograd.grad(Own()(x, impl=i).square().sum(), x)[0] for i in ("numba", "reference"))
assert torch.equal(a, b), (a, b)
"""


def start(*arguments: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "SPIKEFUSE_CACHE_DIR": str(folder / "cache")}
        if arguments[0] == "-c"
        else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=Path.cwd()))


@functools.cache
def straight(model: str) -> tuple[Path, float]:
    """Return a run that nobody killed, and the seconds that it took."""
    folder, began = new_folder(), time.monotonic()
    process = start("-m", "spikefuse", *train(model), folder=folder)
    output = process.communicate()[0].decode()
    assert process.returncode == 0, output
    return folder / "run", time.monotonic() - began


def train(model: str) -> list[str]:
    return ["train", *OPTIONS.split(), "--model", *model.split(), "--out", "run"]


def killed_run(rng: random.Random) -> list[str]:
    model = rng.choice(MODELS)
    (expected, seconds), folder = straight(model), new_folder()
    kills, last = rng.randint(1, 2), folder / "run" / "last.ckpt"
    for number in range(kills + 1):
        if number and not last.exists():
            shutil.rmtree(folder / "run", ignore_errors=True)
        resume = ["train", "--resume", "run/last.ckpt"]
        process = start(
            "-m", "spikefuse", *(resume if last.exists() else train(model)), folder=folder
        )
        if number < kills:
            # The process spends about half of its time on imports.
            try:
                process.wait(seconds * rng.uniform(0.3, 1.0))
            except subprocess.TimeoutExpired:
                process.send_signal(rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
        output = process.communicate()[0].decode()
        if process.returncode == 0:
            break
        if number == kills or process.returncode not in KILLED:
            return [f"{model}: status {process.returncode}: {output[-500:]}"]
    assert_same_run(expected, folder / "run")
    shutil.rmtree(folder)
    return []


@functools.cache
def kernels() -> Path:
    """Return a folder with cached kernels."""
    folder = new_folder()
    process = start("-c", KERNELS, folder=folder)
    output = process.communicate()[0].decode()
    assert process.returncode == 0, output
    return folder


def damaged_cache(rng: random.Random) -> list[str]:
    folder = new_folder()
    shutil.copytree(kernels(), folder, dirs_exist_ok=True)
    files = sorted(p for p in (folder / "cache").rglob("*") if p.suffix in (".py", ".nbi", ".nbc"))
    for path in rng.sample(files, rng.randint(1, 2)):
        content = path.read_bytes()
        path.write_bytes(b"" if rng.random() < 0.1 else mutated(content, rng))
    for expected in ("any", "none"):  # the first process repairs what the second one reads
        process = start("-c", KERNELS, folder=folder)
        output = process.communicate()[0].decode()
        if process.returncode or (expected == "none" and output):
            return [f"{[p.name for p in files]}: status {process.returncode}: {output[-800:]}"]
    shutil.rmtree(folder)
    return []


def case(seed: int) -> list[str]:
    rng = random.Random(seed)
    return killed_run(rng) if rng.random() < 0.3 else damaged_cache(rng)
