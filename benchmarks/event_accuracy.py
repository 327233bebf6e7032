"""Accuracy, and epochs to the best of it, of training on events and of dense training.

    python -m benchmarks.event_accuracy             several seeds on the spikes of SHD

SHD is read from `shd/shd_test_10ms.npz` in the folder that SPIKEFUSE_DATA names: the 2,264 test
recordings in steps of 10 ms, of which every fifth is held out here, so that accuracies are not
those of others, who train on other recordings. Both networks begin with the same weights and see
the same batches. That on events has a capacity, and the trainer's penalty on activity near it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import record
from benchmarks.event_networks import CLASSES, neuron
from spikefuse.models import event_mlp, mlp, split_widths
from spikefuse.nn import Events, scale_to_rate
from spikefuse.train.activity import Activity

INPUTS = 700
ON_EVENTS, DENSE = "events", "dense"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.event_accuracy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument(
        "--hidden", type=int, nargs="+", default=split_widths(3), help="neurons of each layer"
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training part")
    parser.add_argument("--batch", type=int, default=48, help="samples of a step")
    parser.add_argument("--capacity", type=float, default=0.3, help="of the network on events")
    parser.add_argument(
        "--activity-weight", type=float, default=1.0, help="of its penalty on rates near that"
    )
    parser.add_argument("--rate", type=float, default=0.01, help="of its neurons at the beginning")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for the result (benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a trial: its result is kept apart")
    return parser.parse_args(argv)


def spikes() -> tuple[Tensor, Tensor]:
    """Bits `[N, T, S]`, and labels `[N]`."""
    folder = os.environ.get("SPIKEFUSE_DATA")
    if not folder:
        raise SystemExit("SPIKEFUSE_DATA names no folder: see the first lines of this script")
    with np.load(Path(folder) / "shd" / "shd_test_10ms.npz") as file:
        packed = np.packbits(np.unpackbits(file["bits"], axis=2), axis=2, bitorder="little")
        return torch.from_numpy(packed), torch.from_numpy(file["labels"].astype(np.int64))


def train(
    name: str, seed: int, data: tuple[Tensor, Tensor], args: argparse.Namespace
) -> dict[str, Any]:
    """One run; accuracies are those of the part held out, after each epoch."""
    device, (bits, labels) = torch.device(args.device), data
    held = torch.arange(len(labels)) % 5 == 0
    training, testing = (~held).nonzero().flatten(), held.nonzero().flatten()

    def events(rows: Tensor) -> Events:
        return Events.from_bits(bits[rows].transpose(0, 1), INPUTS).to(device)

    torch.manual_seed(seed)
    shape = INPUTS, CLASSES, (1, 1), args.hidden
    net = event_mlp(neuron, *shape, capacity=args.capacity).to(device)
    scale_to_rate(net, events(training[: args.batch]), args.rate)
    activity = Activity(net, args.capacity)
    call: Callable[[Events], Tensor] = sf.Temporal(net)
    parameters = list(net.parameters())
    if name == DENSE:
        dense = mlp(neuron, *shape, norm=False).to(device)
        linears = [m for m in dense if isinstance(m, nn.Linear)]
        for linear, layer in zip(linears, net, strict=True):
            linear.load_state_dict({"weight": layer.weight.t(), "bias": layer.bias})
        temporal, parameters = sf.Temporal(dense), list(dense.parameters())
        call = lambda x: temporal(x.to_dense())  # noqa: E731
    optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=True)
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
    seconds = round(time.perf_counter() - begin, 1)
    found = {"name": name, "seed": seed, "best": best, "epochs_to_best": curve.index(best) + 1}
    rates = {what: round(rate, 4) for what, rate in activity.row().items()}
    return found | {"seconds": seconds, "curve": curve, "last_epoch": rates}


def main(argv: list[str] | None = None) -> Path:
    args = arguments(argv)
    data = spikes()
    names = ("hidden", "epochs", "batch", "capacity", "activity_weight", "rate")
    settings = {"data": "shd_test_10ms"} | {name: getattr(args, name) for name in names}
    result = record.document("event_accuracy", torch.device(args.device), args.quick, settings)
    result["rows"] = []
    for seed in range(args.seeds):
        for name in (ON_EVENTS, DENSE):
            row = train(name, seed, data, args)
            result["rows"].append(row)
            told = f"{row['best']:.2%} in epoch {row['epochs_to_best']}, {row['seconds']} s"
            print(f"{name}, seed {seed}: {told}", flush=True)
    best = {n: [r["best"] for r in result["rows"] if r["name"] == n] for n in (ON_EVENTS, DENSE)}
    apart = abs(statistics.fmean(best[ON_EVENTS]) - statistics.fmean(best[DENSE]))
    spread = max(max(found) - min(found) for found in best.values())
    what = "difference of the mean best accuracies, against the spread of the seeds"
    result["bars"] = [record.bar(what, apart, spread, at_least=False)]
    record.print_bars(result["bars"])
    path = record.write(record.folder(args.out, args.quick), result)
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
