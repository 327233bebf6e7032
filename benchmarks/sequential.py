"""Accuracy over training time on sequential and permuted sequential MNIST, pixel by pixel.

    python -m benchmarks.sequential --names "binary S4D" PSN --seeds 0 1 2
    python -m benchmarks.sequential --names "binary S4D" --order sequential --epochs 10

A network reads the 784 pixels of an image one at a time, through one input: row by row
(`sequential`), or in a random order (`permuted`) that is the same for all images, networks and
seeds, `torch.randperm` with seed 0. It is trained on the 60,000 images of MNIST without
augmentation, and tested on the 10,000 others. The mean of the outputs over time gives the class. A
neuron's step depends on this step and earlier ones, except for PSN.

- binary S4D: neurons with 32 complex linear states and without a reset, which run as a convolution
  over time. Linear layers read spikes, and add to the input of the layer before (Stan and Rhodes,
  "Learning Long Sequences in Spiking Neural Networks", arXiv:2401.00955, with batch norm, a
  surrogate and residuals of currents; states as in Gu et al., "On the Parameterization and
  Initialization of Diagonal State Space Models", NeurIPS 2022).
- PSN: parallel neurons without a reset, with a learned weight for each pair of steps, and masked
  PSN, with earlier steps only (Fang et al., "Parallel Spiking Neurons with High Efficiency and
  Ability to Learn Long-term Dependencies", NeurIPS 2023). As each pixel has weights of its own, the
  permuted task is no harder for PSN than the sequential one.
- delays: LIF neurons whose synapses have learned delays (Hammouamri et al., "Learning Delays in
  Spiking Neural Networks using Dilated Convolutions with Learnable Spacings", ICLR 2024). The bump
  of a delay narrows over the first half of the epochs, and delays learn ten times as fast as
  weights. Evaluation rounds delays to steps.
- SE-adLIF: recurrent adaptive neurons (Baronig et al., "Advancing spatio-temporal processing
  through adaptation in spiking neural networks", Nature Communications 2025), with the surrogate
  and reset of the recipe se-adlif-shd.

All networks have batch norm before their neurons and dropout after them. They are trained with
AdamW, a one-cycle learning rate, the cross entropy of the mean over time, and on a GPU in bfloat16,
with each step recorded as a CUDA graph if it can be.

There is a row for each epoch. `seconds` are those of its training steps, with compilation and
recording in the first epoch; evaluation is not counted. `spikes` are those per neuron and step, on
the first test images. Quick runs use random images.
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

S4D, PSN, MASKED_PSN = "binary S4D", "PSN", "masked PSN"
DELAYS, SE_ADLIF = "delays", "SE-adLIF"
NAMES = (S4D, PSN, MASKED_PSN, DELAYS, SE_ADLIF)
WIDTHS = {
    **{S4D: [128] * 4, PSN: [64] * 3, MASKED_PSN: [64] * 3},
    **{DELAYS: [128] * 3, SE_ADLIF: [256] * 2},
}
MAX_DELAY = 48
# Learning rates of parameters, relative to that of others.
RATES = {"delay": 10.0, "log_dt": 0.25, "log_rate": 0.25, "frequency": 0.25}
DECAY, CLASSES, PERMUTATION_SEED = 0.9, 10, 0
QUICK = {"epochs": 2, "batch": 8, "hidden": [8, 8]}


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("sequential", __doc__)
    accuracy.add_options(parser, NAMES, {"epochs": 30, "batch": 256, "lr": 4e-3, "rise": 0.2})
    add = parser.add_argument
    add("--order", default="permuted", choices=("permuted", "sequential"), help="(permuted)")
    add("--hidden", type=int, nargs="+", help="neurons of each hidden layer (by network)")
    add("--dropout", type=float, default=0.1, help="of the spikes of hidden layers (0.1)")
    add("--weight-decay", type=float, default=0.01, help="of weights alone (0.01)")
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
    if name == S4D:
        layers = [nn.Linear(1, hidden[0])]
        layers += [Residual(features, dropout) for features in hidden]
        return sf.Temporal(
            nn.Sequential(*layers, nn.BatchNorm1d(hidden[-1]), nn.Linear(hidden[-1], CLASSES))
        )
    for features in hidden:
        linear: nn.Module = nn.Linear(width, features, bias=False)
        neurons: nn.Module = sf.LIF(DECAY, detach_reset=True)
        if name == DELAYS:
            linear = sf.DelayedLinear(width, features, min(MAX_DELAY, num_steps), bias=False)
        else:
            neurons = sf.PSN(num_steps, order=num_steps if name == MASKED_PSN else None)
        layers += [linear, nn.BatchNorm1d(features), neurons, nn.Dropout(dropout)]
        width = features
    return sf.Temporal(nn.Sequential(*layers, nn.Linear(width, CLASSES)))


class StateSpace(nn.Module):
    """Neurons `[T, B, features]` without a reset, each with `states` complex linear states.

    Equation, for the learned `a`, `c` and `dt` of a neuron, with the input `x` and spike `s`::

        z[t] = exp(dt * a) z[t-1] + dt * x[t]
        s[t] = 1 if 2 Re(sum(c * z[t])) + skip * x[t] + bias >= 0 else 0

    As the states are linear, all steps are one causal convolution, computed by the FFT.
    """

    def __init__(self, features: int, states: int = 32) -> None:
        super().__init__()
        log_dt = torch.empty(features, 1).uniform_(math.log(1e-3), math.log(1e-1))
        self.log_dt = nn.Parameter(log_dt)
        self.log_rate = nn.Parameter(torch.full((features, states), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(states).repeat(features, 1).float())
        self.output = nn.Parameter(torch.randn(features, states, 2) * 0.5**0.5)
        self.skip, self.bias = (
            nn.Parameter(torch.randn(features)),
            nn.Parameter(torch.zeros(features)),
        )
        self.surrogate = sf.surrogate.Sigmoid()

    def kernel(self, num_steps: int) -> Tensor:
        """Return the response to a single input, `[T, features]`."""
        dt, rate = self.log_dt.exp(), self.log_rate.exp()
        steps = torch.arange(num_steps, device=dt.device).view(-1, 1, 1)
        decay, angle = (-rate * dt * steps).exp(), self.frequency * dt * steps
        real, imag = self.output.unbind(-1)
        return 2 * ((real * angle.cos() - imag * angle.sin()) * decay).sum(-1) * dt.squeeze(1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            size = 2 * len(x)
            response = torch.fft.rfft(self.kernel(len(x)), size, dim=0).unsqueeze(1)
            y = torch.fft.irfft(torch.fft.rfft(x, size, dim=0) * response, size, dim=0)[: len(x)]
            spikes: Tensor = self.surrogate(y + self.skip * x + self.bias)
        return spikes


class Residual(nn.Module):
    """Add what spikes evoke to the current that evoked them."""

    def __init__(self, features: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm1d(features),
            sf.OverTime(StateSpace(features)),
            nn.Dropout(dropout),
            nn.Linear(features, features),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class SequenceRun(accuracy.Run):
    def make_network(self) -> nn.Module:
        net = make_network(self.name, self.args.T, self.args.hidden, self.args.dropout)
        return net.to(self.device)

    def make_optimizer(self) -> torch.optim.Optimizer:
        groups = [
            {
                "params": [p],
                "lr": RATES.get(name.rpartition(".")[2], 1.0) * self.args.lr,
                "weight_decay": self.args.weight_decay * (p.ndim > 1 and name.endswith("weight")),
            }
            for name, p in self.net.named_parameters()
        ]
        return torch.optim.AdamW(groups, self.args.lr, fused=self.device.type == "cuda")

    def outputs(self, x: Tensor, steps: int) -> Tensor:
        """Return outputs `[T, B, classes]` of bytes `[B, T, 1]`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.net(x.transpose(0, 1) / 255)

    def train(self) -> runner.Record:
        accuracy.narrow_delays(self.net, 2 * len(self.rows) / self.args.epochs)
        row = super().train()
        found = {"parameters": accuracy.size_of(self.net), "spikes": self.rate()}
        return row | {"order": self.args.order} | found


if __name__ == "__main__":
    main()
