"""How fast a network learns with the kernels, against the same with the eager reference loop.

    python -m benchmarks.convergence --data-dir DIR        the Large network of bptt-on-gpu
    python -m benchmarks.tables --readme docs/reproduce.md

Both begin with the same weights and see the same batches with the same random numbers; encoding,
augmentation, loss and optimizer are the trainer's for the recipe, at its learning rate from the
first step to the last, without schedule or CUDA graph. Accuracy is that on the trainer's validation
images after the last step; seconds are of all training steps but the first, which compiles kernels
and chooses algorithms.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import layer, record
from spikefuse import data
from spikefuse.data import DATASETS, Examples
from spikefuse.models import MODELS
from spikefuse.nn import Temporal
from spikefuse.train import optimize, recipe
from spikefuse.train.batches import Batch, EvalBatches, TrainBatches, place
from spikefuse.train.classifier import Classifier
from spikefuse.train.config import ConfigError, TrainConfig
from spikefuse.train.randomness import Purpose, reseed
from spikefuse.train.run import DTYPES, VALIDATION_FRACTION, VALIDATION_SEED

CONFIGS = record.ROOT / "configs"
RECIPE = "bptt-on-gpu-fashion-mnist-large"
COMMAND = "python -m benchmarks.convergence"
OURS, EAGER = layer.OURS, layer.EAGER
PRECISIONS = {"float32": "32", "bfloat16": "bf16"}
# Of another length than the recipe's; and with what both can do.
ALIKE = {"epochs": 1, "schedule": "constant", "warmup": 0.0, "cuda_graph": False}
QUICK = {"dataset": "digits", "model": "conv", "num_steps": 3, "batch_size": 32, "shift": 1}
# The loss is compared as means over so many parts of the steps.
PARTS = 5


class Reference(Temporal):
    """A `Temporal` whose neurons are computed by the eager loop."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **{**options, "impl": "reference"})


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.convergence", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    recipes = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    parser.add_argument("--recipe", choices=recipes, default=RECIPE, metavar="RECIPE")
    parser.add_argument("--dataset", choices=DATASETS, help="another than the recipe's")
    parser.add_argument("--model", choices=MODELS, help="another than the recipe's")
    parser.add_argument("--dtype", nargs="+", choices=PRECISIONS, default=["float32"])
    parser.add_argument("--steps", type=int, help="of the optimizer (300)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="(0 1)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data-dir", type=Path, help="folder of the data sets")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: digits, a small network")
    args = parser.parse_args(argv)
    args.steps = (10 if args.quick else 300) if args.steps is None else args.steps
    args.seeds = list(dict.fromkeys(args.seeds))
    if args.steps < PARTS or min(args.seeds) < 0:
        parser.error(f"--steps must be at least {PARTS}, --seeds at least 0")
    try:
        args.config = configuration(args)
    except ConfigError as error:
        parser.error(str(error))
    return args


def configuration(args: argparse.Namespace) -> TrainConfig:
    """That of the recipe, with what was asked for in its place.

    Raises:
        ConfigError: the recipe's settings do not fit the model or the data set asked for.
    """
    asked = {name: getattr(args, name) for name in ("dataset", "model")}
    settings = recipe.read(CONFIGS / f"{args.recipe}.yaml") | ALIKE
    settings |= QUICK if args.quick else {}
    return TrainConfig(**settings | {name: value for name, value in asked.items() if value})


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = device.type == "cuda"  # as the trainer sets it
    settings = {name: getattr(args, name) for name in ("recipe", "steps", "seeds", "dtype")}
    varying = ("seed", "precision")
    settings["config"] = {k: v for k, v in args.config.to_dict().items() if k not in varying}
    result = record.document("convergence", device, args.quick, settings)
    config = args.config
    rest, _ = data.load(config.dataset, args.data_dir, **config.transform())
    parts = data.split(rest, VALIDATION_FRACTION, VALIDATION_SEED)
    training, validation = (place(part, device) for part in parts)
    result["rows"] = []
    for dtype in args.dtype:
        for seed in args.seeds:
            chosen = replace(config, seed=seed, precision=PRECISIONS[dtype])
            for name in (OURS, EAGER):
                found = learn(chosen, name, args.steps, training, validation, device)
                row = {"dtype": dtype, "seed": seed, "name": name} | found
                result["rows"].append(row)
                print(progress(row), flush=True)
    result["bars"] = [] if args.quick else bars(result["rows"])
    record.print_bars(result["bars"])
    path = record.write(record.folder(args.out, args.quick), result)
    print(f"wrote {path}")
    return path


