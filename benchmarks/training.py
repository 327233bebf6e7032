"""Training as a user sees it: the whole command, its seconds and its accuracy on held-out images.

    python -m benchmarks.training digits                    the command as it is, seeds 0 1 2
    python -m benchmarks.training mnist --data-dir DIR      resnet18, 32 steps, 5 epochs

Seconds are the wall-clock time of the process, from its start to its end: imports, kernels, data,
training, test and pictures included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import record


@dataclass(frozen=True)
class Task:
    """What is trained.

    Args:
        options: of the command, besides seed and folders.
        quick: further options of a trial.
        seeds: one run each.
        seconds: the most that a run may take, or None for no such bar.
        accuracy: the least on the images held out.
    """

    options: tuple[str, ...]
    quick: tuple[str, ...]
    seeds: tuple[int, ...]
    seconds: float | None
    accuracy: float


MNIST = "--dataset mnist --model resnet18 -T 32 --encoding poisson --epochs 5 --batch-size 100"
TASKS = {
    "digits": Task((), ("--epochs", "1"), (0, 1, 2), 120.0, 0.97),
    "mnist": Task((*MNIST.split(), "--shift", "0"), ("--epochs", "1", "-T", "2"), (0,), None, 0.98),
}
FACTS = (
    *("test_accuracy", "test_loss", "test_images", "best_epoch", "validation_accuracy"),
    *("parameters", "training_seconds", "device", "versions"),
)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.training", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("dataset", choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", help="one run each (digits 0 1 2, mnist 0)")
    parser.add_argument("--epochs", type=int, help="another number of epochs; no bars then")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: one seed, one epoch")
    args = parser.parse_args(argv)
    seeds = TASKS[args.dataset].seeds
    args.seeds = list(dict.fromkeys(args.seeds or (seeds[:1] if args.quick else seeds)))
    if min(args.seeds) < 0 or (args.epochs is not None and args.epochs < 1):
        parser.error("--seeds must be at least 0, --epochs at least 1")
    return args


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    task = TASKS[args.dataset]
    options = [*task.options, *(task.quick if args.quick else ())]
    if args.epochs is not None:
        options += ["--epochs", str(args.epochs)]
    cuda = args.device != "cpu" and (args.device == "cuda" or torch.cuda.is_available())
    device = torch.device("cuda" if cuda else "cpu")
    where = [] if args.device == "auto" else ["--device", args.device]
    if args.data_dir is not None:
        where += ["--data-dir", str(args.data_dir.expanduser().resolve())]
    settings: dict[str, Any] = {
        "command": ["spikefuse", "train", *options],
        "device": args.device,
        "seeds": args.seeds,
    }
    result = record.document(f"training_{args.dataset}", device, args.quick, settings)
    result["rows"] = []
    for seed in args.seeds:
        row, config = run([*options, *where], seed)
        settings["config"] = config
        result["rows"].append(row)
        print(
            f"{args.dataset}, seed {seed}: {row['seconds']:.1f} s, accuracy "
            f"{row['test_accuracy']:.4f} on {row['test_images']} images held out",
            flush=True,
        )
    judged = not args.quick and args.epochs is None
    result["bars"] = bars(task, result["rows"]) if judged else []
    for bar in result["bars"]:
        verdict = "met   " if bar["met"] else "MISSED"
        print(f"{verdict} {bar['what']}: {bar['measured']}, bar {bar['bar']}")
    path = record.write(record.folder(args.out, args.quick), result)
    print(f"wrote {path}")
    return path


def run(options: list[str], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row, and the configuration but the seed.

    Raises:
        SystemExit: the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="spikefuse-training-") as folder:
        out = Path(folder) / f"seed-{seed}"
        command = [sys.executable, "-m", "spikefuse", "train", *options]
        command += ["--seed", str(seed), "--out", str(out)]
        start = time.perf_counter()
        code = subprocess.run(command, cwd=record.ROOT, check=False).returncode
        seconds = time.perf_counter() - start
        if code:
            raise SystemExit(f"spikefuse train with seed {seed} ended with exit code {code}")
        found = json.loads((out / "result.json").read_text())
    config = {name: value for name, value in found["config"].items() if name != "seed"}
    row = {"seed": seed, "seconds": round(seconds, 2)}
    return row | {name: found[name] for name in FACTS}, config


def bars(task: Task, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's own bars, each with what was measured, for every seed."""
    found = []
    for row in rows:
        where, accuracy = f"seed {row['seed']}", row["test_accuracy"]
        if task.seconds is not None:
            met = row["seconds"] <= task.seconds
            found.append(_bar(f"{where}: seconds", row["seconds"], task.seconds, met))
        met = accuracy >= task.accuracy
        found.append(_bar(f"{where}: held-out accuracy", accuracy, task.accuracy, met))
    return found


def _bar(what: str, measured: float, bar: float, met: bool) -> dict[str, Any]:
    return {"what": what, "measured": round(measured, 4), "bar": bar, "met": met}


if __name__ == "__main__":
    main()
