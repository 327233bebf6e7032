"""A layer of delayed synapses and LIF neurons, forward and backward, beside what it consists of.

    python -m benchmarks.delays --batch 256                 on a GPU
    python -m benchmarks.delays --device cpu --batch 32     on a CPU

140 inputs, 256 neurons, 25 taps and T = 100, as in the first layer of the networks of Hammouamri et
al. (ICLR 2024) for the Spiking Heidelberg Digits in steps of 10 ms. The contenders:

- spikefuse: `DelayedLinear` and `LIF`
- convolution and LIF: the same convolution and neurons, with the taps as its weights. The
  difference to it is what positions cost.
- layer and loop: as the authors' public code has them: taps from broadcast positions, a padded
  `conv1d` of `[B, C, T]`, and neurons in a loop over time
- the loop in a CUDA graph, and spikefuse in one, on a GPU

A copy of the bytes that the convolution and the neurons must move, each once, gives `fraction`.
Results are compared with layer and loop in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import layers, runner
from benchmarks.layers import LOOP, OURS, Inputs, LayerResult, compare, train
from benchmarks.runner import EAGER, GRAPH, Contender, Record, Timing, contender_of, measure

INPUTS, NEURONS, TAPS, STEPS = 140, 256, 25, 100
QUICK = {"inputs": 12, "neurons": 16, "taps": 5, "steps": 10, "batch": 4}
DECAY, THRESHOLD, RATE = 0.95, 1.0, 0.05
CONVOLUTION = "convolution and LIF"
# A potential within rounding of the threshold changes spikes, those after it, and gradients.
ALLOWED = 0.05


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("delays", __doc__, rounds=7)
    for name, usual in (("inputs", INPUTS), ("neurons", NEURONS), ("taps", TAPS),
                        ("steps", STEPS), ("batch", 256)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"({usual})")
    args = runner.parse(parser, argv)
    vars(args).update(QUICK if args.quick else {})
    sizes = args.steps, args.batch, args.inputs, args.neurons, args.taps

    def case() -> Record:
        layer = DelayedLayer(sizes, torch.device(args.device))
        timing = Timing.of(args, copy_bytes=layer.num_bytes, whole_steps=True)
        about = dict(zip(("T", "B", "inputs", "neurons", "taps"), sizes, strict=True))
        return about | measure(layer.contenders(), layer.verify, timing, layer.num_bytes)

    title = "T={} B={} {}-{}, {} taps".format(*sizes)
    return runner.run_cases(args, [(title, case)])


class DelayedLayer:
    """A layer of one size, its input, and the results to compare with."""

    def __init__(self, sizes: tuple[int, int, int, int, int], device: torch.device) -> None:
        T, B, inputs, neurons, taps = sizes
        self.device = device
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        self.delayed = sf.DelayedLinear(inputs, neurons, taps - 1, bias=False, sigma=taps / 4)
        with torch.no_grad():  # so that about a tenth of the neurons fires
            self.delayed.weight.mul_(12)
        x = (torch.rand(T, B, inputs, generator=generator) < RATE).float()
        grad = torch.randn(T, B, neurons, generator=generator)
        self.delayed.to(device)
        self.inputs = Inputs((x.to(device).requires_grad_(),), (grad.to(device),))
        wide = Inputs((x.to(device).double().requires_grad_(),), (grad.to(device).double(),))
        with torch.no_grad():
            params = [p.double().requires_grad_() for p in self.params]
        step = partial(layer_and_loop, *params, taps, self.delayed.sigma.item())
        self.expected = train(step, wide, params)
        rate = self.expected.outputs[0].mean().item()
        assert 0.02 < rate < 0.4, f"{rate:.1%} of the neurons fire"
        # Each tensor once: input, taps and current, their gradients, and spikes with theirs. The
        # input, the taps and the current are read by forward and by backward.
        y, weights = T * B * neurons, inputs * neurons * taps
        self.num_bytes = 4 * (3 * x.numel() + 3 * weights + 7 * y)

    @property
    def params(self) -> list[Tensor]:
        return [self.delayed.delay, self.delayed.weight]

    def contenders(self) -> list[Contender]:
        neuron = sf.LIF(DECAY, THRESHOLD, surrogate=sf.surrogate.Sigmoid(layers.WIDTH))
        net = sf.Temporal(nn.Sequential(self.delayed, neuron))
        taps = self.delayed.taps().detach().requires_grad_()
        num, sigma = taps.shape[-1], self.delayed.sigma.item()
        convolution = sf.OverTime(partial(convolve, taps), history=num - 1)
        alone = sf.Temporal(nn.Sequential(convolution, neuron))
        loop = partial(layer_and_loop, *self.params, num, sigma)
        steps: dict[str, tuple[Callable[[Tensor], Tensor], Sequence[Tensor]]] = {
            OURS: (net, self.params),
            CONVOLUTION: (alone, [taps]),
            LOOP: (loop, self.params),
        }
        ways = (EAGER, GRAPH) if self.device.type == "cuda" else (EAGER,)
        return [
            contender_of(name if way == EAGER else f"{name}, {way}", way,
                         partial(train, function, self.inputs, params), (), self.device)
            for name, (function, params) in steps.items() for way in ways
        ]  # fmt: skip

    def verify(self, contender: Contender, result: LayerResult) -> None:
        """Compare with the loop in float64.

        Raises:
            AssertionError: the result is wrong.
        """
        expected = self.expected
        if contender.name.startswith(CONVOLUTION):
            expected, result = (LayerResult(r.outputs, r.grads) for r in (expected, result))
        tensors = (tuple(t.double() for t in ts) for ts in vars(result).values())
        compare(LayerResult(*tensors), expected, ALLOWED)


def convolve(taps: Tensor, x: Tensor) -> Tensor:
    image = x.permute(2, 0, 1).unsqueeze(0)
    return F.conv2d(image, taps.unsqueeze(-1)).squeeze(0).permute(1, 2, 0)


def layer_and_loop(delay: Tensor, weight: Tensor, taps: int, sigma: float, x: Tensor) -> Tensor:
    """Compute the layer as the authors' code does, and its neurons by a loop over time."""
    lags = torch.arange(taps - 1, -1, -1, dtype=x.dtype, device=x.device)
    bump = torch.exp(-0.5 * ((lags - delay.unsqueeze(-1)) / sigma) ** 2)
    kernel = weight.unsqueeze(-1) * bump / (bump.sum(-1, keepdim=True) + 1e-7)
    padded = F.pad(x.permute(1, 2, 0), (taps - 1, 0))
    current = F.conv1d(padded, kernel).permute(2, 0, 1)
    return layers.hand_written(current, decay=DECAY, threshold=THRESHOLD)


if __name__ == "__main__":
    main()
