"""One recurrent LIF layer, forward and backward, beside loops over time and cuDNN's nn.RNN.

    python -m benchmarks.recurrent                     all sizes, on a GPU
    python -m benchmarks.recurrent --rows 0 1 --dtype bfloat16
    python -m benchmarks.recurrent --device cpu        T = 100, B = 64, N = 256 on a CPU

Weights and inputs are multiples of 1/64, so that all sums of currents are exact in any order: the
spikes of spikefuse must equal those of the loop written by hand, and gradients agree to rounding.
nn.RNN (tanh, as many features) computes something else; only its shapes are compared. In float32,
cuDNN multiplies in TF32 unless told not to, and is measured in both ways. The loops
multiply and add in the dtype of the input, spikefuse adds in float32. The reference, which only
takes longer than the loop, is measured up to N = 512 on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import layers, runner
from benchmarks.layers import (
    DTYPES,
    GRID,
    LOOP,
    OURS,
    Inputs,
    LayerResult,
    compare,
    on_grid,
    train,
)
from benchmarks.runner import EAGER, GRAPH, Contender, Record, Timing, contender_of, measure

SIZES = ((100, 256, 128), (100, 256, 256), (100, 256, 512), (250, 128, 1024))
LARGEST_REFERENCE = 512
CPU_SIZE, QUICK_SIZE = (100, 64, 256), (5, 4, 32)
DECAY, THRESHOLD = 0.75, 1.0
REFERENCE, RNN, RLEAKY = "eager reference", "nn.RNN", "snnTorch RLeaky"
TF32 = f"{RNN}, TF32"
# Allowed relative difference of gradients, which the loops round to the dtype in each step.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1}

LAYERS = (OURS, LOOP, REFERENCE, RNN, TF32, RLEAKY)

loop = partial(layers.hand_written, decay=DECAY, threshold=THRESHOLD)


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("recurrent", __doc__, rounds=7)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rows", type=int, nargs="+", help="rows of the sizes (all)")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, metavar="LAYER",
                        help=f"of {'; '.join(LAYERS)} (all)")  # fmt: skip
    args = runner.parse(parser, argv)
    # Loops take long enough that one untimed call per turn is plenty.
    device, timing = torch.device(args.device), Timing.of(args, whole_steps=True)
    on_gpu = device.type == "cuda"
    sizes = (QUICK_SIZE,) if args.quick else SIZES if on_gpu else (CPU_SIZE,)
    measure_size = partial(measure_layer, args.layers or LAYERS, timing, device)
    return runner.run_cases(args, (
        (f"T={T} B={B} N={N}, {dtype}", partial(measure_size, (T, B, N), dtype))
        for T, B, N in ([sizes[i] for i in args.rows] if args.rows else sizes)
        for dtype in (args.dtype if on_gpu else ["float32"])
    ))  # fmt: skip


def measure_layer(
    names: Sequence[str],
    timing: Timing,
    device: torch.device,
    size: tuple[int, int, int],
    dtype: str,
) -> Record:
    layer = Layer(size, dtype, device)
    about = dict(zip("TBN", size, strict=True)) | {"dtype": dtype}
    return about | measure(layer.contenders(names), layer.verify, timing)


class Layer:
    """A layer of one size and dtype, and its input."""

    def __init__(self, size: tuple[int, int, int], dtype: str, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        T, B, N = size
        generator = torch.Generator().manual_seed(N)

        def draw(*shape: int, spread: float) -> Tensor:
            values = torch.randn(shape, generator=generator) * spread
            return on_grid(values).to(device, DTYPES[dtype])

        # About 5 % of the neurons fire.
        x = draw(T, B, N, spread=0.35).clamp(-2, 2) + 0.125
        self.weight = draw(N, N, spread=max(1.5 / N**0.5, GRID)).clamp(-1, 1)
        grad = torch.randn((T, B, N), generator=generator).to(x)
        self.inputs = Inputs((x.requires_grad_(),), (grad,))
        weight = self.weight.float().requires_grad_()
        single = Inputs((x.detach().float().requires_grad_(),), (grad.float(),))
        self.expected = train(partial(loop, weight=weight), single, (weight,))
        rate = self.expected.outputs[0].mean().item()
        assert 0.005 < rate < 0.3, f"{rate:.1%} of the neurons fire"

    def contenders(self, names: Sequence[str]) -> list[Contender]:
        N, dtype = self.size[2], DTYPES[self.dtype]
        neuron = sf.LIF(DECAY, THRESHOLD, surrogate=sf.surrogate.Sigmoid(layers.WIDTH))
        ours = sf.Recurrent(neuron, N).to(self.device, dtype)
        with torch.no_grad():
            ours.weight.copy_(self.weight)
        matrix = self.weight.clone().requires_grad_()
        rnn = nn.RNN(N, N, bias=False).to(self.device, dtype)
        steps: dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]] = {
            OURS: (ours, [ours.weight]),
            LOOP: (partial(loop, weight=matrix), [matrix]),
            REFERENCE: (partial(ours, impl="reference"), [ours.weight]),
            **{n: (lambda x: rnn(x)[0], [*rnn.parameters()]) for n in (RNN, TF32)},
        }
        found, missing = [], []
        if N > LARGEST_REFERENCE:
            del steps[REFERENCE]
        if dtype != torch.float32 or self.device.type != "cuda":
            del steps[TF32]
        try:
            steps[RLEAKY] = rleaky(N, self.device, dtype)
        except Exception as error:
            missing = [Contender(RLEAKY, unavailable=runner.first_line(error))]
        for name, (function, params) in steps.items():
            if name not in names:
                continue
            run = partial(train, function, self.inputs, params)
            step = partial(with_tf32, name == TF32, run)
            found.append(contender_of(name, EAGER, step, (), self.device))
            if name in (OURS, LOOP, RNN, TF32) and self.device.type == "cuda":
                found.append(contender_of(f"{name}, {GRAPH}", GRAPH, step, (), self.device))
        return found + missing

    def verify(self, contender: Contender, result: LayerResult) -> None:
        """Compare with the loop in float32: spikes bit for bit, gradients to rounding.

        Raises:
            AssertionError: the result is wrong.
        """
        name = contender.name.removesuffix(f", {GRAPH}")
        found = LayerResult(*(tuple(t.float() for t in ts) for ts in vars(result).values()))
        assert all(g.isfinite().all() for g in (*found.grads, *found.params))
        rounded = name == LOOP and self.dtype != "float32"  # its currents, which flips spikes
        if name in (OURS, LOOP, REFERENCE) and not rounded:
            assert torch.equal(found.outputs[0], self.expected.outputs[0]), "spikes differ"
            compare(found, self.expected, TOLERANCE[self.dtype])


def with_tf32(allowed: bool, step: Callable[[], LayerResult]) -> LayerResult:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        return step()
    finally:
        torch.backends.cudnn.allow_tf32 = before


def rleaky(
    N: int, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """Return snnTorch's recurrent LIF layer in its loop over time, and its weights."""
    snn: Any = importlib.import_module("snntorch")
    surrogate: Any = importlib.import_module("snntorch.surrogate")
    gradient = surrogate.sigmoid(slope=layers.WIDTH)
    options = {"linear_features": N, "spike_grad": gradient, "reset_mechanism": "zero"}
    layer = snn.RLeaky(beta=DECAY, threshold=THRESHOLD, **options).to(device, dtype)

    def run(x: Tensor) -> Tensor:
        spikes, potential = layer.init_rleaky()
        found = []
        for current in x.unbind(0):
            spikes, potential = layer(current, spikes, potential)
            found.append(spikes)
        return torch.stack(found)

    return run, [layer.recurrent.weight]


if __name__ == "__main__":
    main()
