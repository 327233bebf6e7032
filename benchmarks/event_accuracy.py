"""Accuracy of training on event lists and of dense training, on the spikes of SHD.

    python -m benchmarks.event_accuracy --hidden 256 256 --epochs 15

SHD is read from `shd/shd_test_10ms.npz` in the data folder: the 2,264 test recordings in steps of
10 ms. Every fifth is held out, so accuracies are not comparable with those of networks trained on
the training set. Both networks start with the same weights and see the same batches. The one on
events has a capacity, and the trainer's penalty on activity near it. Quick runs use random spikes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import spikefuse as sf
from benchmarks import runner
from benchmarks.events import CLASSES, copy_weights, event_neuron
from benchmarks.runner import Record
from spikefuse.data.files import default_directory
from spikefuse.models import event_mlp, mlp, split_widths
from spikefuse.nn import Events, scale_to_rate
from spikefuse.train.activity import ActivityMonitor

INPUTS, BATCH = 700, 48
CAPACITY = 0.3  # of events
ACTIVITY_WEIGHT = 1.0  # of the penalty
INITIAL_RATE = 0.01
ON_EVENTS, DENSE = "events", "dense"


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("event_accuracy", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each network (3)")
    parser.add_argument("--hidden", type=int, nargs="+", default=split_widths(3),
                        help="neurons of each layer")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=20, help="(20)")
    parser.add_argument("--data-dir", type=Path, default=default_directory(), help="data folder")
    args = runner.parse(parser, argv)
    if args.quick:
        args.seeds, args.epochs, args.hidden = 1, 1, [64]
    settings = {"data": "shd_test_10ms", "hidden": args.hidden, "epochs": args.epochs}
    return runner.write_rows(args, rows(args), describe, settings | {"capacity": CAPACITY})


def describe(row: Record) -> str:
    best = f"{row['best']:.2%} in epoch {row['epochs_to_best']}"
    return f"{row['name']}, seed {row['seed']}: {best}"


def rows(args: argparse.Namespace) -> Iterator[Record]:
    data = random_spikes() if args.quick else spikes(args.data_dir / "shd" / "shd_test_10ms.npz")
    for seed in range(args.seeds):
        for name in (ON_EVENTS, DENSE):
            yield train(name, seed, data, args)


def spikes(path: Path) -> tuple[Tensor, Tensor]:
    """Return bits `[N, T, S]` and labels `[N]`."""
    with np.load(path) as file:
        packed = np.packbits(np.unpackbits(file["bits"], axis=2), axis=2, bitorder="little")
        return torch.from_numpy(packed), torch.from_numpy(file["labels"].astype(np.int64))


def random_spikes() -> tuple[Tensor, Tensor]:
    drawn = np.random.default_rng(0).random((60, 20, INPUTS)) < 0.1
    bits = np.packbits(drawn, axis=2, bitorder="little")
    return torch.from_numpy(bits), torch.arange(60) % CLASSES


def train(name: str, seed: int, data: tuple[Tensor, Tensor], args: argparse.Namespace) -> Record:
    """Train one network; accuracies are on held-out recordings after each epoch."""
    device, (bits, labels) = torch.device(args.device), data
    held = torch.arange(len(labels)) % 5 == 0
    training, testing = (~held).nonzero().flatten(), held.nonzero().flatten()

    def events(rows: Tensor) -> Events:
        return Events.from_bits(bits[rows].transpose(0, 1), INPUTS).to(device)

    torch.manual_seed(seed)
    shape = INPUTS, CLASSES, (1, 1), args.hidden
    net = event_mlp(event_neuron, *shape, capacity=CAPACITY).to(device)
    scale_to_rate(net, events(training[:BATCH]), 0.1 if args.quick else INITIAL_RATE)
    activity = ActivityMonitor(net, CAPACITY)
    temporal, trained = sf.Temporal(net), net
    call: Callable[[Events], Tensor] = temporal
    if name == DENSE:
        trained = mlp(event_neuron, *shape, norm=False).to(device)
        copy_weights(net, trained)
        temporal = sf.Temporal(trained)
        call = lambda x: temporal(x.to_dense())  # noqa: E731
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3, fused=True)
    generator, curve = torch.Generator().manual_seed(seed), []
    for _ in range(args.epochs):
        order = training[torch.randperm(len(training), generator=generator)]
        activity.restart()
        for rows in order.split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(call(events(rows)).mean(0), labels[rows].to(device))
            if name == ON_EVENTS:
                activity.count()
                loss = loss + ACTIVITY_WEIGHT * activity.penalty()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            correct = sum(
                int((call(events(rows)).mean(0).argmax(1).cpu() == labels[rows]).sum())
                for rows in testing.split(BATCH)
            )
        curve.append(round(correct / len(testing), 4))
    best = max(curve)
    rates = {what: round(rate, 4) for what, rate in activity.row().items()}
    row = {"name": name, "seed": seed, "best": best, "epochs_to_best": curve.index(best) + 1}
    return row | {"curve": curve, "last_epoch": rates}


if __name__ == "__main__":
    main()
