"""Rows of the papers, by their recipes: accuracy, and seconds of training and of the whole command.

    python -m benchmarks.reproduce temporal-fusion-mnist-resnet18 --data-dir DIR
    python -m benchmarks.tables --readme docs/reproduce.md

The papers' figures stand below, as printed; ours come from the results alone. A paper's accuracy
is the highest on the test images of any epoch, ours that of the epoch which the validation images
chose. A row keeps its curve over the epochs too.
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

from benchmarks import plots, record
from spikefuse.train.callbacks import METRICS

CONFIGS = record.ROOT / "configs"
COMMAND = "python -m benchmarks.reproduce RECIPE"
FACTS = (
    *("test_accuracy", "test_loss", "test_images", "best_epoch", "validation_accuracy"),
    *("parameters", "training_seconds", "images_per_second", "data_wait", "device", "versions"),
)
# What is kept of each epoch, besides its seconds.
CURVE = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


@dataclass(frozen=True)
class Row:
    """What a paper prints, and a bar of our own.

    Args:
        accuracy: in per cent, or None for a row that no paper has.
        seconds: of training, all epochs, or None where it gives none.
        within: the most seconds that our whole command may take on a GPU, or None for no such bar.
    """

    accuracy: float | None = None
    seconds: float | None = None
    within: float | None = None


def _fusion(*rows: tuple[str, int, float, float]) -> dict[str, Row]:
    return {
        f"temporal-fusion-{dataset}-resnet{depth}": Row(accuracy, seconds)
        for dataset, depth, accuracy, seconds in rows
    }


# temporal-fusion: Table 1, rows "Ours", on NVIDIA A100. bptt-on-gpu: Table I.
PAPER: dict[str, Row] = {
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
    "bptt-on-gpu-cifar10-small": Row(83.17),
    "bptt-on-gpu-cifar10-medium": Row(88.21),
    "bptt-on-gpu-cifar10-large": Row(90.17),
    "bptt-on-gpu-fashion-mnist-large": Row(within=480.0),
    "bptt-on-gpu-imagenet-alexnet": Row(54.94),
    "bptt-on-gpu-imagenet-resnet34": Row(60.52),
}


def main(argv: list[str] | None = None) -> list[Path]:
    parser = argparse.ArgumentParser("benchmarks.reproduce", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipes", nargs="+", choices=PAPER, metavar="RECIPE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each (0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets")
    parser.add_argument("--out", type=Path, help="folder for the results (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: one epoch of few steps")
    args = parser.parse_args(argv)
    where = ["--device", args.device]
    if not _on_gpu(args.device):
        where += ["--no-cuda-graph"]  # which changes no result
    if args.data_dir is not None:
        where += ["--data-dir", str(args.data_dir.expanduser().resolve())]
    if args.quick:
        where += ["--epochs", "1", "--warmup", "0", "-T", "2"]
    return [measure(recipe, args, where) for recipe in args.recipes]


def _on_gpu(device: str) -> bool:
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def measure(recipe: str, args: argparse.Namespace, where: list[str]) -> Path:
    """Run one recipe with every seed, write its result and draw its curve."""
    settings: dict[str, Any] = {"recipe": recipe, "seeds": args.seeds}
    device = torch.device("cuda" if _on_gpu(args.device) else "cpu")
    result = record.document(f"reproduce_{recipe}", device, args.quick, settings)
    result["rows"] = []
    for seed in args.seeds:
        row, settings["config"] = run(recipe, where, seed)
        result["rows"].append(row)
        print(f"{recipe}, seed {seed}: {100 * row['test_accuracy']:.2f} %", flush=True)
    judged = device.type == "cuda" and not args.quick
    result["bars"] = bars(recipe, result["rows"]) if judged else []
    record.print_bars(result["bars"])
    path = record.write(record.folder(args.out, args.quick), result)
    plots.learning(result, path.with_suffix(".png"))
    return path


def run(recipe: str, where: list[str], seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row, and the configuration but the seed.

    Raises:
        SystemExit: the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="spikefuse-reproduce-") as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "spikefuse", "train"]
        command += ["--config", str(CONFIGS / f"{recipe}.yaml"), *where]
        command += ["--seed", str(seed), "--out", str(out)]
        start = time.perf_counter()
        code = subprocess.run(command, cwd=record.ROOT, check=False).returncode
        seconds = time.perf_counter() - start
        if code:
            raise SystemExit(f"{recipe} with seed {seed} ended with exit code {code}")
        found = json.loads((out / "result.json").read_text())
        epochs = curve(out / METRICS, found["config"]["batch_size"])
    config = {name: value for name, value in found["config"].items() if name != "seed"}
    row = {"seed": seed, "seconds": round(seconds, 2)}
    return row | {name: found[name] for name in FACTS} | {"curve": epochs}, config


def curve(metrics: Path, batch_size: int) -> list[dict[str, Any]]:
    """What the trainer wrote of each epoch; seconds are of its training steps alone."""
    found, steps = [], 0
    with metrics.open(newline="") as file:
        for row in csv.DictReader(file):
            images = (int(row["step"]) - steps) * batch_size
            steps = int(row["step"])
            seconds = images / float(row["images_per_second"])
            values = {name: round(float(row[name]), 6) for name in CURVE}
            found.append({"epoch": int(row["epoch"]), **values, "seconds": round(seconds, 3)})
    return found


def bars(recipe: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The project's own bar, for every seed, where there is one."""
    within = PAPER[recipe].within
    if within is None:
        return []
    return [
        record.bar(f"seed {row['seed']}: seconds", row["seconds"], within, at_least=False)
        for row in rows
    ]


if __name__ == "__main__":
    main()
