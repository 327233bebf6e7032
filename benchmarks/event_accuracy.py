"""Accuracy of training on events and of dense training, on the spikes of SHD.

    python -m benchmarks.event_accuracy --seeds 3

SHD is read from `shd/shd_test_10ms.npz` in the data folder: the 2,264 test recordings in steps of
10 ms, of which every fifth is held out, so accuracies cannot be compared with those of others, who
train on other recordings. Both networks start with the same weights and see the same batches. The
one on events has a capacity, and the trainer's penalty on activity near it. Quick runs use random
spikes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import spikefuse as sf
from benchmarks import record, runner
from benchmarks.event_networks import CLASSES, copy_weights, event_neuron
from spikefuse.data.files import default_directory
from spikefuse.models import event_mlp, mlp, split_widths
from spikefuse.nn import Events, scale_to_rate
from spikefuse.train.activity import ActivityMonitor

INPUTS = 700
ON_EVENTS, DENSE = "events", "dense"
SETTINGS = ("hidden", "epochs", "batch", "capacity", "activity_weight", "rate")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = runner.make_parser("event_accuracy", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (3)")
    parser.add_argument("--hidden", type=int, nargs="+", default=split_widths(3),
                        help="neurons of each layer")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=20, help="(20)")
    parser.add_argument("--batch", type=int, default=48, help="samples of a step (48)")
    parser.add_argument("--capacity", type=float, default=0.3, help="of events (0.3)")
    parser.add_argument("--activity-weight", type=float, default=1.0, help="of the penalty (1)")
    parser.add_argument("--rate", type=float, default=0.01, help="initial activity (0.01)")
    parser.add_argument("--data-dir", type=Path, default=default_directory(), help="data folder")
    args = runner.parse(parser, argv)
    if args.quick:
        args.seeds, args.epochs, args.hidden, args.rate = 1, 1, [64], 0.1
    return args


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    data = random_spikes() if args.quick else spikes(args.data_dir / "shd" / "shd_test_10ms.npz")
    settings = {"data": "shd_test_10ms"} | {name: getattr(args, name) for name in SETTINGS}
    result = record.document("event_accuracy", torch.device(args.device), args.quick, settings)
    result["rows"] = []
    for seed in range(args.seeds):
        for name in (ON_EVENTS, DENSE):
            row = train(name, seed, data, args)
            result["rows"].append(row)
            text = f"{row['best']:.2%} in epoch {row['epochs_to_best']}, {row['seconds']} s"
            print(f"{name}, seed {seed}: {text}", flush=True)
    path = record.write(record.folder(args.out, args.quick), result)
    print(f"wrote {path}")
    return path


def spikes(path: Path) -> tuple[Tensor, Tensor]:
    """Return bits `[N, T, S]` and labels `[N]`."""
    with np.load(path) as file:
        packed = np.packbits(np.unpackbits(file["bits"], axis=2), axis=2, bitorder="little")
        return torch.from_numpy(packed), torch.from_numpy(file["labels"].astype(np.int64))


def random_spikes() -> tuple[Tensor, Tensor]:
    drawn = np.random.default_rng(0).random((60, 20, INPUTS)) < 0.1
    bits = np.packbits(drawn, axis=2, bitorder="little")
    return torch.from_numpy(bits), torch.arange(60) % CLASSES


def train(
    name: str, seed: int, data: tuple[Tensor, Tensor], args: argparse.Namespace
) -> dict[str, Any]:
    """Train one network; accuracies are on held-out recordings after each epoch."""
    device, (bits, labels) = torch.device(args.device), data
    held = torch.arange(len(labels)) % 5 == 0
    training, testing = (~held).nonzero().flatten(), held.nonzero().flatten()

    def events(rows: Tensor) -> Events:
        return Events.from_bits(bits[rows].transpose(0, 1), INPUTS).to(device)

    torch.manual_seed(seed)
    shape = INPUTS, CLASSES, (1, 1), args.hidden
    net = event_mlp(event_neuron, *shape, capacity=args.capacity).to(device)
    scale_to_rate(net, events(training[: args.batch]), args.rate)
    activity = ActivityMonitor(net, args.capacity)
    temporal, trained = sf.Temporal(net), net
    call: Callable[[Events], Tensor] = temporal
    if name == DENSE:
        trained = mlp(event_neuron, *shape, norm=False).to(device)
        copy_weights(net, trained)
        temporal = sf.Temporal(trained)
        call = lambda x: temporal(x.to_dense())  # noqa: E731
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3, fused=True)
    generator, curve, begin = torch.Generator().manual_seed(seed), [], time.perf_counter()
    for _ in range(args.epochs):
        order = training[torch.randperm(len(training), generator=generator)]
        activity.restart()
        for rows in order.split(args.batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(call(events(rows)).mean(0), labels[rows].to(device))
            if name == ON_EVENTS:
                activity.count()
                loss = loss + args.activity_weight * activity.penalty()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = sum(
                int((call(events(rows)).mean(0).argmax(1).cpu() == labels[rows]).sum())
                for rows in testing.split(args.batch)
            )
        curve.append(round(right / len(testing), 4))
    best = max(curve)
    found = {"name": name, "seed": seed, "best": best, "epochs_to_best": curve.index(best) + 1}
    rates = {what: round(rate, 4) for what, rate in activity.row().items()}
    seconds = round(time.perf_counter() - begin, 1)
    return found | {"seconds": seconds, "curve": curve, "last_epoch": rates}


if __name__ == "__main__":
    main()
