"""Training and evaluation steps of whole networks: workloads, contenders, and what a step does.

Shapes: T time steps, B samples, K classes.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import layers
from benchmarks.layers import DTYPES, JELLY_FUNCTION, JELLY_NODE, LOOP, OURS
from benchmarks.runner import EAGER, GRAPH, Contender, first_line
from spikefuse import memory
from spikefuse.models import MODELS

FUSED = f"{OURS}, fused"
RELU, CONVOLUTIONS = "ReLU and batch norm", "convolutions alone"
WAYS = (EAGER, GRAPH)
NO_GRAPHS = "CUDA graphs need a CUDA GPU"
# So small that weights, and with them spikes, hardly change while a step is timed.
LEARNING_RATE = 1e-5
# Steps before a graph is recorded: they compile kernels, choose algorithms, create the optimizer's
# state, and let DistributedDataParallel arrange its buckets.
STEPS_BEFORE_GRAPH = 11

SURROGATES: dict[str, Callable[[], sf.surrogate.Surrogate]] = {
    "sigmoid": lambda: sf.surrogate.Sigmoid(layers.WIDTH),
    "rectangle": sf.surrogate.Rectangle,
}


@dataclass(frozen=True)
class Workload:
    """One of `spikefuse.models`, its neurons and its input; `shape` is C, H, W.

    By default the neurons are those of "Towards Scalable GPU-Accelerated SNN Training via Temporal
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

    def neuron(self, factor: float = 1.0) -> sf.LIF:
        """Make a neuron with its threshold multiplied by `factor`."""
        surrogate = SURROGATES[self.surrogate]()
        return sf.LIF(self.decay, self.threshold * factor, surrogate=surrogate)

    def network(self, activation: Callable[[], nn.Module]) -> nn.Module:
        """Make the network for one time step, `[B, C, H, W]` to `[B, K]`."""
        return MODELS[self.model](activation, self.shape[0], self.num_classes, self.shape[1:])

    def small(self) -> Workload:
        """Return a small one for quick runs."""
        # With smaller images, oneDNN leaves part of the bfloat16 weight gradient of a strided
        # convolution on one pixel unwritten.
        return replace(self, shape=(self.shape[0], 32, 32), T=2, batch=2)


# The neurons of "Accelerating Spatiotemporal Supervised Training of Large-Scale Spiking Neural
# Networks on GPU".
_BPTT: dict[str, Any] = {"decay": 0.25, "threshold": 0.25, "surrogate": "rectangle"}
MNIST, CIFAR, IMAGENET = (1, 28, 28), (3, 32, 32), (3, 224, 224)
RESNETS = {
    f"resnet{depth}-{name}": Workload(f"resnet{depth}", shape)
    for name, shape in (("mnist", MNIST), ("cifar10", CIFAR))
    for depth in (18, 34, 50)
}
WORKLOADS: dict[str, Workload] = {
    **RESNETS,
    "conv-mnist": Workload("conv", MNIST),
    "resnet18-mnist-sgd": Workload("resnet18", MNIST, optimizer="sgd"),
    **{
        f"{size}-cifar10": Workload(f"cifar_{size}", CIFAR, T=10, batch=64, **_BPTT)
        for size in ("small", "medium", "large")
    },
    "resnet18-gesture": Workload("resnet18", (2, 128, 128), num_classes=11, batch=10),
    "alexnet-imagenet": Workload("alexnet", IMAGENET, 1000, T=6, batch=16, **_BPTT),
    "resnet34-imagenet": Workload("ms_resnet34", IMAGENET, 1000, T=6, batch=16, **_BPTT),
}


