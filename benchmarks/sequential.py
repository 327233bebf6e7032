"""Accuracy over training time on sequential and permuted sequential MNIST, pixel by pixel.

    python -m benchmarks.sequential --seeds 0 1 2
    python -m benchmarks.sequential --order sequential --names "masked PSN" --epochs 10

A network reads the 784 pixels of an image one at a time, through one input, in the order of the
rows (`sequential`) or in one random permutation that is the same for all images, networks and seeds
(`permuted`: `torch.randperm` with seed 0). It is trained on the 60,000 images of MNIST without
augmentation and tested on the 10,000 others. Each hidden layer is linear without bias, batch norm,
neurons and dropout. The readout is linear, and its mean over time gives the class. All networks are
causal: a step sees itself and earlier steps only.

- masked PSN: parallel neurons without a reset, with a learned weight for each pair of steps (Fang
  et al., "Parallel Spiking Neurons with High Efficiency and Ability to Learn Long-term
  Dependencies", NeurIPS 2023). Weights that belong to steps are as many for each permutation: they
  make the permuted task no harder than the sequential one.
- delays: LIF neurons whose synapses have learned delays (Hammouamri et al., "Learning Delays in
  Spiking Neural Networks using Dilated Convolutions with Learnable Spacings", ICLR 2024). The bump
  of a delay narrows over the first half of the epochs, and delays learn ten times as fast as
  weights. Evaluation rounds delays to steps.
- C-SiLIF: oscillators with learned time steps, frequencies, decays and gains (Fabre et al., "SiLIF:
  Structured State Space Model Dynamics and Parametrization for Spiking Neural Networks", 2025).
- SE-adLIF: recurrent adaptive neurons (Baronig et al., "Advancing spatio-temporal processing
  through adaptation in spiking neural networks", Nature Communications 2025), as in the recipe
  se-adlif-shd.

Training uses AdamW, a one-cycle learning rate, the cross entropy of the mean over time and on a GPU
bfloat16, where each step is recorded as a CUDA graph if it can be. There is a row for each epoch.
`seconds` are those of its training steps, with compilation and recording in the first epoch;
evaluation is not counted. `spikes` are those per neuron and step, on the first test images. Quick
runs use random images.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import accuracy, runner
from spikefuse.data import Images
from spikefuse.data.mnist import load_mnist
from spikefuse.models import recurrent

PSN, DELAYS, C_SILIF, SE_ADLIF = NAMES = ("masked PSN", "delays", "C-SiLIF", "SE-adLIF")
WIDTHS = {PSN: [64, 64, 64], DELAYS: [128, 128, 128], C_SILIF: [256] * 4, SE_ADLIF: [256, 256]}
MAX_DELAY, LAST_SIGMA, DELAY_RATE = 48, 0.5, 10.0
DECAY, CLASSES, PERMUTATION_SEED = 0.9, 10, 0
QUICK = {"epochs": 2, "batch": 8, "hidden": [8, 8]}


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("sequential", __doc__)
    accuracy.add_options(parser, NAMES, {"epochs": 30, "batch": 256, "lr": 4e-3, "rise": 0.2})
    add = parser.add_argument
    add("--order", default="permuted", choices=("permuted", "sequential"), help="(permuted)")
    add("--hidden", type=int, nargs="+", help="neurons of each hidden layer (by network)")
    add("--dropout", type=float, default=0.1, help="of the spikes of hidden layers (0.1)")
    add("--weight-decay", type=float, default=0.01, help="of weights, not of others (0.01)")
    args = accuracy.parse(parser, argv, QUICK)
    parts, described = load(args.data_dir, args.quick)
    args.T, args.early = parts[0].pixels[0].numel(), 0
    device = torch.device(args.device)
    sequences = [ordered(part, args.order).to(device) for part in parts]
    return accuracy.train_all(args, SequenceRun, lambda seed: sequences, described)


def load(directory: Path, quick: bool) -> tuple[list[Images], str]:
    """Return training and test images, and what they are."""
    if not quick:
        return list(load_mnist(directory, download=False)), "MNIST"
    drawn = np.random.default_rng(0).integers(256, size=(16, 1, 5, 5), dtype=np.uint8)
    return [Images(torch.from_numpy(drawn), torch.arange(16) % CLASSES)] * 2, "random images"


def ordered(images: Images, order: str) -> Images:
    """Return the images `[N, T, 1]`, one pixel a step, in the order of the task."""
    pixels = images.pixels.flatten(1).unsqueeze(2)
    if order == "permuted":
        generator = torch.Generator().manual_seed(PERMUTATION_SEED)
        pixels = pixels[:, torch.randperm(pixels.shape[1], generator=generator)]
    return Images(pixels, images.labels)


def make_network(
    name: str, num_steps: int, hidden: list[int] | None = None, dropout: float = 0.0
) -> sf.Temporal:
    """Build the network of a row, from one input to classes, both for each step."""
    hidden = WIDTHS[name] if hidden is None else hidden
    if name == SE_ADLIF:
        neuron = partial(sf.SEAdLIF, surrogate=sf.surrogate.FastSigmoid(), detach_reset=True)
        net = recurrent(neuron, 1, CLASSES, (1, 1), hidden, dropout=dropout)
        return sf.Temporal(net[:-1])  # without the leaky integrator
    layers: list[nn.Module] = []
    width = 1
    for features in hidden:
        linear: nn.Module = nn.Linear(width, features, bias=False)
        if name == DELAYS:
            linear = sf.DelayedLinear(width, features, min(MAX_DELAY, num_steps), bias=False)
        neuron_layer = make_neuron(name, features, num_steps)
        layers += [linear, nn.BatchNorm1d(features), neuron_layer, nn.Dropout(dropout)]
        width = features
    return sf.Temporal(nn.Sequential(*layers, nn.Linear(width, CLASSES)))


def make_neuron(name: str, features: int, num_steps: int) -> nn.Module:
    if name == PSN:
        return sf.PSN(num_steps, order=num_steps)
    if name == DELAYS:
        return sf.LIF(DECAY, detach_reset=True)
    # The time constants are from 1 / 50 of the sequence to twice its length.
    low, high = math.log(1 / num_steps), math.log(100 / num_steps)
    dt = sf.LearnablePositive(torch.empty(features).uniform_(low, high).exp())
    frequency = nn.Parameter(torch.empty(features).uniform_(0, math.pi) / dt().detach())
    rate = sf.LearnablePositive(torch.full((features,), 0.5))
    gain = nn.Parameter(torch.rand(features))
    return sf.CSiLIF(dt, rate, frequency, gain, detach_reset=True)


class SequenceRun(accuracy.Run):
    def make_network(self) -> nn.Module:
        net = make_network(self.name, self.args.T, self.args.hidden, self.args.dropout)
        return net.to(self.device)

    def make_optimizer(self) -> torch.optim.Optimizer:
        args, parameters = self.args, list(self.net.parameters())
        delays = [layer.delay for layer in self.delayed()]
        others = [p for p in parameters if all(p is not d for d in delays)]
        groups = [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": args.weight_decay},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        if delays:
            groups.append({"params": delays, "lr": DELAY_RATE * args.lr, "weight_decay": 0.0})
        return torch.optim.AdamW(groups, args.lr, fused=self.device.type == "cuda")

    def delayed(self) -> list[sf.DelayedLinear]:
        return [m for m in self.net.modules() if isinstance(m, sf.DelayedLinear)]

    def outputs(self, x: Tensor, steps: int) -> Tensor:
        """Return outputs `[T, B, classes]` of bytes `[B, T, 1]`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.net(x.transpose(0, 1) / 255)

    def train(self) -> runner.Record:
        progress = min(1.0, 2 * len(self.rows) / self.args.epochs)
        for layer in self.delayed():
            layer.sigma.fill_(layer.max_delay / 2 * (2 * LAST_SIGMA / layer.max_delay) ** progress)
        row = super().train()
        size = sum(p.numel() for p in self.net.parameters())
        return row | {"order": self.args.order, "parameters": size, "spikes": self.rate()}

    @torch.no_grad()
    def rate(self) -> float:
        """Return the spikes per neuron and step, on the first test images."""
        rates: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, __, y: rates.append(y.float().mean()))
            for layer in self.net.modules()
            if isinstance(layer, sf.Neuron | sf.PSN | sf.Recurrent)
        ]
        self.net.eval()
        self.outputs(self.testing[: self.args.batch].pixels, self.args.T)
        for hook in hooks:
            hook.remove()
        return round(torch.stack(rates).mean().item(), 4)


if __name__ == "__main__":
    main()
