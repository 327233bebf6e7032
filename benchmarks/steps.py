"""Whole training and evaluation steps of whole networks: who computes them, and what is computed.

Shape legend: T time steps, B samples, K classes.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import layer, lif
from benchmarks.workloads import Task, Workload
from spikefuse import memory

OURS, EAGER = layer.OURS, layer.EAGER
FUSED = f"{OURS}, fused"
RELU, CONVOLUTIONS = "ReLU and batch norm", "convolutions alone"
RIVAL_HALF = "SpikingJelly function, bfloat16 kept"
RIVALS = (*lif.RIVALS, RIVAL_HALF)

EAGERLY, GRAPH = "eager", "CUDA graph"
WAYS = (EAGERLY, GRAPH)
NO_GRAPHS = "CUDA graphs need a CUDA GPU"

# So small that the weights, and with them the spikes, hardly change while a step is timed.
LEARNING_RATE = 1e-5
MOMENTUM = 0.9
# Steps before a recording: they compile kernels, choose algorithms and make the optimizer's state.
STEPS_BEFORE_GRAPH = 3

R = TypeVar("R")


@dataclass
class Result:
    """What a step gives: logits `[B, K]`; in training the loss and the gradients too."""

    logits: Tensor
    loss: Tensor | None = None
    grads: tuple[Tensor, ...] = ()


@dataclass
class Network:
    """A contender's network.

    Args:
        net: for one time step.
        call: the same over all steps, `[T, B, C, H, W]` to `[T, B, K]`.
        neuron: the kind of its modules that spike, `[T*B, ...]` to the same; None: none does.
        exact: whether its spikes are the reference's bit for bit.
        note: what its users should know.
        same_gradient: whether its surrogate is the reference's.
        like: makes a network that computes the same, where neurons can't be told what to hand on.
    """

    net: nn.Module
    call: Callable[[Tensor], Tensor]
    neuron: type[nn.Module] | None = None
    exact: bool = False
    note: str = ""
    same_gradient: bool = True
    like: Callable[[], Network] | None = None


# Who computes it


def spiking(
    task: Task,
    fused: bool = False,
    policy: memory.Policy | None = None,
    impl: str = "auto",
    threshold: float = 1.0,
    shared: Callable[[nn.Module], Callable[..., Tensor]] = lambda net: net,
) -> Network:
    """As users write it: the container over a network of torch modules.

    Args:
        fused: with batch norms and neurons as one.
        threshold: a factor of the neurons'.
        shared: what is called in place of the container, such as DistributedDataParallel of it.
    """
    net = sf.Temporal(task.network(functools.partial(task.workload.neuron, threshold)), policy)
    note = ""
    if fused:
        net = sf.fuse(net)
        note = net.fusion.summary
    call = functools.partial(shared(net), impl=impl)
    if isinstance(policy, memory.Checkpoint):
        like = functools.partial(spiking, task, fused=True)
        return Network(net.net, call, note=note, like=like)
    return Network(net.net, call, sf.LIF, exact=not fused, note=note)


def relu(task: Task) -> Network:
    return _stateless(task.network(nn.ReLU))


def convolutions(task: Task) -> Network:
    """Norms and neurons left out."""
    return _stateless(task.network(nn.Identity, norms=False))


def _stateless(net: nn.Module, **more: Any) -> Network:
    return Network(net, lambda x: net(x.flatten(0, 1)).unflatten(0, x.shape[:2]), **more)


class JellyFunction(nn.Module):
    """A function of SpikingJelly's kind on `[T, M]`: a view of the folded tensor in its own order
    in memory.

    Args:
        T: time steps.
        function: of a sequence and a state.
    """

    def __init__(self, T: int, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.T, self.function = T, function
        self.rest: dict[int, Tensor] = {}  # made once: not part of its time

    def forward(self, x: Tensor) -> Tensor:
        last = not x.is_contiguous()
        rows = x.movedim(1, -1) if last else x
        flat = rows.view(self.T, -1)
        size = flat.shape[1]
        if size not in self.rest:
            self.rest[size] = torch.zeros(size, device=x.device)
        spikes = self.function(flat, self.rest[size]).view(rows.shape)
        return spikes.movedim(-1, 1) if last else spikes


def jelly_function(task: Task, **more: Any) -> Network:
    functional, _, surrogates = lif.spikingjelly()
    constants, surrogate = _jelly_constants(task.workload, surrogates)
    note = "; ".join([lif.implementation(functional, task.device), *surrogate])

    def function(x: Tensor, rest: Tensor) -> Tensor:
        return functional.lif_multi_step(x, rest, **constants, **more)[0]

    net = task.network(functools.partial(JellyFunction, task.workload.T, function))
    return _stateless(net, neuron=JellyFunction, note=note, same_gradient=not surrogate)


def jelly_half(task: Task) -> Network:
    """The function with the potentials for backward kept in bfloat16."""
    if task.dtype != "bfloat16":
        raise ValueError("for bfloat16 only")
    return jelly_function(task, neuron_storage=torch.bfloat16)


class JellyNode(nn.Module):
    """SpikingJelly's module on the folded tensor."""

    def __init__(self, T: int, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.T, self.node = T, make()

    def forward(self, x: Tensor) -> Tensor:
        return self.node(x.unflatten(0, (self.T, -1))).flatten(0, 1)


def jelly_node(task: Task) -> Network:
    if task.dtype != "float32":
        # It keeps its state in the dtype of its input.
        raise ValueError(f"its state would be {task.dtype}, for which it has an eager loop only")
    functional, neurons, surrogates = lif.spikingjelly()
    constants, surrogate = _jelly_constants(task.workload, surrogates)
    note = "; ".join([lif.implementation(functional, task.device), *surrogate])
    make = functools.partial(neurons.LIFNode, **constants, step_mode="m")
    net = task.network(lambda: JellyNode(task.workload.T, make))

    def call(x: Tensor) -> Tensor:
        y = net(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        functional.reset_net(net)
        return y

    return Network(net, call, JellyNode, note=note, same_gradient=not surrogate)


def _jelly_constants(workload: Workload, surrogates: Any) -> tuple[dict[str, Any], list[str]]:
    """The arguments of its neurons, and what differs, for a note."""
    note = []
    if workload.surrogate == "sigmoid":
        surrogate = surrogates.Sigmoid(alpha=lif.WIDTH)
    else:
        # The cheapest of those in its kernels.
        surrogate = surrogates.PiecewiseQuadratic(alpha=1.0)
        note.append(f"without a {workload.surrogate} surrogate: PiecewiseQuadratic instead")
    constants = lif.constants(surrogate, workload.decay, workload.threshold)
    return constants, note


@functools.cache
def compiled_loop(decay: float, threshold: float) -> Callable[[Tensor, Tensor], Tensor]:
    """LIF neurons as users write them, by torch.compile for any number of them; forward only."""

    def loop(x: Tensor, v: Tensor) -> Tensor:
        spikes = []
        for current in x.unbind(0):
            h = decay * v + current
            s = (h >= threshold).to(torch.float32)
            v = h * (1 - s)
            spikes.append(s.to(x.dtype))
        return torch.stack(spikes)

    return torch.compile(loop, fullgraph=True, dynamic=True)


def compiled(task: Task) -> Network:
    loop = compiled_loop(task.workload.decay, task.workload.threshold)
    net = task.network(functools.partial(JellyFunction, task.workload.T, loop))
    return _stateless(net, neuron=JellyFunction)


# The fused network by the memory policies that are not the default.
POLICIES = {
    f"{FUSED}, {name}": policy
    for name, policy in memory.POLICIES.items()
    if policy != memory.Recompute()
}
CHECKPOINT = f"{FUSED}, checkpoint"
# By name; a network that cannot be made says why in an exception.
NETWORKS: dict[str, Callable[[Task], Network]] = {
    FUSED: functools.partial(spiking, fused=True),
    OURS: spiking,
    lif.RIVAL_FUNCTION: jelly_function,
    lif.RIVAL_NODE: jelly_node,
    RIVAL_HALF: jelly_half,
    RELU: relu,
    CONVOLUTIONS: convolutions,
    EAGER: functools.partial(spiking, impl="reference"),
    lif.COMPILED: compiled,
    **{name: functools.partial(spiking, fused=True, policy=p) for name, p in POLICIES.items()},
}
# The first autotunes a kernel for every layer, which takes minutes; the second is slow; the third
# has no gradients.
ONLY_IF_ASKED = (RIVAL_HALF, EAGER, lif.COMPILED, *POLICIES)


# What they compute


def make_optimizer(workload: Workload, net: nn.Module, device: torch.device) -> Any:
    if workload.optimizer == "sgd":
        return torch.optim.SGD(net.parameters(), LEARNING_RATE, MOMENTUM, fused=True)
    capturable = device.type == "cuda"
    return torch.optim.Adam(net.parameters(), LEARNING_RATE, fused=True, capturable=capturable)


def training(task: Task, network: Network) -> Callable[[], Result]:
    """A whole training step; between steps there are no gradients."""
    network.net.train()
    parameters = tuple(network.net.parameters())
    optimizer = make_optimizer(task.workload, network.net, task.device)

    def step() -> Result:
        with task.autocast():  # all of it, as the trainer does
            logits = network.call(task.x).mean(0, dtype=torch.float32)
            loss = F.cross_entropy(logits, task.labels)
            loss.backward()
            grads = tuple(p.grad for p in parameters if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
        return Result(logits.detach(), loss.detach(), grads)

    return step


def evaluation(task: Task, network: Network) -> Callable[[], Result]:
    """The logits of a batch and its classes."""
    network.net.eval()

    def step() -> Result:
        with torch.no_grad(), task.autocast():
            logits = network.call(task.x).mean(0, dtype=torch.float32)
            logits.argmax(1)
        return Result(logits)

    return step


def forward(task: Task, network: Network) -> Callable[[], Result]:
    """Evaluation with the statistics of the batch, as in forward of training."""
    step = evaluation(task, network)
    network.net.train()
    return step


STEPS: dict[str, Callable[[Task, Network], Callable[[], Result]]] = {
    "training": training,
    "evaluation": evaluation,
    "forward": forward,
}


def graphed(
    step: Callable[[], R], steps_before: int = STEPS_BEFORE_GRAPH
) -> tuple[Callable[[], R], int]:
    """A step as the replay of a CUDA graph, and the bytes that the graph holds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(steps_before):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as NCCL's, are not part of this.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = step()
    return Replay(graph, result, step), torch.cuda.memory_reserved() - before


@dataclass
class Replay(Generic[R]):
    """A recorded step; `step` holds what the recording uses, such as the optimizer's state."""

    graph: torch.cuda.CUDAGraph
    result: R
    step: Callable[[], R]

    def __call__(self) -> R:
        self.graph.replay()
        return self.result
