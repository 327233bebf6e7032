"""Accuracy of a trained network with weights and states of few bits, beside that of its floats.

    python -m benchmarks.quantize fashion-mnist-ms-resnet18 --data-dir DIR
    python -m benchmarks.quantize runs/fashion --weights 4

A recipe is trained by the command line; of a run, and of a network that comes with spikefuse, the
checkpoint is read ("float"). `sf.quantize` rounds it ("quantized"), and it trains on for some
epochs, as before but with a small learning rate, since norms are folded into weights ("quantized,
trained"). All are evaluated in float32, on the test images. `seconds` are those of the training,
or of the rounding.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import torch

import spikefuse as sf
from benchmarks import record, runner
from benchmarks.runner import Record, cudnn_search
from spikefuse.train.batches import EvalBatches, encode
from spikefuse.train.checkpoint import BEST, in_folder, load, load_weights
from spikefuse.train.data_module import DataModule
from spikefuse.train.predict import TrainedNetwork
from spikefuse.train.recipe import RECIPES
from spikefuse.train.training_module import LIGHTNING_PRECISION, TrainingModule

FLOAT, QUANTIZED, TRAINED = "float", "quantized", "quantized, trained"


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("quantize", __doc__)
    add = parser.add_argument
    add("network", help=f"one of {', '.join(RECIPES)}; or a run, or a name that sf.load takes")
    add("--weights", type=int, default=8, help="bits (8)")
    add("--states", type=int, default=8, help="bits (8)")
    add("--finetuning", type=int, default=4, help="epochs of further training (4)")
    add("--finetuning-lr", type=float, default=2e-3, help="highest learning rate of them (2e-3)")
    add("--seed", type=int, default=0, help="(0)")
    add("--data-dir", type=Path, help="folder of the datasets")
    args = runner.parse(parser, argv)
    args.finetuning = 1 if args.quick else args.finetuning
    args.usual_name = f"quantize_{Path(args.network).stem}"
    settings = runner.settings_of(args)
    with cudnn_search(torch.device(args.device)):
        return runner.write_rows(args, rows(args), settings)


def rows(args: argparse.Namespace) -> Iterator[Record]:
    device = torch.device(args.device)
    seconds, path = 0.0, Path(args.network)
    with tempfile.TemporaryDirectory(prefix="spikefuse-training-") as folder:
        if args.network in RECIPES:
            path = Path(folder) / "run"
            seconds = train(args, path)
        loaded = load(in_folder(path, BEST))
    network = TrainedNetwork(replace(loaded.config, fuse=False))
    load_weights(network, loaded)
    network.to(device).eval()
    examples = DataModule(network.config, args.data_dir)
    examples.setup()
    yield result(FLOAT, network, examples, device, seconds)
    images = examples.training[: network.config.batch_size].pixels.to(device)
    x = encode(images, network.config)
    assert isinstance(x, torch.Tensor)
    start = time.perf_counter()
    network.net = sf.quantize(network.net, x, args.weights, args.states)
    yield result(QUANTIZED, network, examples, device, time.perf_counter() - start)
    start = time.perf_counter()
    finetune(network, examples, args)
    yield result(TRAINED, network, examples, device, time.perf_counter() - start)


def train(args: argparse.Namespace, out: Path) -> float:
    """Train the recipe in a process, as users do, and return the seconds."""
    kind, start = torch.device(args.device).type, time.perf_counter()
    command = [sys.executable, "-m", "spikefuse", "train", "--config", args.network]
    command += ["--device", kind, "--seed", str(args.seed), "--out", str(out)]
    command += ["--no-cuda-graph"] * (kind != "cuda")
    if args.data_dir is not None:
        command += ["--data-dir", str(args.data_dir.expanduser().resolve())]
    subprocess.run(command, cwd=record.ROOT, check=True)
    return time.perf_counter() - start


def finetune(network: TrainedNetwork, examples: DataModule, args: argparse.Namespace) -> None:
    """Train the quantized network as the original was trained."""
    epochs, lr, device = args.finetuning, args.finetuning_lr, torch.device(args.device)
    config = replace(network.config, epochs=epochs, lr=lr, warmup=None)
    module, examples.config = TrainingModule(config), config
    module.net = sf.fuse(network.net.train())
    trainer = pl.Trainer(
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        precision=LIGHTNING_PRECISION[config.precision],  # type: ignore[arg-type]
        max_epochs=config.epochs,
        limit_train_batches=2 if args.quick else None,
        benchmark=device.type == "cuda",
        inference_mode=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=examples)
    network.to(device).eval()


@torch.no_grad()
def result(
    name: str, network: TrainedNetwork, examples: DataModule, device: torch.device, seconds: float
) -> Record:
    """Evaluate a network."""
    right = 0
    for images, labels in EvalBatches(examples.test, network.config.batch_size, device):
        right += int((network(images).argmax(1) == labels).sum())
    row: Record = {"name": name, "T": network.config.num_steps, "seconds": round(seconds, 2)}
    return row | {"accuracy": right / len(examples.test)}


if __name__ == "__main__":
    main()
