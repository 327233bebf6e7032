"""Latency of one sample, and of one step of a stream, in evaluation on one GPU or CPU.

    python -m benchmarks.latency
    python -m benchmarks.latency --device cpu

"one sample" is a batch of one through all time steps. "one step of a stream" is one time step of
it, after which the states are those of the next step. A call is timed until its result is complete.
All networks have the same weights, dtype and layout (channels-last), and ours run as users get
them: `sf.fuse(sf.Temporal(net.eval()))`, with mode="inductor" beside what torch.compile makes of
others, and `sf.Stream` of it. In the other libraries' networks, norms are folded into convolutions,
as SpikingJelly's `fuse_conv_bn_eval_modules` does.

SpikingJelly's function has a float32 state or explicit precision (see `benchmarks.jelly`). In a
stream, its function runs with T = 1, its nodes run in single-step mode, in which their states have
the dtype of the network, and snnTorch's neurons hold their states (`init_hidden`). A CUDA graph of
a step copies the states to where it reads them. The network of ReLUs runs on a batch of T, on a GPU
with mode="reduce-overhead".

Weights are -1, 0 and 1, and factors of norms are powers of two: sums are exact in any order, and no
potential equals the threshold. Logits must equal those of the eager loop, in a stream at each step.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import spikefuse as sf
from benchmarks import jelly, networks, runner
from benchmarks.layers import DTYPES, OURS
from benchmarks.networks import FUSED, INDUCTOR, Workload
from benchmarks.runner import EAGER, GRAPH, STEP_WAYS, WAYS, Contender, Record, difference

# Potentials are multiples of 2^-8 in four steps; bfloat16 has this threshold.
NEURON: dict[str, Any] = {"T": 4, "batch": 1, "decay": 0.5, "threshold": 0.5 - 2**-9}
WORKLOADS = {
    "conv-mnist": Workload("conv", networks.MNIST, **NEURON),
    "resnet18-stem3": Workload("resnet18", networks.CIFAR, stem="cifar", **NEURON),
}
SAMPLE, STREAM = PARTS = "one sample", "one step of a stream"
NODE, STEP, LEAKY = "SpikingJelly node", "SpikingJelly function, T = 1", "snnTorch Leaky"
COMPILED = ", torch.compile"
# Allowed relative differences of logits: usually, and with bfloat16 states.
ALLOWED, ROUNDED = 1e-6, 0.5


class Sample:
    """One sample `[T, 1, C, H, W]` of zeros and ones, and the weights of all networks."""

    def __init__(self, workload: Workload, dtype: str, device: torch.device) -> None:
        self.workload, self.dtype, self.device = workload, DTYPES[dtype], device
        self.rival = partial(jelly.Jelly, device, workload.decay, workload.threshold)
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(2, (workload.T, *workload.shape), generator=generator).float()
        net = workload.network(workload.neuron).eval()
        for parameter in net.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
        for norm in [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]:
            norm.weight.fill_(1.0)
            norm.bias.fill_(0.0)
            norm.register_forward_pre_hook(standardize)
        sf.Temporal(net)(x.unsqueeze(1), impl="reference")
        self.state = net.state_dict()
        self.x = x.to(device, self.dtype, memory_format=torch.channels_last).unsqueeze(1)

    def network(self, activation: Callable[[], nn.Module], fold: bool = True) -> nn.Module:
        """Make the network for one time step, with norms folded into convolutions or not."""
        net = self.workload.network(activation).eval()
        net.load_state_dict(self.state, strict=False)  # snnTorch's neurons have buffers
        for layers in [m for m in net.modules() if fold and isinstance(m, nn.Sequential)]:
            for i in reversed(range(len(layers) - 1)):
                conv, norm = layers[i], layers[i + 1]
                if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                    layers[i] = fuse_conv_bn_eval(conv, norm)
                    del layers[i + 1]
        return net.to(self.device, self.dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def ours(self, mode: str | None = None) -> sf.Temporal:
        """Make our network, fused if there is a mode."""
        net = sf.Temporal(self.network(self.workload.neuron, fold=False))
        return sf.fuse(net, mode) if mode else net


def standardize(norm: Any, inputs: tuple[Tensor]) -> None:
    """Set the mean of a norm to that of its input, rounded to integers, and its scale to a power of
    two."""
    (x,) = inputs
    norm.running_mean.copy_(x.mean((0, 2, 3)).round())
    norm.running_var.fill_(4.0 ** x.std().log2().round() - norm.eps)


class Model(NamedTuple):
    """A network's call, and the states that it has left."""

    call: Callable[[Tensor], Tensor]
    states: Callable[[], list[Tensor]] = list

    def in_place(self, held: list[Tensor], x: Tensor) -> Tensor:
        """Call, and copy the states over those before the call, which become `held`."""
        held[:] = self.states()
        y = self.call(x)
        if held:
            torch._foreach_copy_(held, self.states())
        return y


