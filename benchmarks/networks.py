"""Training and evaluation steps of whole networks on one GPU.

    python -m benchmarks.networks                    training steps of five networks
    python -m benchmarks.networks --steps evaluation --workloads resnet50-mnist
    python -m benchmarks.networks --name networks_imagenet \\
        --workloads large-cifar10 alexnet-imagenet resnet34-imagenet \\
        --networks "spikefuse, fused" "eager loop" "spikefuse, fused, checkpoint"

All networks have the same weights, input and layout (channels-last). Each runs in a plain loop, in
which our fused ones replay what they have recorded, and as the replay of a CUDA graph of the whole
step, which hides the cost of Python; ours also with `sf.graph_step`, which copies input and labels
into its graph. A training step is forward, the cross
entropy of the mean over time, backward, and a step of a fused optimizer; an
evaluation step is forward without gradients, and the classes. float32 has TF32 convolutions,
PyTorch's default; bfloat16 uses autocast, as in the trainer.

SpikingJelly is measured if it is installed, by its function on views of the same tensors: with a
float32 state, with explicit precision (see `benchmarks.jelly`), and with what its `memopt` makes of
the latter, which recomputes in backward and stores spikes as bits. "ReLU and batch norm" is the
same network with ReLUs in place of neurons, on a batch T times as large; "convolutions alone" has
no norms either. Both libraries' networks are also compiled by torch.compile, that with ReLUs in
mode="reduce-overhead", too, which replays what it has recorded.

Memory is what a step needs beyond weights, optimizer and input: at its peak, or the growth of the
graph's pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import jelly, layers, runner
from benchmarks.agreement import Agreement, NetworkReference
from benchmarks.layers import DTYPES, LOOP, OURS
from benchmarks.runner import (
    EAGER,
    STEP_WAYS,
    WAYS,
    Contender,
    Record,
    Timing,
    contender_of,
    cudnn_search,
    first_line,
    measure,
)
from benchmarks.steps import STEPS, Network, Task
from spikefuse import memory
from spikefuse.models import MODELS, blocks

FUSED = f"{OURS}, fused"
INDUCTOR = f"{FUSED}, Inductor"
RELU, CONVOLUTIONS = "ReLU and batch norm", "convolutions alone"
COMPILED, REDUCED = f"{RELU}, torch.compile", f"{RELU}, reduce-overhead"
JELLY_COMPILED = f"{jelly.PRECISION}, torch.compile"
JELLY_MEMORY = {level: f"SpikingJelly, memopt level {level}" for level in (1, 4)}
# Networks that replay their own recordings run in a plain loop only.
REPLAYED = (INDUCTOR, REDUCED)

SURROGATES: dict[str, Callable[[], sf.surrogate.Surrogate]] = {
    "sigmoid": lambda: sf.surrogate.Sigmoid(layers.WIDTH),
    "rectangle": sf.surrogate.Rectangle,
}


@dataclass(frozen=True)
class Workload:
    """A model of `spikefuse.models`, its neurons and its input; `shape` is C, H, W.

    The default neurons are from "Towards Scalable GPU-Accelerated SNN Training via Temporal
    Fusion".
    """

    model: str
    shape: tuple[int, int, int]
    num_classes: int = 10
    T: int = 32
    batch: int = 100
    decay: float = layers.DECAY
    threshold: float = layers.THRESHOLD
    surrogate: str = "sigmoid"
    optimizer: str = "adam"
    stem: str = "imagenet"  # of a ResNet

    def neuron(self) -> sf.LIF:
        return sf.LIF(self.decay, self.threshold, surrogate=SURROGATES[self.surrogate]())

    def network(self, activation: Callable[[], nn.Module]) -> nn.Module:
        """Make the network for one time step, `[B, C, H, W]` to `[B, classes]`."""
        make = MODELS[self.model]
        if self.stem != "imagenet":
            make = partial(make, stem=self.stem)
        return make(activation, self.shape[0], self.num_classes, self.shape[1:])

    def small(self) -> Workload:
        """Return a small one for quick runs."""
        # With smaller images, oneDNN leaves part of the bfloat16 weight gradient of a strided
        # convolution on one pixel unwritten.
        return replace(self, shape=(self.shape[0], 32, 32), T=2, batch=2)


# The neurons of "Accelerating Spatiotemporal Supervised Training of Large-Scale Spiking Neural
# Networks on GPU".
_BPTT: dict[str, Any] = {"decay": 0.25, "threshold": 0.25, "surrogate": "rectangle"}
MNIST, CIFAR, IMAGENET = (1, 28, 28), (3, 32, 32), (3, 224, 224)
WORKLOADS: dict[str, Workload] = {
    **{
        f"resnet{depth}-{name}": Workload(f"resnet{depth}", shape)
        for name, shape in (("mnist", MNIST), ("cifar10", CIFAR))
        for depth in (18, 34, 50)
    },
    "conv-mnist": Workload("conv", MNIST),
    "resnet18-mnist-sgd": Workload("resnet18", MNIST, optimizer="sgd"),
    **{
        f"{size}-cifar10": Workload(f"cifar_{size}", CIFAR, T=10, batch=64, **_BPTT)
        for size in ("small", "medium", "large")
    },
    "resnet18-stem3": Workload("resnet18", CIFAR, T=4, batch=256, optimizer="sgd", stem="cifar"),
    "vgg-gesture": Workload("vggsnn", (2, 48, 48), 11, T=10, batch=64, optimizer="sgd"),
    "resnet18-gesture": Workload("resnet18", (2, 128, 128), num_classes=11, batch=10),
    "alexnet-imagenet": Workload("alexnet", IMAGENET, 1000, T=6, batch=16, **_BPTT),
    "resnet34-imagenet": Workload("ms_resnet34", IMAGENET, 1000, T=6, batch=16, **_BPTT),
}
USUAL = (
    "resnet18-mnist-sgd",
    "large-cifar10",
    "resnet18-stem3",
    "resnet18-gesture",
    "vgg-gesture",
)


class WorkloadTask(Task):
    """A workload in one precision on one device; the input is a Poisson encoding."""

    def __init__(self, workload: Workload, dtype: str, device: torch.device, seed: int = 0) -> None:
        self.workload, self.optimizer = workload, workload.optimizer
        options: dict[str, Any] = {"device": device}
        options["generator"] = torch.Generator(device).manual_seed(seed)
        size = (workload.T, workload.batch, *workload.shape)
        drawn = torch.rand(size, **options)
        steps = (drawn < torch.rand(size[1:], **options)).float().flatten(0, 1)
        x = steps.contiguous(memory_format=self.layout).unflatten(0, size[:2])
        labels = torch.randint(workload.num_classes, (workload.batch,), **options)
        super().__init__(x, labels, dtype)
        self.share(lambda: workload.network(workload.neuron), lambda net: sf.Temporal(net)(x))

    def network(self, activation: Callable[[], nn.Module], norms: bool = True) -> nn.Module:
        """Make the network with the shared weights and other activations."""
        with torch.device("meta"):
            net = self.workload.network(activation)
        for module in [] if norms else list(net.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.modules.batchnorm._BatchNorm):
                    setattr(module, name, nn.Identity())
        state = {name: self.state[name].clone() for name in net.state_dict()}
        net.load_state_dict(state, assign=True)
        return net


def spiking(
    task: WorkloadTask,
    fused: bool = False,
    policy: memory.Policy | None = None,
    impl: str = "auto",
    mode: str = "auto",
    wrap: Callable[[nn.Module], Callable[..., Tensor]] = lambda net: net,
) -> Network:
    """Make our network: a `Temporal` over ordinary torch modules.

    Args:
        mode: how a fused network runs its graphs, see `spikefuse.fuse`.
        wrap: applied to the container, such as DistributedDataParallel.
    """
    net = sf.Temporal(task.network(task.workload.neuron), policy)
    if fused:
        net = sf.fuse(net, mode)
    call = partial(wrap(net), impl=impl)
    if isinstance(policy, memory.Checkpoint) or mode == "inductor":
        equivalent = partial(spiking, task, fused=True)
        return Network(net.net, call, container=net, equivalent=equivalent)
    return Network(net.net, call, sf.LIF, exact=not fused, container=net)


def stateless(net: nn.Module, **options: Any) -> Network:
    """Fold time into the batch."""
    return Network(net, lambda x: net(x.flatten(0, 1)).unflatten(0, x.shape[:2]), **options)


def spikingjelly(task: WorkloadTask, precision: bool = False, **options: Any) -> Network:
    """Use SpikingJelly's function, with a float32 state or with explicit precision."""
    workload = task.workload
    same = workload.surrogate == "sigmoid"
    rival = jelly.Jelly(task.device, workload.decay, workload.threshold, sigmoid=same)
    function = rival.precision if precision else rival.function
    net = task.network(partial(jelly.Function, workload.T, function))
    missing = f"; without a {workload.surrogate} surrogate: PiecewiseQuadratic instead"
    note = rival.note + ("" if same else missing)
    return stateless(net, neuron=jelly.Function, note=note, same_gradient=same, **options)


