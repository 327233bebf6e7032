"""Accuracy over training time on spoken digits: recurrent, feed-forward, and snnTorch's neurons.

    python -m benchmarks.spoken_digits --seeds 0 1 2
    python -m benchmarks.spoken_digits --hidden 128 128 --epochs 10        minutes on a CPU

The data are `shd/shd_test_10ms.npz` in the data folder: the 2,264 test recordings of the Spiking
Heidelberg Digits, in 99 steps of 10 ms, one bit per unit. A fifth is held out at random, by the
seed, as the file does not name speakers. The same voices are thus trained and tested: accuracies
are not comparable with published ones. Quick runs use random spikes.

All networks are `models.recurrent`, with the same batches and dropout masks, and trained with Adam,
a one-cycle learning rate, and the cross entropy of the mean potential over time:

- spikefuse: `Recurrent` layers of LIF neurons with snnTorch's reset, `DelayedResetLIF`
- the same network without feedback
- snnTorch: the first network, from the same weights, with `RLeaky` and `Leaky` in a loop over time.
  The linear layers and norms read all time steps at once, as in spikefuse. On a GPU there is a
  second row for the loop in a CUDA graph; spikefuse's steps are always recorded there.

There is a row for each epoch. `seconds` are those of its training steps, with compilation and
recording in the first epoch; evaluation is not counted.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import layers, plots, runner
from benchmarks.event_accuracy import CLASSES, INPUTS, random_spikes, spikes
from benchmarks.layers import DTYPES
from benchmarks.runner import GRAPH, Record, synchronize
from spikefuse.data import Frames, split
from spikefuse.data.files import default_directory
from spikefuse.models import recurrent
from spikefuse.train.batches import EvalBatches, TrainBatches
from spikefuse.train.optimize import readout, sequence_loss
from spikefuse.train.seeding import Purpose, reseed

OURS, SNNTORCH = layers.OURS, "snnTorch"
FEED_FORWARD, SNNTORCH_GRAPH = f"{OURS}, feed-forward", f"{SNNTORCH}, {GRAPH}"
NAMES = (OURS, FEED_FORWARD, SNNTORCH, SNNTORCH_GRAPH)
DECAY, SLOPE = 0.9, 25.0  # of the neurons, and of their fast sigmoid: the default of snnTorch
HELD_OUT, EVAL_BATCH = 0.2, 500


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("spoken_digits", __doc__)
    add = parser.add_argument
    add("--names", nargs="+", default=list(NAMES), choices=NAMES, help="networks (all)")
    add("--seeds", type=int, nargs="+", default=[0], help="of weights, order and split (0)")
    add("--hidden", type=int, nargs="+", default=[360, 360], help="neurons of each layer (360 360)")
    add("--epochs", type=int, default=50, help="(50)")
    add("--batch", type=int, default=64, help="(64)")
    add("--lr", type=float, default=5e-3, help="highest learning rate (5e-3)")
    add("--dtype", default="float32", choices=DTYPES, help="of autocast (float32: none)")
    add("--data-dir", type=Path, default=default_directory(), help="data folder")
    args = runner.parse(parser, argv)
    if args.quick:
        vars(args).update(epochs=2, batch=8, hidden=[16, 16])
    places = ("data_dir", "names", "rounds")
    settings = {k: v for k, v in runner.settings_of(args).items() if k not in places}
    settings["data"] = "random spikes" if args.quick else "shd_test_10ms"
    left_out: list[Record] = []
    found = rows(args, left_out)
    return runner.write_rows(args, found, describe, settings, left_out, plots.accuracy)


def describe(row: Record) -> str:
    speed = f"{row['examples_per_s']:,} examples/s"
    what = f"{row['name']}, seed {row['seed']}, epoch {row['epoch']}"
    return f"{what}: {row['accuracy']:.2%}, loss {row['loss']:.3f}, {row['seconds']:.1f} s, {speed}"


def rows(args: argparse.Namespace, left_out: list[Record]) -> Iterator[Record]:
    device = torch.device(args.device)
    path = args.data_dir / "shd" / "shd_test_10ms.npz"
    recordings = Frames(*(random_spikes() if args.quick else spikes(path)), (INPUTS,), bits=1)
    for seed in args.seeds:
        parts = [part[:].to(device) for part in split(recordings, HELD_OUT, seed)]
        for name in args.names:
            try:
                run = Run(name, seed, args, recordings.num_steps, *parts)
            except Exception as error:  # the others are still trained
                left_out.append({"row": name, "reason": runner.first_line(error)})
                print(f"{name}: left out, {left_out[-1]['reason']}", flush=True)
                continue
            for epoch in range(args.epochs):
                yield run.train(epoch)
            del run
            runner.release(device)


def make_network(name: str, hidden: list[int], num_steps: int) -> sf.Temporal:
    """Build the network of a row, whose initial weights depend on the seed alone."""
    surrogate = sf.surrogate.FastSigmoid(SLOPE)
    neuron = partial(sf.DelayedResetLIF, DECAY, surrogate=surrogate)
    feedback = name != FEED_FORWARD
    net = recurrent(neuron, INPUTS, CLASSES, (1, 1), hidden, feedback=feedback)
    if name in (SNNTORCH, SNNTORCH_GRAPH):
        for i, layer in enumerate(net):
            if isinstance(layer, sf.Recurrent | sf.LI):
                net[i] = Loop(layer, num_steps)
    return sf.Temporal(net)


class Loop(nn.Module):
    """A layer of snnTorch's neurons in a loop over time, in place of one of ours.

    Args:
        layer: a `Recurrent` of `DelayedResetLIF`, or an `LI` with `decay_input`.
        num_steps: T.

    Raises:
        ImportError: snnTorch is not installed.
    """

    def __init__(self, layer: sf.Recurrent | sf.LI, num_steps: int) -> None:
        super().__init__()
        snn: Any = importlib.import_module("snntorch")
        surrogate: Any = importlib.import_module("snntorch.surrogate")
        self.num_steps, self.gain = num_steps, 1.0
        if isinstance(layer, sf.LI):
            self.gain = 1 - layer.decay
            self.cell = snn.Leaky(layer.decay, reset_mechanism="none")
        else:
            gradient = surrogate.fast_sigmoid(slope=SLOPE)
            self.cell = snn.RLeaky(DECAY, linear_features=layer.features, spike_grad=gradient)
            self.cell.recurrent = nn.Linear(layer.features, layer.features, bias=False)
            self.cell.recurrent.weight = layer.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.gain * x.unflatten(0, (self.num_steps, -1))
        potential = torch.zeros_like(x[0], dtype=torch.float32)
        outputs, spikes = [], potential
        for current in x.unbind(0):
            if self.gain == 1:
                spikes, potential = self.cell(current, spikes, potential)
                outputs.append(spikes)
            else:
                _, potential = self.cell(current, potential)
                outputs.append(potential)
        return torch.cat(outputs)


class Run:
    """The training of one network, and a step that a CUDA graph can hold."""

    def __init__(
        self, name: str, seed: int, args: argparse.Namespace, num_steps: int, *parts: Frames
    ) -> None:
        device = torch.device(args.device)
        if name == SNNTORCH_GRAPH and device.type != "cuda":
            raise RuntimeError(runner.NO_GRAPHS)
        self.name, self.seed, self.device, self.dtype = name, seed, device, DTYPES[args.dtype]
        training, self.testing = parts
        self.done = 0  # steps of the optimizer
        self.batches = TrainBatches(training, args.batch, seed, lambda: self.done, device)
        reseed(seed, Purpose.WEIGHTS)
        self.net = make_network(name, args.hidden, num_steps).to(device)
        fused = device.type == "cuda"
        self.optimizer = torch.optim.Adam(self.net.parameters(), args.lr, fused=fused)
        steps = args.epochs * len(self.batches)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, args.lr, steps, cycle_momentum=False
        )
        eager = name == SNNTORCH
        self.step: Any = self._step if eager else sf.graph_step(self._step, fallback=True)

    def outputs(self, bits: Tensor) -> Tensor:
        """Return potentials `[T, B, classes]` of spikes `[B, T, units]`."""
        enabled = self.dtype != torch.float32
        with torch.autocast(self.device.type, self.dtype, enabled=enabled):
            return self.net(bits.transpose(0, 1).float())

    def _step(self, bits: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = sequence_loss(self.outputs(bits), labels, "mean")
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self, epoch: int) -> Record:
        """Train for an epoch, and evaluate."""
        reseed(self.seed, Purpose.STEP, epoch)
        self.net.train()
        synchronize(self.device)
        start, total = time.perf_counter(), torch.zeros((), device=self.device)
        for batch in self.batches:
            total += self.step(*batch)
            self.schedule.step()
        synchronize(self.device)
        seconds, num = time.perf_counter() - start, len(self.batches)
        self.done += num
        return {
            **{"name": self.name, "seed": self.seed, "epoch": epoch + 1},
            "loss": round(total.item() / num, 5),
            "seconds": round(seconds, 3),
            "examples_per_s": round(num * self.batches.batch_size / seconds),
            "graph": getattr(self.step, "num_replays", 0) > 0,
            "accuracy": self.accuracy(),
        }

    @torch.no_grad()
    def accuracy(self) -> float:
        self.net.eval()
        batches = EvalBatches(self.testing, EVAL_BATCH, self.device)
        right = [(readout(self.outputs(x), "mean").argmax(1) == y).sum() for x, y in batches]
        return int(torch.stack(right).sum()) / len(self.testing)


if __name__ == "__main__":
    main()
