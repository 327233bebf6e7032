"""Layers of published methods, forward and backward: sliding PSN, and two populations in a loop.

    python -m benchmarks.methods                    on a GPU
    python -m benchmarks.methods psn --device cpu
    python -m benchmarks.methods populations

psn is a sliding parallel spiking neuron of order 4 over N neurons, beside SpikingJelly's, which
multiplies all steps by a banded matrix, and beside the sum of shifted sequences that users write;
both are also compiled by `torch.compile`, and SpikingJelly multiplies in TF32, too. Inputs and
weights are multiples of 1/64, so that all potentials are exact: spikes must equal those in float64,
and gradients must agree.

populations is a recurrent network of N excitatory and N/4 inhibitory LIF neurons that drive each
other, by `Loop`, beside the loop over time that users write, the same with a step compiled by
`torch.compile`, and SpikingJelly's nodes. Weights and inputs are multiples of 1/64 here, too.

On a GPU, each contender is also recorded in a CUDA graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import jelly, runner
from benchmarks.layers import (
    COMPILED,
    LOOP,
    OURS,
    WIDTH,
    Inputs,
    LayerResult,
    Spike,
    compare,
    on_grid,
    train,
)
from benchmarks.runner import (
    EAGER,
    GRAPH,
    Contender,
    Record,
    Timing,
    contender_of,
    first_line,
    measure,
)

ORDER = 4
DECAY, THRESHOLD = 0.75, 1.0
SHIFTS, JELLY, TF32 = "shifted sequences", "SpikingJelly", "TF32"
# By device, T and N of psn; T, B and N of populations.
Sizes = Mapping[str, Sequence[tuple[int, ...]]]
PSN: Sizes = {"cuda": ((32, 1_000_000),), "cpu": ((32, 65_536),)}
POPULATIONS: Sizes = {"cuda": ((100, 64, 256), (100, 256, 1024)), "cpu": ((100, 64, 256),)}
QUICK: Sizes = {"psn": ((6, 40),), "populations": ((20, 4, 64),)}
# Allowed differences: of spikes and gradients of inputs; of parameters, whose gradients are sums
# over all neurons and steps; of gradients in TF32; where `torch.compile` contracts multiplication
# and addition, which flips a spike near the threshold, and those after it.
EXACT, SUMMED, IN_TF32, CONTRACTED = 1e-6, 1e-4, 1e-3, 0.05

# A layer from its input to its outputs, and its parameters.
Layer = tuple[Callable[[Tensor], Any], Sequence[Tensor]]


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("methods", __doc__, rounds=7)
    parser.add_argument("what", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)} (all)")
    args = runner.parse(parser, argv)
    if len(args.what) == 1:  # beside the result of all
        args.usual_name = f"methods_{args.what[0]}"
    device = torch.device(args.device)
    cases = []
    for what in args.what:
        make, sizes, title = CASES[what]
        for size in QUICK[what] if args.quick else sizes[device.type]:
            case = partial(measure_case, args, partial(make, size, device))
            cases.append((title.format(*size), case))
    return runner.run_cases(args, cases)


@dataclass
class Case:
    """The input of a row, its layers by name, and the results in float64.

    `allowed`: the differences from them, of spikes and gradients of inputs, and of parameters; they
    are `IN_TF32` where a layer's name ends in TF32.
    """

    inputs: Inputs
    layers: Mapping[str, Callable[[], Layer]]
    expected: LayerResult
    allowed: tuple[float, float]

    def verify(self, contender: Contender, result: LayerResult) -> None:
        """Compare with the results in float64; parameters as one vector.

        Raises:
            AssertionError: the result is wrong.
        """
        tf32 = contender.name.removesuffix(f", {GRAPH}").endswith(TF32)
        allowed, summed = (IN_TF32, IN_TF32) if tf32 else self.allowed
        found, expected = map(in_two, (result, self.expected))
        compare(found[0], expected[0], allowed)
        compare(found[1], expected[1], summed)


def in_two(result: LayerResult) -> tuple[LayerResult, LayerResult]:
    """Return a result without parameters, and their gradients, both in float64."""
    outputs, grads = (tuple(t.double() for t in ts) for ts in (result.outputs, result.grads))
    # SpikingJelly has the weights of a sliding PSN as one vector, that of this step last.
    params = torch.cat([p.double().reshape(-1).flip(0) for p in result.params])
    return LayerResult(outputs, grads), LayerResult((), (), (params,))


def measure_case(args: argparse.Namespace, make: Callable[[], Case]) -> Record:
    case = make()
    (x,) = case.inputs.xs
    ways = (EAGER, GRAPH) if x.device.type == "cuda" else (EAGER,)
    contenders = []
    for name, build in case.layers.items():
        if (TF32 in name and x.device.type != "cuda") or (args.quick and COMPILED in name):
            continue
        try:
            layer, params = build()
        except Exception as error:  # of another library
            contenders.append(Contender(name, unavailable=first_line(error)))
            continue
        step = partial(train, layer, case.inputs, params)
        step = partial(with_tf32, step) if TF32 in name else step
        contenders += [
            contender_of(name if way == EAGER else f"{name}, {way}", way, step, (), x.device)
            for way in ways
        ]
    about = dict(zip("TBN", x.shape, strict=True))
    # Each run is long enough that one untimed call per turn is plenty.
    return about | measure(contenders, case.verify, Timing.of(args, whole_steps=True))


def with_tf32(step: Callable[[], LayerResult]) -> LayerResult:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return step()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# Sliding PSN


def psn(size: tuple[int, int], device: torch.device) -> Case:
    T, N = size
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"device": device, "generator": generator}
    x = on_grid(torch.rand(T, 1, N, **options)).requires_grad_()
    inputs = Inputs((x,), (torch.randn(T, 1, N, **options),))
    wide = Inputs((x.detach().double().requires_grad_(),), (inputs.grads[0].double(),))
    layer, params = shifted(device, torch.float64)
    layers: dict[str, Callable[[], Layer]] = {
        OURS: partial(ours, device),
        JELLY: partial(jelly_psn, device),
        f"{JELLY}, {COMPILED}": partial(compiled, partial(jelly_psn, device)),
        f"{JELLY}, {TF32}": partial(jelly_psn, device),
        SHIFTS: partial(shifted, device),
        f"{SHIFTS}, {COMPILED}": partial(compiled, partial(shifted, device)),
    }
    return Case(inputs, layers, train(layer, wide, params), (EXACT, SUMMED))


def ours(device: torch.device) -> Layer:
    neuron = sf.SlidingPSN(ORDER, surrogate=sf.surrogate.Sigmoid(WIDTH)).to(device)
    return neuron, tuple(neuron.parameters())


def jelly_psn(device: torch.device) -> Layer:
    neurons, surrogates = jelly.spikingjelly("neuron", "surrogate")
    surrogate = surrogates.Sigmoid(alpha=WIDTH)
    node = neurons.SlidingPSN(ORDER, surrogate_function=surrogate, step_mode="m").to(device)
    return node, (node.weight, node.bias)


def shifted(device: torch.device, dtype: torch.dtype = torch.float32) -> Layer:
    weights = torch.tensor([0.5**i for i in range(ORDER)], device=device, dtype=dtype)
    bias = torch.tensor(-1.0, device=device, dtype=dtype)
    params = *(w.clone().requires_grad_() for w in weights), bias.requires_grad_()

    def layer(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, 0, ORDER - 1, 0))
        h = params[-1]
        for i in range(ORDER):
            h = h + params[i] * padded[ORDER - 1 - i : len(padded) - i]
        spikes: Tensor = Spike.apply(h)
        return spikes

    return layer, params


def compiled(build: Callable[[], Layer]) -> Layer:
    layer, params = build()
    return torch.compile(layer, dynamic=False), params


# Two populations


def populations(size: tuple[int, int, int], device: torch.device) -> Case:
    T, B, N = size
    generator = torch.Generator().manual_seed(N)

    def draw(*shape: int, spread: float, mean: float = 0.0) -> Tensor:
        return on_grid(mean + spread * torch.randn(shape, generator=generator))

    excitatory, inhibitory = N, N // 4
    x = draw(T, B, N, spread=0.35, mean=0.125).to(device).requires_grad_()
    weights = []
    for rows, columns in ((excitatory,) * 2, (inhibitory, excitatory), (excitatory, inhibitory)):
        # A tenth of the synapses exist, so that gradients do not explode over T steps.
        exists = torch.rand(rows, columns, generator=generator) < 0.1
        weight = draw(rows, columns, spread=1.5 / columns**0.5).abs() * exists
        weights.append(weight.to(device))
    grads = [torch.randn(T, B, n, generator=generator).to(device) for n in (excitatory, inhibitory)]
    wide = Inputs((x.detach().double().requires_grad_(),), tuple(g.double() for g in grads))
    doubled = [w.double().requires_grad_() for w in weights]
    expected = train(partial(by_hand, step_by_hand, doubled), wide, doubled)
    for spikes in expected.outputs:
        rate = spikes.mean().item()
        assert 0.01 < rate < 0.5, f"{rate:.1%} of the neurons fire"
    layers: dict[str, Callable[[], Layer]] = {
        OURS: partial(by_loop, weights),
        LOOP: partial(by_step, step_by_hand, weights),
        f"{LOOP}, {COMPILED} of a step": lambda: by_step(
            torch.compile(step_by_hand, dynamic=False), weights
        ),
        f"{JELLY} nodes": partial(by_nodes, weights),
    }
    return Case(Inputs((x,), tuple(grads)), layers, expected, (CONTRACTED, CONTRACTED))


class Populations(nn.Module):
    """One step of the two populations."""

    def __init__(self, weights: Sequence[Tensor], neuron: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.ee, self.ei, self.ie = (nn.Parameter(w.clone()) for w in weights)
        self.e, self.i = neuron(), neuron()

    def forward(self, x: Tensor, e: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        e = self.e(x + F.linear(e, self.ee) - F.linear(i, self.ie))
        return e, self.i(F.linear(e, self.ei))


def by_loop(weights: Sequence[Tensor]) -> Layer:
    surrogate = sf.surrogate.Sigmoid(WIDTH)
    body = Populations(weights, lambda: sf.LIF(DECAY, THRESHOLD, surrogate=surrogate))
    loop = sf.Loop(body, (len(weights[0]),), (len(weights[1]),))
    return loop, (body.ee, body.ei, body.ie)


def step_by_hand(
    x: Tensor, last: tuple[Tensor, ...], ee: Tensor, ei: Tensor, ie: Tensor
) -> tuple[Tensor, ...]:
    e, i, u, v = last
    h = DECAY * u + (x + F.linear(e, ee) - F.linear(i, ie))
    e = Spike.apply(h - THRESHOLD)
    u = h * (1 - e)
    h = DECAY * v + F.linear(e, ei)
    i = Spike.apply(h - THRESHOLD)
    return e, i, u, h * (1 - i)


def by_hand(
    step: Callable[..., tuple[Tensor, ...]], weights: Sequence[Tensor], x: Tensor
) -> tuple[Tensor, ...]:
    zeros = [x.new_zeros(x.shape[1], len(weights[k])) for k in (0, 1)]
    last, found = (*zeros, *zeros), []
    for now in x.unbind(0):
        last = step(now, last, *weights)
        found.append(last[:2])
    return tuple(map(torch.stack, zip(*found, strict=True)))


def by_step(step: Callable[..., tuple[Tensor, ...]], weights: Sequence[Tensor]) -> Layer:
    params = [w.clone().requires_grad_() for w in weights]
    return partial(by_hand, step, params), params


def by_nodes(weights: Sequence[Tensor]) -> Layer:
    library = jelly.Jelly(weights[0].device, DECAY, THRESHOLD)
    body = Populations(weights, lambda: library.neurons.LIFNode(**library.constants, step_mode="s"))

    def layer(x: Tensor) -> tuple[Tensor, ...]:
        found, last = [], [x.new_zeros(x.shape[1], len(weights[k])) for k in (0, 1)]
        for now in x.unbind(0):
            last = body(now, *last)
            found.append(last)
        library.functional.reset_net(body)
        return tuple(map(torch.stack, zip(*found, strict=True)))

    return layer, (body.ee, body.ei, body.ie)


CASES: dict[str, tuple[Callable[..., Case], Sizes, str]] = {
    "psn": (psn, PSN, f"sliding PSN of order {ORDER}, T={{}} N={{}}"),
    "populations": (populations, POPULATIONS, "two populations, T={} B={} N={}"),
}


if __name__ == "__main__":
    main()