def ours(task: Sample, mode: str | None = None) -> Model:
    net = task.ours(mode)
    return Model(lambda x: net(x).mean(0, dtype=torch.float32))


def folded(task: Sample, activation: Callable[[], nn.Module], mode: str = "") -> Model:
    """Run a network on time folded into the batch, compiled in a mode if there is one."""
    net = task.network(activation)
    net(task.x.flatten(0, 1))  # makes states at rest, which would be compiled otherwise
    run = torch.compile(net, mode=mode) if mode else net

    def call(x: Tensor) -> Tensor:
        return run(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(0, dtype=torch.float32)

    return Model(call)


def function(task: Sample, name: str, mode: str = "") -> Model:
    run = getattr(task.rival(), name)
    return folded(task, partial(jelly.Function, task.workload.T, run), mode)


def relu(task: Sample) -> Model:
    return folded(task, nn.ReLU, "reduce-overhead" if task.x.is_cuda else "default")


def stream(task: Sample, mode: str | None = None) -> Model:
    run = sf.Stream(task.ours(mode))
    return Model(run, lambda: [v for states in (run.state or {}).values() for v in states])


def holding(task: Sample, neuron: Callable[[], nn.Module], name: str, mode: str = "") -> Model:
    """Run a network whose neurons hold their state as an attribute, compiled as in `folded`."""
    net, kind = task.network(neuron), type(neuron())
    neurons = [m for m in net.modules() if isinstance(m, kind)]
    net(task.x[0])  # from now on, states are tensors
    run = torch.compile(net, mode=mode) if mode else net
    return Model(run, lambda: [getattr(one, name) for one in neurons])


def node(task: Sample, mode: str = "") -> Model:
    rival = task.rival()
    neuron = partial(rival.neurons.LIFNode, **rival.constants, step_mode="s")
    return holding(task, neuron, "v", mode)


class FunctionStep(jelly.Function):
    """SpikingJelly's function for one step, with its state `v`."""

    def __init__(self, rival: jelly.Jelly) -> None:
        super().__init__(1, self.step)
        self.rival, self.v = rival, None

    def step(self, x: Tensor, rest: Tensor) -> Tensor:
        v = rest if self.v is None else self.v
        spikes, self.v, _ = self.rival.functional.lif_multi_step(x, v, **self.rival.constants)
        return spikes


def leaky(task: Sample) -> Model:
    snn, threshold = importlib.import_module("snntorch"), task.workload.threshold
    options = {"threshold": threshold, "reset_mechanism": "zero", "init_hidden": True}
    return holding(task, partial(snn.Leaky, task.workload.decay, **options), "mem")


# By part and name: what makes a model, or raises why it cannot, and the ways to run it.
MODELS: dict[str, dict[str, tuple[Callable[[Sample], Model], tuple[str, ...]]]] = {
    SAMPLE: {
        FUSED: (partial(ours, mode="auto"), STEP_WAYS),
        INDUCTOR: (partial(ours, mode="inductor"), WAYS),
        OURS: (ours, STEP_WAYS),
        jelly.FUNCTION: (partial(function, name="function"), WAYS),
        jelly.FUNCTION + COMPILED: (partial(function, name="function", mode="default"), WAYS),
        jelly.PRECISION: (partial(function, name="precision"), WAYS),
        networks.COMPILED: (relu, (EAGER,)),
    },
    STREAM: {
        FUSED: (partial(stream, mode="auto"), WAYS),
        INDUCTOR: (partial(stream, mode="inductor"), WAYS),
        OURS: (stream, WAYS),
        NODE: (node, WAYS),
        NODE + COMPILED: (partial(node, mode="default"), WAYS),
        STEP: (lambda task: holding(task, partial(FunctionStep, task.rival()), "v"), WAYS),
        LEAKY: (leaky, WAYS),
    },
}


def contenders(
    name: str, part: str, task: Sample
) -> Iterator[tuple[str, Contender, Callable[[], list[Tensor]]]]:
    """Yield the ways to run a model until its result is complete, and the states that they read."""
    make, ways = MODELS[part][name]
    x, reason = task.x if part == SAMPLE else task.x[0], ""
    try:
        model = make(task)
        model.call(x)
    except Exception as error:  # the others are still measured
        reason, model = runner.first_line(error), Model(torch.clone)
    for way in ways:
        held: list[Tensor] = []
        step = partial(model.in_place, held) if way == GRAPH else model.call
        contender = Contender(f"{name}, {way}", unavailable=reason)
        if not reason:
            contender = runner.contender_of(contender.name, way, step, (x,), task.device)
        if contender.run is not None:
            contender.run = partial(complete, contender.run, task.device)
        yield way, contender, held.copy if way == GRAPH else model.states


def complete(run: Callable[[], Tensor], device: torch.device) -> Tensor:
    y = run()
    runner.synchronize(device)
    return y


@torch.no_grad()
def measure(args: argparse.Namespace, about: Record) -> Record:
    """Verify and time the models of a part."""
    part, workload, device = about["steps"], WORKLOADS[about["workload"]], torch.device(args.device)
    task = Sample(workload, about["dtype"], device)
    x = task.x if part == SAMPLE else task.x[:1].expand_as(task.x)
    logits = task.ours()(x, impl="reference")
    expected = [logits.mean(0, dtype=torch.float32)] if part == SAMPLE else [*logits]
    # Compilers take longer than quick runs may.
    names = [n for n in MODELS[part] if not (args.quick and n.endswith((COMPILED, INDUCTOR)))]
    found = [(name, *one) for name in names for one in contenders(name, part, task)]
    for name, _, contender, _ in found:
        if name == networks.COMPILED:
            contender.allowed = math.inf
        elif task.dtype == torch.bfloat16 and name.startswith((NODE, jelly.PRECISION)):
            contender.allowed, contender.note = ROUNDED, "its states are stored in bfloat16"

    def rest() -> None:
        for state in [v for *_, states in found for v in states()]:
            state.zero_()

    def verify(contender: Contender, y: Tensor) -> None:
        assert contender.run is not None
        for i, right in enumerate(expected):
            y = contender.run() if i else y
            error, allowed = difference([y], [right]), contender.allowed or ALLOWED
            assert error <= allowed, f"the logits of step {i} differ by {error:.3g} of their norm"

    timing = runner.Timing.of(args, whole_steps=True)
    made = [contender for _, _, contender, _ in found]
    measured = runner.measure(made, verify, timing, prepare=rest)["contenders"]
    for result, (name, way, *_) in zip(measured, found, strict=True):
        result |= {"network": name, "way": way}
    return about | {"T": workload.T, "contenders": measured}


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("latency", __doc__, rounds=5)
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, help="both, or the first if quick"
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="both, or float32 on a CPU")
    args = runner.parse(parser, argv)
    args.workloads = args.workloads or list(WORKLOADS)[: 1 if args.quick else 2]
    args.dtype = args.dtype or list(DTYPES)[: 2 if args.device.startswith("cuda") else 1]
    cases = product(args.workloads, args.dtype, PARTS)
    rows = [dict(zip(("workload", "dtype", "steps"), case, strict=True)) for case in cases]
    with runner.cudnn_search(torch.device(args.device)):
        return runner.run_cases(
            args, ((", ".join(row.values()), partial(measure, args, row)) for row in rows)
        )


if __name__ == "__main__":
    main()
