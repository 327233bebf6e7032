"""Faults: trainings that are killed or diverge, damaged kernels in the cache, and forks."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from spikefuse.train.cli import main
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


# Each definition has another number of operations, so that it is compiled.
FORKS = """
import os, random, sys, threading, time, warnings
import torch, spikefuse as sf

rng = random.Random({seed})
warnings.simplefilter("ignore")

class Own(sf.Neuron):
    v = sf.State()
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
    def step(self, x, v):
        h = v
        for _ in range(self.factor):
            h = 0.5 * h + x
        return h, (0.25 * h,)

def compute(factor, done=None):
    neuron, x = Own(factor), torch.arange(24.0).view(4, 6).requires_grad_()
    results = []
    for impl in ("numba", "reference"):
        y = neuron(x, impl=impl)
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
    for a, b in zip(*results):
        assert torch.allclose(a, b), (a, b)
    if done is not None:
        done.append(factor)

if rng.random() < 0.5:
    compute(1)
if rng.random() < 0.5:
    threading.stack_size(rng.choice((1 << 16, 1 << 17, 1 << 20)))
done, factors = [], range(2, 2 + rng.randint(1, 2))
threads = [threading.Thread(target=compute, args=(f, done)) for f in factors]
for thread in threads:
    thread.start()
children = []
for i in range(rng.randint(1, 3)):
    time.sleep(rng.uniform(0, 1.5))
    child = os.fork()
    if not child:
        status = 1
        try:
            compute(rng.choice((2, 3, 10 + i)))
            status = 0
        finally:
            os._exit(status)
    children.append(child)
for thread in threads:
    thread.join()
statuses = [os.waitpid(child, 0)[1] for child in children]
assert not any(statuses) and len(done) == len(factors), (statuses, done)
"""
NUMBERS = ("0", "-1", "nan", "inf", "-inf", "1e39", "1e-50", "1e37", "1e-37", "3.5", "1e20", "")
OPTIONAL = ("threshold", "decay", "lr", "weight-decay", "clip", "label-smoothing")


def start(*arguments: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "SPIKEFUSE_CACHE_DIR": str(folder / "cache")}
        if arguments[0] == "-c"
        else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
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


def forked(rng: random.Random) -> list[str]:
    """Processes that fork while threads compile, with stacks of any size."""
    folder, code = new_folder(), FORKS.format(seed=rng.randrange(10**9))
    process = start("-c", code, folder=folder)
    try:
        output = process.communicate(timeout=120)[0].decode()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return [f"fork in {folder}: no end"]
    if process.returncode:
        return [f"fork: status {process.returncode}: {output[-800:]}"]
    shutil.rmtree(folder)
    return []


def odd_run(rng: random.Random) -> list[str]:
    """Runs with numbers at and beyond the limits: refused in a line, stopped, or finite."""
    folder = new_folder()
    options = ["--no-fuse", "--epochs=1", "-T1", "--batch-size=400", "--device=cpu", "--model=mlp"]
    for name in rng.sample(OPTIONAL, rng.randint(1, 2)):
        value = rng.choice(NUMBERS) if rng.random() < 0.6 else str(10 ** rng.uniform(-40, 40))
        options.append(f"--{name}={value}")
    options.append(f"--neuron={rng.choice(('lif', 'plif', 'if', 'alif'))}")
    errors, result = io.StringIO(), folder / "run" / "result.json"
    with contextlib.redirect_stderr(errors):
        try:
            code = main(["train", *options, "--out", str(folder / "run")])
        except SystemExit as stop:
            code = stop.code
    lines = errors.getvalue().splitlines()
    found = [f"status {code}, {options}: {lines[-3:]}"]
    if code == 0:
        metrics = json.loads(result.read_text(), parse_constant=float)
        numbers = [v for v in metrics.values() if isinstance(v, float)]
        found = [] if all(map(math.isfinite, numbers)) else [f"{options}: {metrics}"]
    elif code in (1, 2) and not result.exists():
        about = "is not finite" if code == 1 else "--"
        found = [] if lines and about in lines[-1] else found
    shutil.rmtree(folder)
    return found


def case(seed: int) -> list[str]:
    rng = random.Random(seed)
    attacks = (killed_run, damaged_cache, forked, odd_run)
    return rng.choices(attacks, (0.2, 0.4, 0.2, 0.2))[0](rng)
