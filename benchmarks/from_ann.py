"""Accuracy of a trained ReLU network as a spiking network, on CIFAR-10.

    python -m benchmarks.from_ann --model resnet18 --epochs 90 --finetuning 6

The ReLU network ("relu") is trained as in `benchmarks.accuracy`, on the same data; a checkpoint of
that script is read if there is one. `sf.from_ann` converts it by images of the training set for
each of several numbers of time steps ("converted"). With the fewest steps, it also trains on for
some epochs: before the conversion with quantized ReLUs ("QCFS, converted"), or after it with spikes
("converted, trained"). Converted networks are evaluated in float32.

`seconds` are those of the training epochs, or of the conversion. Quick runs use random images.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import runner
from benchmarks.accuracy import (
    PLACES,
    RELU,
    ImageRun,
    Run,
    add_image_options,
    load_images,
    mean_logits,
    parse,
)
from benchmarks.runner import Record, cudnn_search, synchronize
from spikefuse.nn.encode import direct
from spikefuse.train.batches import EvalBatches

CONVERTED, QUANTIZED, TRAINED = "converted", "QCFS, converted", "converted, trained"
QUICK = {"epochs": 1, "batch": 8, "finetuning": 1, "images": 4, "steps": [2]}


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("from_ann", __doc__)
    add_image_options(parser, [RELU])
    parser.set_defaults(model="resnet18")
    add = parser.add_argument
    add("--steps", type=int, nargs="+", default=[4, 8, 16, 32], help="time steps (4 8 16 32)")
    add("--images", type=int, default=1000, help="for thresholds and corrections (1000)")
    add("--finetuning", type=int, default=6, help="epochs of further training (6)")
    add("--finetuning-lr", type=float, default=0.02,
        help="highest learning rate of them; of spikes, a tenth (0.02)")  # fmt: skip
    args = parse(parser, argv, QUICK)
    parts, described = load_images(args)
    settings = {k: v for k, v in runner.settings_of(args).items() if k not in PLACES}
    settings["data"] = described
    with cudnn_search(torch.device(args.device)):
        return runner.write_rows(args, rows(args, parts), settings)


def rows(args: argparse.Namespace, parts: Any) -> Iterator[Record]:
    for seed in args.seeds:
        run = ImageRun(RELU, seed, args, *parts)
        yield from _trained(run)[-1:]
        for steps in args.steps:
            run.net.eval()
            net, seconds = converted(run, run.net, steps)
            yield result(run, CONVERTED, net, steps, seconds)
        fewest, options = min(args.steps), copy.copy(args)
        options.epochs, options.lr, options.checkpoints = args.finetuning, args.finetuning_lr, None
        options.T = fewest
        quantized = FurtherRun(quantize(run, fewest), QUANTIZED, seed, options, *parts)
        seconds = sum(row["seconds"] for row in _trained(quantized))
        net, _ = converted(run, quantized.net.eval(), fewest)
        yield result(run, QUANTIZED, net, fewest, seconds)
        options = copy.copy(options)
        options.lr /= 10  # its norms are folded
        spiking = FurtherRun(converted(run, run.net, fewest)[0], TRAINED, seed, options, *parts)
        seconds = sum(row["seconds"] for row in _trained(spiking))
        yield result(run, TRAINED, spiking.net.eval(), fewest, seconds)


def _trained(run: Run) -> list[Record]:
    """Train a network to the end, and return the rows of its epochs."""
    settings = {"model": run.args.model, "epochs": run.args.epochs}
    run.load(settings)
    while len(run.rows) < run.args.epochs:
        run.rows.append(run.train() | {"accuracy": run.accuracy()})
        run.save(settings)
    return run.rows


class FurtherRun(ImageRun):
    """The further training of a network, a spiking one or one with quantized ReLUs."""

    def __init__(self, network: nn.Module, *given: Any) -> None:
        self.network = network
        super().__init__(*given)

    def make_network(self) -> nn.Module:
        super().make_network()  # which has the normalization of images
        net = self.network
        if isinstance(net, sf.Temporal):
            self.call = lambda images, steps: net(direct(images, steps))
        else:
            self.call = lambda images, steps: net(images).unsqueeze(0)
        return net


def converted(run: ImageRun, net: nn.Module, steps: int) -> tuple[sf.Temporal, float]:
    """Return a spiking network for so many steps, and the seconds that this took."""
    synchronize(run.device)
    start = time.perf_counter()
    result = sf.from_ann(net, calibration(run), steps)
    synchronize(run.device)
    return result, time.perf_counter() - start


def calibration(run: ImageRun) -> list[Tensor]:
    """Images of the training set, in batches."""
    images = run.batches.examples.pixels[: run.args.images]
    return [run.normalized(part) for part in images.split(250)]


def quantize(run: ImageRun, levels: int) -> nn.Module:
    """Return a copy of the network with quantized ReLUs, whose thresholds are those of a conversion
    to as many steps."""
    net, (first, *_) = copy.deepcopy(run.net).train(), calibration(run)
    for layer in sf.from_ann(run.net, first, levels).conversion.layers:
        relu = sf.nn.QCFS(layer.threshold, levels).to(run.device)
        net.set_submodule(layer.name, relu)
    return net


@torch.no_grad()
def result(run: ImageRun, name: str, net: nn.Module, steps: int, seconds: float) -> Record:
    """Evaluate a spiking network."""
    right = 0
    for pixels, labels in EvalBatches(run.testing, run.eval_batch, run.device):
        outputs = net(direct(run.normalized(pixels), steps))
        right += int((mean_logits(outputs).argmax(1) == labels).sum())
    row = {"name": name, "seed": run.seed, "T": steps, "seconds": round(seconds, 3)}
    return row | {"accuracy": right / len(run.testing)}


if __name__ == "__main__":
    main()