def compiled(
    make: Callable[[WorkloadTask], Network], task: WorkloadTask, mode: str = "default"
) -> Network:
    """Compile a network."""
    network = make(task)
    run = torch.compile(network.call, fullgraph=True, mode=mode)

    def call(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return run(x)

    return replace(
        network, call=call, neuron=None, equivalent=partial(make, task), flips_spikes=True
    )


def relu(task: WorkloadTask) -> Network:
    return stateless(task.network(nn.ReLU))


precise = partial(spikingjelly, precision=True)


class Group(nn.Sequential):
    """A layer, its norm and its neurons."""


def checkpointed(task: WorkloadTask, level: int) -> Network:
    """Let SpikingJelly's `memopt` choose what to recompute and which spikes to store as bits.

    It may recompute residual blocks, and each other layer with its norm and neurons. Time cannot be
    split, as it is folded into the batch; level 4 measures which blocks it need not recompute.
    """
    (memopt,) = jelly.spikingjelly("memopt")
    network = precise(task)
    groups: list[nn.Module] = []
    for module in network.net.children():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | jelly.Function):
            groups[-1] = Group(*(groups[-1] if isinstance(groups[-1], Group) else groups[-1:]))
            groups[-1].append(module)
        else:
            groups.append(module)
    net = nn.Sequential(*groups).train()

    def example(net: nn.Module) -> Tensor:
        with task.autocast():
            return net(task.x.flatten(0, 1))

    targets = (Group, blocks.Residual)
    memopt.optimize_memory(net, targets, example, level=level, can_chunk=lambda module: False)
    task.restore(network.net)
    call = stateless(net).call
    equivalent = partial(precise, task)
    return replace(network, call=call, neuron=None, equivalent=equivalent)


