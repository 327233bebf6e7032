"""Training as users run it, by the command line, and learning with the kernels or the eager loop.

    python -m benchmarks.training digits                    the defaults, seeds 0 1 2
    python -m benchmarks.training mnist --data-dir DIR      resnet18, 32 steps, 5 epochs
    python -m benchmarks.training temporal-fusion-mnist-resnet18 --data-dir DIR
    python -m benchmarks.training convergence --data-dir DIR

digits, mnist and the recipes in `configs/`, which reproduce rows of the papers, run
`spikefuse train`. A paper's accuracy is the highest of any epoch on the test images; ours is of the
epoch chosen by the validation images. Seconds are the wall-clock time of the process, with imports,
kernels, data, training, test and pictures. `--add RESULT` keeps the rows of a result with other
seeds, so that each seed can have a call of its own.

convergence trains the Large network of bptt-on-gpu with the kernels and with the eager loop, from
the same weights, with the same batches and random numbers. Encoding, augmentation, loss and
optimizer are the trainer's, at a constant learning rate, without CUDA graph. Accuracy is on the
trainer's validation images after the last step. Seconds are of all training steps but the first,
which compiles kernels and chooses algorithms.

`python -m benchmarks.tables --page docs/reproduce.md` makes the tables of recipes and convergence.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import plots, record, runner
from benchmarks.layers import LOOP, OURS
from benchmarks.runner import Record, synchronize
from spikefuse import data
from spikefuse.data import Examples
from spikefuse.nn import Temporal
from spikefuse.train import optimize, recipe
from spikefuse.train.batches import EvalBatches, TrainBatches, place
from spikefuse.train.callbacks import METRICS
from spikefuse.train.classifier import Classifier
from spikefuse.train.config import TrainConfig
from spikefuse.train.data_module import VALIDATION_FRACTION, VALIDATION_SEED
from spikefuse.train.seeding import Purpose, reseed

CONFIGS = record.ROOT / "configs"
FACTS = (
    *("test_accuracy", "test_loss", "test_images", "best_epoch", "validation_accuracy"),
    *("parameters", "training_seconds", "device", "versions"),
)
CURVE = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")


def _fusion(*rows: tuple[str, int, float, float]) -> dict[str, tuple[float, float]]:
    return {
        f"temporal-fusion-{dataset}-resnet{depth}": (accuracy, seconds)
        for dataset, depth, accuracy, seconds in rows
    }


# The papers' accuracy in per cent and training seconds; None where they give none.
# temporal-fusion: Table 1, rows "Ours", on NVIDIA A100. bptt-on-gpu: Table I. radlif, se-adlif: the
# networks of 3.9, and of 0.45 and 1.6 million parameters.
PAPERS: dict[str, tuple[float | None, float | None]] = {
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
MNIST = "--dataset mnist --model resnet18 -T 32 --encoding poisson --epochs 5 --batch-size 100"
COMMANDS: dict[str, tuple[str, ...]] = {
    "digits": (),
    "mnist": (*MNIST.split(), "--shift", "0"),
    **{name: ("--config", str(CONFIGS / f"{name}.yaml")) for name in PAPERS},
}

CONVERGENCE, RECIPE = "convergence", "bptt-on-gpu-fashion-mnist-large"
CHANGES = {"epochs": 1, "schedule": "constant", "warmup": 0.0, "cuda_graph": False}  # of the recipe
QUICK = {"dataset": "digits", "model": "conv", "num_steps": 3, "batch_size": 32, "shift": 1}
FIFTHS = 5  # the loss is averaged over each fifth of the steps


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("training", __doc__)
    tasks = (*COMMANDS, CONVERGENCE)
    parser.add_argument("task", choices=tasks, metavar="TASK", help=f"one of {', '.join(tasks)}")
    parser.add_argument("--seeds", type=int, nargs="+",
                        help="one run each (0; convergence 0 1; digits 0 1 2)")  # fmt: skip
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets")
    parser.add_argument("--add", type=Path, help="result of other seeds of the same task")
    args = runner.parse(parser, argv)
    count = 1 if args.quick else {"digits": 3, CONVERGENCE: 2}.get(args.task, 1)
    args.seeds = list(dict.fromkeys(args.seeds or range(count)))
    if args.add is not None and args.task == CONVERGENCE:
        parser.error("--add is for tasks that run the trainer")
    return converge(args) if args.task == CONVERGENCE else run_trainer(args)


# The command line


def run_trainer(args: argparse.Namespace) -> Path:
    device, is_recipe = torch.device(args.device), args.task in PAPERS
    args.name = f"{'reproduce' if is_recipe else 'training'}_{args.task}"
    options = [*COMMANDS[args.task], "--device", device.type]
    if args.quick:
        options += ["--epochs", "1", "--warmup", "0", "-T", "2"]
    if is_recipe and device.type != "cuda":
        options.append("--no-cuda-graph")  # which changes no result
    if args.data_dir is not None:
        options += ["--data-dir", str(args.data_dir.expanduser().resolve())]
    settings: Record = {"command": ["spikefuse", "train", *COMMANDS[args.task]]}
    settings |= {"device": args.device, "seeds": args.seeds}
    if is_recipe:
        settings["recipe"] = args.task

    earlier: list[Record] = []
    if args.add is not None:
        earlier, settings["config"] = earlier_rows(args)
        settings["seeds"] = [row["seed"] for row in earlier] + args.seeds

    def rows() -> Iterator[Record]:
        yield from earlier
        for seed in args.seeds:
            row, config = train(options, seed, is_recipe)
            if settings.setdefault("config", config) != config:
                raise SystemExit(f"{args.add} has another configuration")
            yield row

    def describe(row: Record) -> str:
        accuracy = f"accuracy {row['test_accuracy']:.4f} on {row['test_images']} images"
        return f"{args.task}, seed {row['seed']}: {row['seconds']:.1f} s, {accuracy}"

    plot = plots.learning if is_recipe else None
    return runner.write_rows(args, rows(), describe, settings, plot=plot)


def earlier_rows(args: argparse.Namespace) -> tuple[list[Record], Record]:
    """Return the rows and the configuration of the result `--add`.

    Raises:
        SystemExit: it is of another task or machine, or has one of the seeds.
    """
    result = record.read(args.add)
    machine = record.slug(record.machine(torch.device(args.device)))
    found = (result["benchmark"], record.slug(result["machine"]), result["quick"])
    if found != (args.name, machine, args.quick):
        raise SystemExit(f"{args.add} is not a result of {args.task} on this machine")
    rows: list[Record] = result["rows"]
    repeated = {row["seed"] for row in rows} & set(args.seeds)
    if repeated:
        raise SystemExit(f"{args.add} has results of seeds {sorted(repeated)}")
    return rows, result["settings"]["config"]


def train(options: list[str], seed: int, is_recipe: bool) -> tuple[Record, Record]:
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
            row["curve"] = read_curve(out / METRICS)
    config = {name: value for name, value in found["config"].items() if name != "seed"}
    return row, config


def read_curve(metrics: Path) -> list[Record]:
    """Read the trainer's metrics of each epoch."""
    with metrics.open(newline="") as file:
        return [
            {"epoch": int(row["epoch"])} | {name: round(float(row[name]), 6) for name in CURVE}
            for row in csv.DictReader(file)
        ]


