"""Accuracy over training time on spoken digits: recurrent, adaptive, feed-forward, and snnTorch's.

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
- delays: the network without feedback, with a learned delay of up to 24 steps for each synapse, and
  narrower hidden layers, so that it has as many parameters. The bump of a delay narrows over the
  first quarter of the epochs, and delays learn ten times as fast as weights. Evaluation rounds
  delays to steps.
- SE-adLIF, RadLIF: the same network of adaptive neurons, which learn their decays and couplings,
  with the surrogates and resets of the recipes se-adlif-shd and radlif-shd; RadLIF
  without self-connections. adLIF is RadLIF without feedback.
- C-SiLIF: the network without feedback, of oscillators, which learn all but the threshold from the
  initial values of their source
- snnTorch: the first network, from the same weights, with `RLeaky` and `Leaky` in a loop over time.
  The linear layers and norms read all time steps at once, as in spikefuse. On a GPU there is a
  second row for the loop in a CUDA graph; spikefuse's steps are always recorded there.

There is a row for each epoch. `seconds` are those of its training steps, with compilation and
recording in the first epoch; evaluation is not counted. `spikes` are those per neuron and step, on
the first test examples.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import accuracy, layers, runner
from benchmarks.accuracy import size_of
from benchmarks.layers import DTYPES
from benchmarks.runner import GRAPH
from spikefuse.data import Frames, split
from spikefuse.models import recurrent
from spikefuse.models.blocks import MakeNeuron

OURS, SNNTORCH = layers.OURS, "snnTorch"
FEED_FORWARD, SNNTORCH_GRAPH = f"{OURS}, feed-forward", f"{SNNTORCH}, {GRAPH}"
SE_ADLIF, RADLIF, ADLIF = f"{OURS}, SE-adLIF", f"{OURS}, RadLIF", f"{OURS}, adLIF"
C_SILIF, DELAYS = f"{OURS}, C-SiLIF", f"{OURS}, delays"
NAMES = (OURS, FEED_FORWARD, DELAYS, SE_ADLIF, RADLIF, ADLIF, C_SILIF, SNNTORCH, SNNTORCH_GRAPH)
WITHOUT_FEEDBACK = (FEED_FORWARD, DELAYS, ADLIF, C_SILIF)
DECAY, SLOPE = 0.9, 25.0  # of the neurons, and of their fast sigmoid: the default of snnTorch
MAX_DELAY, DELAY_RATE = 24, 10.0
RECORDINGS = Path("shd", "shd_test_10ms.npz")
HELD_OUT, INPUTS, CLASSES = 0.2, 700, 20
QUICK = {"epochs": 2, "batch": 8, "hidden": [16, 16]}


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("spoken_digits", __doc__)
    accuracy.add_options(parser, NAMES, {"epochs": 50, "batch": 64, "lr": 5e-3, "rise": 0.3})
    add = parser.add_argument
    add("--hidden", type=int, nargs="+", default=[360, 360], help="neurons of each layer (360 360)")
    add("--dtype", default="float32", choices=DTYPES, help="of autocast (float32: none)")
    args = accuracy.parse(parser, argv, QUICK)
    found = random_spikes() if args.quick else spikes(args.data_dir / RECORDINGS)
    recordings = Frames(*found, (INPUTS,), bits=1)
    args.T, args.early = recordings.num_steps, 0

    def load(seed: int) -> list[Frames]:
        device = torch.device(args.device)
        return [part[:].to(device) for part in split(recordings, HELD_OUT, seed)]

    described = "random spikes" if args.quick else "shd_test_10ms"
    return accuracy.train_all(args, DigitsRun, load, described)


def spikes(path: Path) -> tuple[Tensor, Tensor]:
    """Return bits `[N, T, S]` and labels `[N]`."""
    with np.load(path) as file:
        packed = np.packbits(np.unpackbits(file["bits"], axis=2), axis=2, bitorder="little")
        return torch.from_numpy(packed), torch.from_numpy(file["labels"].astype(np.int64))


def random_spikes() -> tuple[Tensor, Tensor]:
    drawn = np.random.default_rng(0).random((60, 20, INPUTS)) < 0.1
    bits = np.packbits(drawn, axis=2, bitorder="little")
    return torch.from_numpy(bits), torch.arange(60) % CLASSES


def make_network(name: str, hidden: list[int], num_steps: int) -> sf.Temporal:
    """Build the network of a row, whose initial weights depend on the seed alone."""
    neuron: MakeNeuron = partial(
        sf.DelayedResetLIF, DECAY, surrogate=sf.surrogate.FastSigmoid(SLOPE)
    )
    if name == SE_ADLIF:
        neuron = partial(sf.SEAdLIF, surrogate=sf.surrogate.FastSigmoid(), detach_reset=True)
    elif name in (RADLIF, ADLIF):
        neuron = partial(sf.AdLIF, surrogate=sf.surrogate.Rectangle())
    options = {"feedback": name not in WITHOUT_FEEDBACK, "self_connections": name != RADLIF}
    build = partial(recurrent, neuron, INPUTS, CLASSES, (1, 1), **options)
    net = build(hidden)
    if name == DELAYS:
        net = with_delays(build, hidden)
    if name == C_SILIF:
        for i, norm in enumerate(net):
            if isinstance(norm, nn.BatchNorm1d):
                net[i + 1] = c_silif(norm.num_features)
    if name in (SNNTORCH, SNNTORCH_GRAPH):
        for i, layer in enumerate(net):
            if isinstance(layer, sf.Recurrent | sf.LI):
                net[i] = Loop(layer, num_steps)
    return sf.Temporal(net)


def c_silif(features: int) -> sf.CSiLIF:
    """Return neurons that learn all but the threshold, as at the start in the authors' code."""
    dt = torch.empty(features).uniform_(math.log(0.01), math.log(0.5)).exp()
    rate, frequency = torch.full((features,), 0.5), torch.full((features,), math.pi)
    positive, free = sf.LearnablePositive, nn.Parameter
    return sf.CSiLIF(positive(dt), positive(rate), free(frequency), free(torch.rand(features)))


