"""The open-neuromorphic benchmark: one linear layer and LIF neurons, over several libraries.

    python -m benchmarks.open_neuromorphic
    python -m benchmarks.open_neuromorphic --N 16384 --dtype bfloat16

Forward and backward of the sum of all spikes, 16 samples, 500 time steps, N inputs and N neurons,
as in Lenz et al., "SNN Library Benchmarks", https://open-neuromorphic.org/blog. There, times were
taken without waiting for the GPU to finish; here, forward and backward together are timed until it
has. Each library has its usual LIF neuron; they are not the same model, so only the shape of
the results is checked, and that not all neurons spike.

In every library, the linear layer is applied to all time steps at once. snnTorch and Norse run
their neuron step by step, also after torch.compile of the step, which for 500 unrolled steps does
not end. Spyx (JAX) unrolls its scan by 5, as published. float32 has TF32 products, the default of
JAX; PyTorch is told to use them. bfloat16 is autocast; in Spyx, the linear layer's dtype.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import jelly, runner
from benchmarks.layers import DTYPES, OURS
from benchmarks.runner import Contender, Record, Timing, first_line, measure

STEPS, BATCH, SIZES = 500, 16, (512, 4096, 8192, 16384)
SNNTORCH, NORSE, SPYX = "snnTorch", "Norse", "Spyx"

# The result of a contender: the shape of its spikes, and their number as a scalar of its library.
Spikes = tuple[tuple[int, ...], Any]
Net = Callable[[Tensor], Tensor]


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("open_neuromorphic", __doc__, rounds=5)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--N", type=int, nargs="+", help=f"neurons {SIZES}")
    parser.add_argument("--libraries", nargs="+", choices=(*LIBRARIES, SPYX), metavar="LIBRARY",
                        help=f"of {'; '.join((*LIBRARIES, SPYX))} (all)")  # fmt: skip
    args = runner.parse(parser, argv)
    args.libraries = args.libraries or [*LIBRARIES, SPYX]
    args.N = args.N or ([16] if args.quick else list(SIZES))
    device, timing = torch.device(args.device), Timing.of(args, whole_steps=True)
    steps = 5 if args.quick else STEPS
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    measure_size = partial(measure_layer, args.libraries, timing)
    try:
        return runner.run_cases(args, (
            (f"N = {N}, {dtype}", partial(measure_size, device, (steps, BATCH, N), dtype))
            for N in args.N
            for dtype in args.dtype
        ))  # fmt: skip
    finally:
        torch.set_float32_matmul_precision(before)


def measure_layer(
    names: list[str], timing: Timing, device: torch.device, size: tuple[int, int, int], dtype: str
) -> Record:
    T, batch, N = size
    x = torch.randn(size, device=device, generator=torch.Generator(device).manual_seed(N))
    contenders = [torch_contender(name, x, dtype) for name in names if name in LIBRARIES]
    contenders += [spyx(x, dtype)] if SPYX in names else []

    def verify(contender: Contender, found: Spikes) -> None:
        shape, number = found
        rate = float(number) / x.numel()
        assert shape == size, f"spikes are {list(shape)}"
        assert 0 <= rate < 1, f"{rate:.1%} of the neurons spike"

    about = {"N": N, "T": T, "batch": batch, "dtype": dtype}
    return about | measure(contenders, verify, timing)


def torch_contender(name: str, x: Tensor, dtype: str) -> Contender:
    linear = nn.Linear(x.shape[2], x.shape[2], device=x.device)
    try:
        net = LIBRARIES[name](linear, x)
    except Exception as error:
        return Contender(name, unavailable=first_line(error))

    def run() -> Spikes:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            spikes = net(x)
            number = spikes.sum(dtype=torch.float32)
        torch.autograd.grad(number, tuple(linear.parameters()))
        return tuple(spikes.shape), number.detach()

    return Contender(name, run)


# Networks in PyTorch, by library


def spikefuse(linear: nn.Linear, x: Tensor) -> Net:
    return sf.Temporal(nn.Sequential(linear, sf.LIF(0.9))).to(x.device)


def fused(linear: nn.Linear, x: Tensor) -> Net:
    return sf.fuse(spikefuse(linear, x))


def spikingjelly(linear: nn.Linear, x: Tensor) -> Net:
    rival = jelly.Jelly(x.device, 0.9, 1.0)
    rest = torch.zeros(x.shape[1:], device=x.device)
    function = rival.precision if x.is_cuda else rival.function
    return lambda x: function(linear(x), rest)


def snntorch(linear: nn.Linear, x: Tensor, compiled: bool = False) -> Net:
    library: Any = importlib.import_module("snntorch")
    neuron = library.Leaky(beta=0.95).to(x.device)
    step = torch.compile(neuron) if compiled else neuron

    def run(x: Tensor) -> Tensor:
        currents, found = linear(x), []
        potential = torch.zeros(currents.shape[1:], device=x.device)
        for current in currents.unbind(0):
            spikes, potential = step(current, potential)
            found.append(spikes)
        return torch.stack(found)

    return run


def norse(linear: nn.Linear, x: Tensor, compiled: bool = False) -> Net:
    library: Any = importlib.import_module("norse.torch")
    neuron = library.LIFCell().to(x.device)
    step = torch.compile(neuron) if compiled else neuron

    def run(x: Tensor) -> Tensor:
        currents, found, state = linear(x), [], None
        for current in currents.unbind(0):
            spikes, state = step(current, state)
            found.append(spikes)
        return torch.stack(found)

    return run


LIBRARIES: dict[str, Callable[[nn.Linear, Tensor], Net]] = {
    f"{OURS}, fused": fused,
    OURS: spikefuse,
    jelly.PRECISION: spikingjelly,
    SNNTORCH: snntorch,
    f"{SNNTORCH}, torch.compile": partial(snntorch, compiled=True),
    NORSE: norse,
    f"{NORSE}, torch.compile": partial(norse, compiled=True),
}


def spyx(x: Tensor, dtype: str) -> Contender:
    """Return Spyx's LIF neuron behind a linear layer of Flax, without a bias, as published."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        jax, nnx, neurons, axn = (
            importlib.import_module(name) for name in ("jax", "flax.nnx", "spyx.nn", "spyx.axn")
        )
        wanted = "gpu" if x.is_cuda else "cpu"
        device = jax.devices(wanted)[0]
    except Exception as error:
        return Contender(SPYX, unavailable=first_line(error))
    N, numbers, rngs = x.shape[2], getattr(jax.numpy, dtype), nnx.Rngs(0)
    with jax.default_device(device):
        linear = nnx.Linear(N, N, use_bias=False, dtype=numbers, rngs=rngs)
        neuron = neurons.LIF((N,), beta=0.9, activation=axn.arctan(), rngs=rngs)
        given = jax.device_put(x.cpu().numpy(), device)
    graph, weights = nnx.split(linear)

    shape: list[tuple[int, ...]] = []

    def loss(weights: Any, given: Any) -> Any:
        currents = nnx.merge(graph, weights)(given)

        def step(state: Any, current: Any) -> Any:
            spikes, state = neuron(current, state)
            return state.astype(currents.dtype), spikes

        rest = neuron.initial_state(x.shape[1]).astype(currents.dtype)
        _, spikes = jax.lax.scan(step, rest, currents, unroll=5)
        shape[:] = [tuple(spikes.shape)]
        return spikes.sum(dtype=jax.numpy.float32)

    step = jax.jit(jax.value_and_grad(loss))

    def run() -> Spikes:
        value, _ = jax.block_until_ready(step(weights, given))
        return shape[0], value

    return Contender(SPYX, run)


if __name__ == "__main__":
    main()