# Convergence


class ReferenceTemporal(Temporal):
    """A `Temporal` that runs the eager loop."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **{**options, "impl": "reference"})


def converge(args: argparse.Namespace) -> Path:
    args.name, device = CONVERGENCE, torch.device(args.device)
    torch.backends.cudnn.benchmark = device.type == "cuda"  # as in the trainer
    values = recipe.read(CONFIGS / f"{RECIPE}.yaml") | CHANGES | (QUICK if args.quick else {})
    config, steps = TrainConfig(**values), 10 if args.quick else 300
    rest, _ = data.load(config.dataset, args.data_dir, **config.transform())
    parts = data.split(rest, VALIDATION_FRACTION, VALIDATION_SEED)
    training, validation = (place(part, device) for part in parts)

    def rows() -> Iterator[Record]:
        for seed in args.seeds:
            for name in (OURS, LOOP):
                module = make_classifier(replace(config, seed=seed), name, device)
                losses, seconds = learn(module, training, steps, device)
                accuracy = evaluate(module, validation, device)
                yield {
                    "dtype": "float32",
                    "seed": seed,
                    "name": name,
                    "parts": [round(mean, 6) for mean in means(losses)],
                    "accuracy": round(accuracy, 6),
                    "seconds": round(seconds, 4),
                }

    settings = {"recipe": RECIPE, "steps": steps, "seeds": args.seeds}
    return runner.write_rows(
        args, rows(), describe_learning, settings | {"config": config.to_dict()}
    )


def describe_learning(row: Record) -> str:
    return (
        f"seed {row['seed']}, {row['name']}: loss {row['parts'][0]:.4f} in the first fifth, "
        f"{row['parts'][-1]:.4f} in the last; accuracy {row['accuracy']:.2%}; "
        f"{row['seconds']:.2f} s"
    )


def make_classifier(config: TrainConfig, name: str, device: torch.device) -> Classifier:
    module = Classifier(config if name == OURS else replace(config, fuse=False))
    if name == LOOP:
        module.net = ReferenceTemporal(module.net.net)
    if config.channels_last or (config.channels_last is None and device.type == "cuda"):
        module.net.to(memory_format=torch.channels_last)
    return module.to(device).train()


def learn(
    module: Classifier, examples: Examples, steps: int, device: torch.device
) -> tuple[list[float], float]:
    """Train as the trainer does; return the loss of each step, and the seconds after the first."""
    config = module.config
    optimizer = optimize.make_optimizer(config, module.net, device)
    losses: list[Tensor] = []
    start = 0.0
    epoch = TrainBatches(examples, config.batch_size, config.seed, lambda: len(losses), device)
    epochs = itertools.chain.from_iterable(itertools.repeat(epoch))
    for inputs, labels in itertools.islice(epochs, steps):
        reseed(config.seed, Purpose.STEP, len(losses))
        optimizer.zero_grad()
        inputs, labels = module.augment(inputs, labels)
        x = module.encode(inputs)
        loss, _ = optimize.gradients(
            module.net, x, labels, config, module.loss, lambda part, _: part.backward()
        )
        optimize.clip(optimizer, config.clip)
        optimizer.step()
        losses.append(loss)
        if len(losses) == 1:
            synchronize(device)
            start = time.perf_counter()
    synchronize(device)
    return torch.stack(losses).tolist(), time.perf_counter() - start


def evaluate(module: Classifier, examples: Examples, device: torch.device) -> float:
    return module.evaluate(EvalBatches(examples, module.config.batch_size, device))[1]


def means(losses: list[float]) -> list[float]:
    """Return the mean loss of each fifth of the steps."""
    stops = [len(losses) * part // FIFTHS for part in range(FIFTHS + 1)]
    return [statistics.fmean(losses[start:stop]) for start, stop in itertools.pairwise(stops)]


if __name__ == "__main__":
    main()
