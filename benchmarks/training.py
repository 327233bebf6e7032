"""Training by the command line, as users run it: seconds of the process, and accuracy.

    python -m benchmarks.training digits                    the defaults, seeds 0 1 2
    python -m benchmarks.training mnist --data-dir DIR      resnet18, 32 steps, 5 epochs
    python -m benchmarks.training temporal-fusion-mnist-resnet18 --data-dir DIR

The last is one of the recipes in `configs/`, which reproduce rows of the papers. A paper's accuracy
is the highest on the test images of any epoch; ours is that of the epoch chosen by the validation
images. `python -m benchmarks.tables --page docs/reproduce.md` makes the table of recipes.

Seconds are the wall-clock time of the process, with imports, kernels, data, training, test and
pictures.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import plots, record, runner
from spikefuse.train.callbacks import METRICS

CONFIGS = record.ROOT / "configs"
COMMAND = "python -m benchmarks.training RECIPE"
FACTS = (
    *("test_accuracy", "test_loss", "test_images", "best_epoch", "validation_accuracy"),
    *("parameters", "training_seconds", "device", "versions"),
)
RECIPE_FACTS = ("images_per_second", "data_wait")
CURVE = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


@dataclass(frozen=True)
class PaperRow:
    """A paper's accuracy in per cent and training seconds; None where it gives none."""

    accuracy: float | None = None
    seconds: float | None = None


def _fusion(*rows: tuple[str, int, float, float]) -> dict[str, PaperRow]:
    return {
        f"temporal-fusion-{dataset}-resnet{depth}": PaperRow(accuracy, seconds)
        for dataset, depth, accuracy, seconds in rows
    }


# temporal-fusion: Table 1, rows "Ours", on NVIDIA A100. bptt-on-gpu: Table I.
PAPERS: dict[str, PaperRow] = {
    **_fusion(
        ("mnist", 18, 98.29, 65.64),
        ("mnist", 34, 96.53, 81.56),
        ("mnist", 50, 96.10, 144.69),
        ("cifar10", 18, 54.33, 68.11),
        ("cifar10", 34, 33.16, 81.90),
        ("cifar10", 50, 29.48, 131.78),
        ("nmnist", 18, 97.13, 140.04),
        ("nmnist", 34, 11.35, 165.61),
        ("nmnist", 50, 11.01, 224.83),
        ("dvs-gesture", 18, 66.67, 29.40),
        ("dvs-gesture", 34, 56.48, 31.92),
        ("dvs-gesture", 50, 55.09, 38.64),
    ),
    "bptt-on-gpu-cifar10-small": PaperRow(83.17),
    "bptt-on-gpu-cifar10-medium": PaperRow(88.21),
    "bptt-on-gpu-cifar10-large": PaperRow(90.17),
    "bptt-on-gpu-fashion-mnist-large": PaperRow(),
    "bptt-on-gpu-imagenet-alexnet": PaperRow(54.94),
    "bptt-on-gpu-imagenet-resnet34": PaperRow(60.52),
}
MNIST = "--dataset mnist --model resnet18 -T 32 --encoding poisson --epochs 5 --batch-size 100"
COMMANDS: dict[str, tuple[str, ...]] = {
    "digits": (),
    "mnist": (*MNIST.split(), "--shift", "0"),
    **{recipe: ("--config", str(CONFIGS / f"{recipe}.yaml")) for recipe in PAPERS},
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = runner.make_parser("training", __doc__)
    parser.add_argument("task", choices=COMMANDS, metavar="TASK",
                        help=f"one of {', '.join(COMMANDS)}")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", help="one run each (0; digits 0 1 2)")
    parser.add_argument("--epochs", type=int, help="another number of epochs")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets")
    args = runner.parse(parser, argv)
    usual = [0, 1, 2] if args.task == "digits" and not args.quick else [0]
    args.seeds = list(dict.fromkeys(args.seeds or usual))
    return args


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device, is_recipe = torch.device(args.device), args.task in PAPERS
    options = [*COMMANDS[args.task]]
    if args.quick:
        options += ["--epochs", "1", "--warmup", "0", "-T", "2"]
    if args.epochs is not None:
        options += ["--epochs", str(args.epochs)]
    where = ["--device", device.type]
    if is_recipe and device.type != "cuda":
        where.append("--no-cuda-graph")  # which changes no result
    if args.data_dir is not None:
        where += ["--data-dir", str(args.data_dir.expanduser().resolve())]
    settings: dict[str, Any] = {"command": ["spikefuse", "train", *COMMANDS[args.task]]}
    settings |= {"device": args.device, "seeds": args.seeds}
    if is_recipe:
        settings["recipe"] = args.task
    name = f"reproduce_{args.task}" if is_recipe else f"training_{args.task}"
    result = record.document(name, device, args.quick, settings) | {"rows": []}
    for seed in args.seeds:
        row, settings["config"] = run([*options, *where], seed, is_recipe)
        result["rows"].append(row)
        print(f"{args.task}, seed {seed}: {row['seconds']:.1f} s, accuracy "
              f"{row['test_accuracy']:.4f} on {row['test_images']} images", flush=True)  # fmt: skip
    path = record.write(record.folder(args.out, args.quick), result)
    if is_recipe:
        plots.learning(result, path.with_suffix(".png"))
    print(f"wrote {path}")
    return path


def run(options: list[str], seed: int, is_recipe: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train in a process; return its row, and its configuration without the seed.

    Raises:
        SystemExit: the process failed.
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
        row = {"seed": seed, "seconds": round(seconds, 2)} | {name: found[name] for name in FACTS}
        if is_recipe:
            row |= {name: found[name] for name in RECIPE_FACTS}
            row["curve"] = curve(out / METRICS, found["config"]["batch_size"])
    config = {name: value for name, value in found["config"].items() if name != "seed"}
    return row, config


def curve(metrics: Path, batch_size: int) -> list[dict[str, Any]]:
    """Read the trainer's metrics of each epoch; seconds are of its training steps alone."""
    found, steps = [], 0
    with metrics.open(newline="") as file:
        for row in csv.DictReader(file):
            images = (int(row["step"]) - steps) * batch_size
            steps = int(row["step"])
            seconds = images / float(row["images_per_second"])
            values = {name: round(float(row[name]), 6) for name in CURVE}
            found.append({"epoch": int(row["epoch"]), **values, "seconds": round(seconds, 3)})
    return found


if __name__ == "__main__":
    main()