def learn(
    config: TrainConfig,
    name: str,
    steps: int,
    training: Examples,
    validation: Examples,
    device: torch.device,
) -> dict[str, Any]:
    """Train anew: the loss of each step, the means of its parts, accuracy and seconds."""
    module = Classifier(config if name == OURS else replace(config, fuse=False))
    if name == EAGER:
        module.net = Reference(module.net.net)
    if config.channels_last or (config.channels_last is None and device.type == "cuda"):
        module.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module.to(device).train()
    optimizer = optimize.make_optimizer(config, module.parameters(), device)
    losses: list[Tensor] = []
    for step, batch in enumerate(batches(training, config, steps, device)):
        losses.append(train_step(module, optimizer, step, batch))
        if step == 0:
            _wait(device)
            start = time.perf_counter()
    _wait(device)
    seconds = time.perf_counter() - start
    accuracy = evaluate(module, validation, device)
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
    """One step as the trainer makes it; its loss, a scalar."""
    config, (inputs, labels) = module.config, batch
    reseed(config.seed, Purpose.STEP, step)
    optimizer.zero_grad()
    with _autocast(module, inputs.device):
        x = module.encode(module.augment(inputs))
        loss, _ = optimize.gradients(module.net, x, labels, config, lambda part, _: part.backward())
    optimize.clip(optimizer, config.clip)
    optimizer.step()
    return loss


def batches(
    training: Examples, config: TrainConfig, steps: int, device: torch.device
) -> Iterator[Batch]:
    """The trainer's batches, over as many epochs as the steps need."""
    done = 0
    epoch = TrainBatches(training, config.batch_size, config.seed, lambda: done, device)
    while True:
        for batch in epoch:
            yield batch
            done += 1
            if done == steps:
                return


def evaluate(module: Classifier, validation: Examples, device: torch.device) -> float:
    module.eval()
    module.on_test_epoch_start()
    with torch.no_grad(), _autocast(module, device):
        for index, batch in enumerate(EvalBatches(validation, module.config.batch_size, device)):
            module.test_step(batch, index)
    return module.eval_tally.mean()[1]


def _autocast(module: Classifier, device: torch.device) -> torch.autocast:
    """For one step, or an evaluation: while it lasts, weights are rounded once."""
    precision = module.config.precision
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "32")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def means(losses: list[float]) -> list[float]:
    """The mean of each part of the steps, in order."""
    stops = [len(losses) * part // PARTS for part in range(PARTS + 1)]
    return [statistics.fmean(losses[start:stop]) for start, stop in itertools.pairwise(stops)]


def progress(row: dict[str, Any]) -> str:
    return (
        f"{row['dtype']}, seed {row['seed']}, {row['name']}: loss {row['parts'][0]:.4f} in the "
        f"first fifth, {row['parts'][-1]:.4f} in the last; accuracy {100 * row['accuracy']:.2f} % "
        f"held out; {row['seconds']:.2f} s"
    )


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours may end above the reference by what its own seeds differ by, and no more. One seed
    tells nothing of that."""
    found = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        last = {
            name: [r["parts"][-1] for r in rows if (r["dtype"], r["name"]) == (dtype, name)]
            for name in (OURS, EAGER)
        }
        if len(last[EAGER]) < 2:
            continue
        beyond = statistics.fmean(last[OURS]) - statistics.fmean(last[EAGER])
        spread = round(max(last[EAGER]) - min(last[EAGER]), 6)
        what = f"{dtype}: mean loss of the last fifth, less the reference's"
        found.append(record.bar(what, beyond, spread, at_least=False))
    return found


if __name__ == "__main__":
    main()