NUM_USUAL = 12
# A network that cannot be made raises an exception with the reason.
NETWORKS: dict[str, Callable[[WorkloadTask], Network]] = {
    FUSED: partial(spiking, fused=True),
    OURS: spiking,
    INDUCTOR: partial(spiking, fused=True, mode="inductor"),
    jelly.FUNCTION: spikingjelly,
    jelly.PRECISION: precise,
    JELLY_COMPILED: partial(compiled, precise),
    **{name: partial(checkpointed, level=level) for level, name in JELLY_MEMORY.items()},
    RELU: relu,
    COMPILED: partial(compiled, relu),
    REDUCED: partial(compiled, relu, mode="reduce-overhead"),
    CONVOLUTIONS: lambda task: stateless(task.network(nn.Identity, norms=False)),
    LOOP: partial(spiking, impl="reference"),
    **{
        f"{FUSED}, {name}": partial(spiking, fused=True, policy=policy)
        for name, policy in memory.POLICIES.items()
        if policy != memory.Recompute()
    },
}


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("networks", __doc__, rounds=5)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="WORKLOAD",
                        help=f"of {', '.join(WORKLOADS)} ({', '.join(USUAL)})")  # fmt: skip
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=["training"])
    parser.add_argument("--T", nargs="+", type=int, default=[None], help="other time steps")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, metavar="NETWORK",
                        help=f"of {'; '.join(NETWORKS)} (the first {NUM_USUAL})")  # fmt: skip
    args = runner.parse(parser, argv)
    names = args.workloads or (["conv-mnist"] if args.quick else USUAL)
    slow = (INDUCTOR, JELLY_COMPILED, COMPILED, REDUCED) if args.quick else ()
    usual = [n for n in list(NETWORKS)[:NUM_USUAL] if n not in slow]
    args.networks = args.networks or usual
    timing, device = Timing.of(args, whole_steps=True), torch.device(args.device)

    def case(name: str, T: int | None, dtype: str, kind: str) -> tuple[str, Callable[[], Record]]:
        label = name if T is None else f"{name}, T = {T}"
        workload = replace(WORKLOADS[name], T=T or WORKLOADS[name].T)
        workload = workload.small() if args.quick else workload
        about = {"workload": label, "steps": kind, "dtype": dtype}
        run = partial(measure_network, args.networks, timing, workload, device, about)
        return f"{label}, {dtype}, {kind}", run

    with cudnn_search(device):
        cases = itertools.product(names, args.T, args.dtype, args.steps)
        return runner.run_cases(args, itertools.starmap(case, cases))