def with_delays(build: Callable[[list[int]], nn.Sequential], hidden: list[int]) -> nn.Sequential:
    """Return the widest network with delays that has as many parameters as `build(hidden)`."""
    limit, width = size_of(build(hidden)), [*hidden]
    while True:
        net = build(width)
        for i, layer in enumerate(net):
            if isinstance(layer, nn.Linear):
                sizes = layer.in_features, layer.out_features, MAX_DELAY
                net[i] = sf.DelayedLinear(*sizes, bias=layer.bias is not None)
        if size_of(net) <= limit:
            return net
        width = [n - 1 for n in width]


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


class DigitsRun(accuracy.Run):
    unit, eval_batch = "examples", 500

    def make_network(self) -> nn.Module:
        if self.name == SNNTORCH_GRAPH and self.device.type != "cuda":
            raise RuntimeError(runner.NO_GRAPHS)
        return make_network(self.name, self.args.hidden, self.args.T).to(self.device)

    def make_optimizer(self) -> torch.optim.Optimizer:
        fused = self.device.type == "cuda"
        layers = [m for m in self.net.modules() if isinstance(m, sf.DelayedLinear)]
        delays = [layer.delay for layer in layers]
        others = [p for p in self.net.parameters() if all(p is not d for d in delays)]
        groups = [{"params": others}, {"params": delays, "lr": DELAY_RATE * self.args.lr}]
        return torch.optim.Adam(groups if delays else others, self.args.lr, fused=fused)

    def outputs(self, x: Tensor, steps: int) -> Tensor:
        """Return potentials `[T, B, classes]` of spikes `[B, T, units]`."""
        dtype = DTYPES[self.args.dtype]
        enabled = dtype != torch.float32
        with torch.autocast(self.device.type, dtype, enabled=enabled):
            return self.net(x.transpose(0, 1).float())

    def train(self) -> runner.Record:
        if self.name == SNNTORCH:
            self.step = self._step  # without a graph
        accuracy.narrow_delays(self.net, 4 * len(self.rows) / self.args.epochs)
        return super().train() | {"parameters": size_of(self.net), "spikes": self.rate()}


if __name__ == "__main__":
    main()
