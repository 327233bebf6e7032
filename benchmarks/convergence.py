"""How a network learns with the kernels, against the same with the eager reference loop.

    python -m benchmarks.convergence --data-dir DIR        the Large network of bptt-on-gpu
    python -m benchmarks.tables --page docs/reproduce.md

Both start with the same weights and see the same batches with the same random numbers. Encoding,
augmentation, loss and optimizer are the trainer's for the recipe, at a constant learning rate,
without CUDA graph. Accuracy is on the trainer's validation images after the last step. Seconds are
of all training steps but the first, which compiles kernels and chooses algorithms.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import record, runner
from benchmarks.layers import LOOP, OURS
from benchmarks.training import CONFIGS
from spikefuse import data
from spikefuse.data import DATASETS, Examples
from spikefuse.models import MODELS
from spikefuse.nn import Temporal
from spikefuse.train import optimize, recipe
from spikefuse.train.batches import Batch, EvalBatches, TrainBatches, place
from spikefuse.train.classifier import DTYPES, Classifier
from spikefuse.train.config import ConfigError, TrainConfig
from spikefuse.train.run import VALIDATION_FRACTION, VALIDATION_SEED
from spikefuse.train.seeding import Purpose, reseed

RECIPE = "bptt-on-gpu-fashion-mnist-large"
COMMAND = "python -m benchmarks.convergence"
PRECISIONS = {"float32": "32", "bfloat16": "bf16"}
# Settings that differ from the recipe's, for both.
CHANGES = {"epochs": 1, "schedule": "constant", "warmup": 0.0, "cuda_graph": False}
QUICK = {"dataset": "digits", "model": "conv", "num_steps": 3, "batch_size": 32, "shift": 1}
PARTS = 5  # the loss is averaged over each fifth of the steps


class ReferenceTemporal(Temporal):
    """A `Temporal` that runs the eager loop."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **{**options, "impl": "reference"})


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = runner.make_parser("convergence", __doc__)
    recipes = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    parser.add_argument("--recipe", choices=recipes, default=RECIPE, metavar="RECIPE",
                        help=f"of configs/ ({RECIPE})")  # fmt: skip
    parser.add_argument("--dataset", choices=DATASETS, help="another than the recipe's")
    parser.add_argument("--model", choices=MODELS, help="another than the recipe's")
    parser.add_argument("--dtype", nargs="+", choices=PRECISIONS, default=["float32"])
    parser.add_argument("--steps", type=int, help="of the optimizer (300)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="(0 1)")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets")
    args = runner.parse(parser, argv)
    args.steps = args.steps or (10 if args.quick else 300)
    if args.steps < PARTS:
        parser.error(f"--steps must be at least {PARTS}")
    asked = {"dataset": args.dataset, "model": args.model}
    values = recipe.read(CONFIGS / f"{args.recipe}.yaml") | CHANGES
    values |= QUICK if args.quick else {}
    values |= {name: value for name, value in asked.items() if value}
    try:
        args.config = TrainConfig(**values)
    except ConfigError as error:
        parser.error(str(error))
    return args


@dataclass(frozen=True)
class Sets:
    """The examples for training and for validation, on their device."""

    training: Examples
    validation: Examples
    device: torch.device


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    config, device = args.config, torch.device(args.device)
    torch.backends.cudnn.benchmark = device.type == "cuda"  # as in the trainer
    settings = {name: getattr(args, name) for name in ("recipe", "steps", "seeds", "dtype")}
    varying = ("seed", "precision")
    settings["config"] = {k: v for k, v in config.to_dict().items() if k not in varying}
    result = record.document("convergence", device, args.quick, settings) | {"rows": []}
    rest, _ = data.load(config.dataset, args.data_dir, **config.transform())
    parts = data.split(rest, VALIDATION_FRACTION, VALIDATION_SEED)
    sets = Sets(*(place(part, device) for part in parts), device)
    for dtype in args.dtype:
        for seed in args.seeds:
            chosen = replace(config, seed=seed, precision=PRECISIONS[dtype])
            for name in (OURS, LOOP):
                row = {"dtype": dtype, "seed": seed, "name": name}
                row |= learn(chosen, name, args.steps, sets)
                result["rows"].append(row)
                print(
                    f"{dtype}, seed {seed}, {name}: loss {row['parts'][0]:.4f} in the first fifth, "
                    f"{row['parts'][-1]:.4f} in the last; accuracy {row['accuracy']:.2%}; "
                    f"{row['seconds']:.2f} s",
                    flush=True,
                )
    path = record.write(record.folder(args.out, args.quick), result)
    print(f"wrote {path}")
    return path


def learn(config: TrainConfig, name: str, steps: int, sets: Sets) -> dict[str, Any]:
    """Train a new network; return its losses, accuracy and seconds."""
    device = sets.device
    module = Classifier(config if name == OURS else replace(config, fuse=False))
    if name == LOOP:
        module.net = ReferenceTemporal(module.net.net)
    if config.channels_last or (config.channels_last is None and device.type == "cuda"):
        module.net.to(memory_format=torch.channels_last)
    module.to(device).train()
    optimizer = optimize.make_optimizer(config, module.parameters(), device)
    losses: list[Tensor] = []
    for step, batch in enumerate(batches(sets, config, steps)):
        losses.append(train_step(module, optimizer, step, batch))
        if step == 0:
            _wait(device)
            start = time.perf_counter()
    _wait(device)
    seconds = time.perf_counter() - start
    accuracy = evaluate(module, sets)
    values = torch.stack(losses).tolist()
    return {
        "losses": [round(value, 6) for value in values],
        "parts": [round(mean, 6) for mean in means(values)],
        "accuracy": round(accuracy, 6),
        "seconds": round(seconds, 4),
    }


def train_step(
    module: Classifier, optimizer: torch.optim.Optimizer, step: int, batch: Batch
) -> Tensor:
    """Run a step as the trainer does; return its loss."""
    config, (inputs, labels) = module.config, batch
    reseed(config.seed, Purpose.STEP, step)
    optimizer.zero_grad()
    with _autocast(module, inputs.device):
        x = module.encode(module.augment(inputs))
        loss, _ = optimize.gradients(module.net, x, labels, config, lambda part, _: part.backward())
    optimize.clip(optimizer, config.clip)
    optimizer.step()
    return loss


def batches(sets: Sets, config: TrainConfig, steps: int) -> Iterator[Batch]:
    """Yield the trainer's batches, over as many epochs as the steps need."""
    done = 0
    epoch = TrainBatches(sets.training, config.batch_size, config.seed, lambda: done, sets.device)
    while True:
        for batch in epoch:
            yield batch
            done += 1
            if done == steps:
                return


def evaluate(module: Classifier, sets: Sets) -> float:
    return module.evaluate(EvalBatches(sets.validation, module.config.batch_size, sets.device))[1]


def _autocast(module: Classifier, device: torch.device) -> torch.autocast:
    precision = module.config.precision
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "32")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def means(losses: list[float]) -> list[float]:
    """Return the mean loss of each part of the steps."""
    stops = [len(losses) * part // PARTS for part in range(PARTS + 1)]
    return [statistics.fmean(losses[start:stop]) for start, stop in itertools.pairwise(stops)]


if __name__ == "__main__":
    main()