class Task:
    """A workload in one precision on one device, with the weights and batch that all share.

    Weights are channels-last. The input is a Poisson encoding of random images. Running statistics
    are those of the batch.
    """

    def __init__(self, workload: Workload, dtype: str, device: torch.device, seed: int = 0) -> None:
        self.workload, self.dtype, self.device = workload, dtype, device
        generator = torch.Generator(device).manual_seed(seed)
        size = (workload.T, workload.batch, *workload.shape)
        drawn = torch.rand(size, generator=generator, device=device)
        rates = torch.rand(size[1:], generator=generator, device=device)
        steps = (drawn < rates).float().flatten(0, 1)
        self.x = steps.contiguous(memory_format=torch.channels_last).unflatten(0, size[:2])
        self.labels = torch.randint(
            workload.num_classes, (workload.batch,), generator=generator, device=device
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same weights in every process
            net = workload.network(workload.neuron)
        net.to(device, memory_format=torch.channels_last)
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = 1.0
        with torch.no_grad(), self.autocast():
            sf.Temporal(net)(self.x)
        self.state = {name: value.clone() for name, value in net.state_dict().items()}

    def autocast(self) -> torch.autocast:
        enabled = DTYPES[self.dtype] is torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def network(self, activation: Callable[[], nn.Module], norms: bool = True) -> nn.Module:
        """Make the network with the shared weights and other activations."""
        with torch.device("meta"):
            net = self.workload.network(activation)
        if not norms:
            remove_norms(net)
        state = {name: self.state[name].clone() for name in net.state_dict()}
        net.load_state_dict(state, assign=True)
        return net

    def restore(self, net: nn.Module) -> None:
        """Copy the shared weights back into a network."""
        with torch.no_grad():
            for name, value in net.state_dict().items():
                value.copy_(self.state[name])


def remove_norms(net: nn.Module) -> None:
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(module, name, nn.Identity())


@dataclass
class StepResult:
    """Logits `[B, K]`; in training also the loss and the gradients."""

    logits: Tensor
    loss: Tensor | None = None
    grads: tuple[Tensor, ...] = ()


@dataclass
class Network:
    """A contender's network.

    Args:
        net: for one time step.
        call: over all time steps, `[T, B, C, H, W]` to `[T, B, K]`.
        neuron: type of its spiking modules, `[T*B, ...]` to the same; None if there are none.
        exact: whether its spikes equal the reference's bit for bit.
        note: shown below tables.
        same_gradient: whether it has the reference's surrogate.
        like: makes a network that computes the same, if its neurons' spikes cannot be replaced.
    """

    net: nn.Module
    call: Callable[[Tensor], Tensor]
    neuron: type[nn.Module] | None = None
    exact: bool = False
    note: str = ""
    same_gradient: bool = True
    like: Callable[[], Network] | None = None


# Contenders


def spiking(
    task: Task,
    fused: bool = False,
    policy: memory.Policy | None = None,
    impl: str = "auto",
    threshold: float = 1.0,
    wrap: Callable[[nn.Module], Callable[..., Tensor]] = lambda net: net,
) -> Network:
    """Make our network: a `Temporal` over ordinary torch modules.

    Args:
        threshold: factor of the neurons' threshold.
        wrap: applied to the container, such as DistributedDataParallel.
    """
    net = sf.Temporal(task.network(functools.partial(task.workload.neuron, threshold)), policy)
    note = ""
    if fused:
        net = sf.fuse(net)
        note = net.fusion.summary
    call = functools.partial(wrap(net), impl=impl)
    if isinstance(policy, memory.Checkpoint):
        like = functools.partial(spiking, task, fused=True)
        return Network(net.net, call, note=note, like=like)
    return Network(net.net, call, sf.LIF, exact=not fused, note=note)


def stateless(net: nn.Module, **options: Any) -> Network:
    """Fold time into the batch."""
    return Network(net, lambda x: net(x.flatten(0, 1)).unflatten(0, x.shape[:2]), **options)


def relu(task: Task) -> Network:
    return stateless(task.network(nn.ReLU))


def convolutions(task: Task) -> Network:
    return stateless(task.network(nn.Identity, norms=False))


class JellyFunction(nn.Module):
    """A function of (sequence `[T, M]`, state) on a view of the folded tensor `[T*B, ...]`."""

    def __init__(self, T: int, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.T, self.function = T, function
        self.rest: dict[int, Tensor] = {}  # made once, not timed

    def forward(self, x: Tensor) -> Tensor:
        channels_last = not x.is_contiguous()
        rows = x.movedim(1, -1) if channels_last else x
        flat = rows.view(self.T, -1)
        size = flat.shape[1]
        if size not in self.rest:
            self.rest[size] = torch.zeros(size, device=x.device)
        spikes = self.function(flat, self.rest[size]).view(rows.shape)
        return spikes.movedim(-1, 1) if channels_last else spikes


def jelly_function(task: Task) -> Network:
    """Use SpikingJelly's function with a float32 state, its fastest path in both precisions."""
    functional, constants, options = _jelly(task)

    def function(x: Tensor, rest: Tensor) -> Tensor:
        return functional.lif_multi_step(x, rest, **constants)[0]

    net = task.network(functools.partial(JellyFunction, task.workload.T, function))
    return stateless(net, neuron=JellyFunction, **options)


class JellyNode(nn.Module):
    """SpikingJelly's module on the folded tensor."""

    def __init__(self, T: int, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.T, self.node = T, make()

    def forward(self, x: Tensor) -> Tensor:
        return self.node(x.unflatten(0, (self.T, -1))).flatten(0, 1)


def jelly_node(task: Task) -> Network:
    """Use SpikingJelly's modules, as its users do.

    Raises:
        ValueError: in bfloat16, in which its state would be bfloat16 too.
    """
    if task.dtype != "float32":
        raise ValueError(f"with a {task.dtype} state it has only an eager loop")
    functional, constants, options = _jelly(task)
    (neurons,) = layers.spikingjelly("neuron")
    make = functools.partial(neurons.LIFNode, **constants, step_mode="m")
    net = task.network(lambda: JellyNode(task.workload.T, make))

    def call(x: Tensor) -> Tensor:
        y = net(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        functional.reset_net(net)
        return y

    return Network(net, call, JellyNode, **options)


def _jelly(task: Task) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return its functions, the arguments of its neurons, and options of `Network`."""
    functional, surrogates = layers.spikingjelly("functional", "surrogate")
    workload, note = task.workload, layers.jelly_implementation(functional, task.device)
    same = workload.surrogate == "sigmoid"
    if same:
        surrogate = surrogates.Sigmoid(alpha=layers.WIDTH)
    else:  # the cheapest surrogate of its kernels
        surrogate = surrogates.PiecewiseQuadratic(alpha=1.0)
        note += f"; without a {workload.surrogate} surrogate: PiecewiseQuadratic instead"
    constants = layers.jelly_constants(surrogate, workload.decay, workload.threshold)
    return functional, constants, {"note": note, "same_gradient": same}


# The fused network with each memory policy but the default.
POLICIES = {
    f"{FUSED}, {name}": policy
    for name, policy in memory.POLICIES.items()
    if policy != memory.Recompute()
}
# A network that cannot be made raises an exception with the reason.
NETWORKS: dict[str, Callable[[Task], Network]] = {
    FUSED: functools.partial(spiking, fused=True),
    OURS: spiking,
    JELLY_FUNCTION: jelly_function,
    JELLY_NODE: jelly_node,
    RELU: relu,
    CONVOLUTIONS: convolutions,
    LOOP: functools.partial(spiking, impl="reference"),
    **{name: functools.partial(spiking, fused=True, policy=p) for name, p in POLICIES.items()},
}
OPTIONAL = (LOOP, *POLICIES)  # slow or rarely needed


# Steps


def training(task: Task, network: Network) -> Callable[[], StepResult]:
    """Return a training step: forward, loss, backward, optimizer."""
    network.net.train()
    parameters = tuple(network.net.parameters())
    if task.workload.optimizer == "sgd":
        optimizer: Any = torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9, fused=True)
    else:
        capturable = task.device.type == "cuda"
        optimizer = torch.optim.Adam(parameters, LEARNING_RATE, fused=True, capturable=capturable)

    def step() -> StepResult:
        with task.autocast():  # around the whole step, as in the trainer
            logits = network.call(task.x).mean(0, dtype=torch.float32)
            loss = F.cross_entropy(logits, task.labels)
            loss.backward()
            grads = tuple(p.grad for p in parameters if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
        return StepResult(logits.detach(), loss.detach(), grads)

    return step


def evaluation(task: Task, network: Network) -> Callable[[], StepResult]:
    """Return an evaluation step: forward without gradients, classes."""
    network.net.eval()

    def step() -> StepResult:
        with torch.no_grad(), task.autocast():
            logits = network.call(task.x).mean(0, dtype=torch.float32)
            logits.argmax(1)
        return StepResult(logits)

    return step


STEPS: dict[str, Callable[[Task, Network], Callable[[], StepResult]]] = {
    "training": training,
    "evaluation": evaluation,
}


@dataclass
class Replay:
    """A recorded step; `step` keeps alive what the graph uses, such as the optimizer's state."""

    graph: torch.cuda.CUDAGraph
    result: Any
    step: Callable[[], Any]

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result


def record_graph(step: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
    """Record a step as a CUDA graph; return its replay and the bytes that the graph holds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(STEPS_BEFORE_GRAPH):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's, are not recorded.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = step()
    return Replay(graph, result, step), torch.cuda.memory_reserved() - before


def graph_contender(name: str, step: Callable[[], Any], device: torch.device) -> Contender:
    """Return the replay of a step as a contender, or the reason why there is none."""
    if device.type != "cuda":
        return Contender(name, unavailable=NO_GRAPHS)
    try:
        run, held = record_graph(step)
    except Exception as error:
        return Contender(name, unavailable=first_line(error))
    return Contender(name, run, held_bytes=held)
