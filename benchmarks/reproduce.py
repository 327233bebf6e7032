"""Train recipes by the command line, as users do; they reproduce the papers.

    python -m benchmarks.reproduce temporal-fusion-mnist-resnet18 --data-dir DIR
    python -m benchmarks.reproduce bptt-on-gpu-fashion-mnist-large --seeds 0 1 --data-dir DIR

A paper's accuracy is the highest of any epoch on the test images; ours is of the epoch chosen by
the validation images. Seconds are the wall-clock time of the process, with imports, kernels, data,
training, test and pictures. Quick runs train a small network on the digits of scikit-learn.

`python -m benchmarks.tables --page docs/reproduce.md` makes the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import plots, record, runner
from benchmarks.runner import Record
from spikefuse.train.callbacks import METRICS

FACTS = (
    *("test_accuracy", "test_loss", "test_images", "best_epoch", "validation_accuracy"),
    *("parameters", "training_seconds", "device", "versions"),
)
CURVE = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")
QUICK = ["--dataset", "digits", "--model", "conv", "--shift", "1", "--epochs", "1", "--warmup", "0",
         "-T", "2"]  # fmt: skip

# The papers' accuracy in per cent and training seconds; None where they give none.
# temporal-fusion: Table 1, rows "Ours", on NVIDIA A100. bptt-on-gpu: Table I. radlif, se-adlif: the
# networks of 3.9, and of 0.45 and 1.6 million parameters.
PAPERS: dict[str, tuple[float | None, float | None]] = {
    "temporal-fusion-mnist-resnet18": (98.29, 65.64),
    "temporal-fusion-mnist-resnet34": (96.53, 81.56),
    "temporal-fusion-mnist-resnet50": (96.10, 144.69),
    "temporal-fusion-cifar10-resnet18": (54.33, 68.11),
    "temporal-fusion-cifar10-resnet34": (33.16, 81.90),
    "temporal-fusion-cifar10-resnet50": (29.48, 131.78),
    "temporal-fusion-nmnist-resnet18": (97.13, 140.04),
    "temporal-fusion-nmnist-resnet34": (11.35, 165.61),
    "temporal-fusion-nmnist-resnet50": (11.01, 224.83),
    "temporal-fusion-dvs-gesture-resnet18": (66.67, 29.40),
    "temporal-fusion-dvs-gesture-resnet34": (56.48, 31.92),
    "temporal-fusion-dvs-gesture-resnet50": (55.09, 38.64),
    "bptt-on-gpu-cifar10-small": (83.17, None),
    "bptt-on-gpu-cifar10-medium": (88.21, None),
    "bptt-on-gpu-cifar10-large": (90.17, None),
    "bptt-on-gpu-fashion-mnist-large": (None, None),
    "bptt-on-gpu-imagenet-alexnet": (54.94, None),
    "bptt-on-gpu-imagenet-resnet34": (60.52, None),
    "radlif-shd": (94.62, None),
    "radlif-ssc": (77.40, None),
    "se-adlif-shd": (95.81, None),
    "se-adlif-ssc": (80.44, None),
    "mnist-ms-resnet18": (None, None),
    "fashion-mnist-ms-resnet18": (None, None),
}


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("reproduce", __doc__)
    parser.add_argument("recipe", choices=PAPERS, metavar="RECIPE",
                        help=f"one of {', '.join(PAPERS)}")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each (0)")
    parser.add_argument("--data-dir", type=Path, help="folder of the datasets")
    args = runner.parse(parser, argv)
    args.usual_name = f"reproduce_{args.recipe}"
    config = ["--config", args.recipe]
    options = [*config, "--device", torch.device(args.device).type, *QUICK * args.quick]
    if torch.device(args.device).type != "cuda":
        options.append("--no-cuda-graph")  # which changes no result
    if args.data_dir is not None:
        options += ["--data-dir", str(args.data_dir.expanduser().resolve())]
    shown = ["spikefuse", "train", "--config", args.recipe]
    settings: Record = {"command": shown, "recipe": args.recipe}
    settings |= {"device": args.device, "seeds": args.seeds}
    return runner.write_rows(args, rows(args, options, settings), settings, plot=plots.learning)


def rows(args: argparse.Namespace, options: list[str], settings: Record) -> Iterator[Record]:
    for seed in args.seeds:
        row, settings["config"] = train(options, seed)
        yield row


def train(options: list[str], seed: int) -> tuple[Record, Record]:
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
        with (out / METRICS).open(newline="") as file:
            curve = [
                {"epoch": int(row["epoch"])} | {name: round(float(row[name]), 6) for name in CURVE}
                for row in csv.DictReader(file)
            ]
    row = {"seed": seed, "seconds": round(seconds, 2)} | {name: found[name] for name in FACTS}
    config = {name: value for name, value in found["config"].items() if name != "seed"}
    return row | {"curve": curve}, config


if __name__ == "__main__":
    main()