def measure_network(
    names: list[str], timing: Timing, workload: Workload, device: torch.device, about: Record
) -> Record:
    """Verify and time the step of several networks."""
    task, kind = WorkloadTask(workload, about["dtype"], device), about["steps"]
    reference = NetworkReference(task, kind, spiking(task, impl="reference"))
    agreements: dict[str, Agreement] = {}
    networks: dict[str, Network] = {}  # by contender
    contenders: dict[str, tuple[str, str, Contender]] = {}
    for name in names:
        reason = ""
        try:
            agreements[name] = Agreement(task, kind, NETWORKS[name], reference)
        except Exception as error:  # the others are still measured
            reason = first_line(error)
        ways = STEP_WAYS if name.startswith(OURS) else WAYS
        for way in (EAGER,) if name in REPLAYED else ways:
            title = f"{name}, {way}"
            contender = Contender(title, unavailable=reason)
            if not reason:
                network = networks[title] = NETWORKS[name](task)
                step = STEPS[kind](task, network)
                inputs, parts = (task.x, task.labels), (network.net,)
                contender = contender_of(title, way, step, inputs, device, parts)
                contender.note = network.note
            contenders[title] = name, way, contender
    del reference  # its spikes are no longer needed

    def verify(contender: Contender, found: tuple[Tensor, Tensor | None]) -> None:
        result = networks[contender.name].result(found)
        agreements[contenders[contender.name][0]].verify(result)

    def prepare() -> None:
        for network in networks.values():
            task.restore(network.net)

    measured = measure([c for _, _, c in contenders.values()], verify, timing, prepare=prepare)
    for found in measured["contenders"]:
        found["network"], found["way"], _ = contenders[found["name"]]
        if (network := networks.get(found["name"])) is not None and network.fusion:
            found["note"] = network.fusion
    sizes = {"model": workload.model, "T": workload.T, "batch": workload.batch}
    differences = {name: agreement.about() for name, agreement in agreements.items()}
    about = about | sizes | {"optimizer": workload.optimizer, "agreement": differences}
    return about | {"contenders": measured["contenders"]}


if __name__ == "__main__":
    main()
