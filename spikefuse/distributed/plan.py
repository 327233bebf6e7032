"""Choose how many ranks share a sequence, from measurements of the network and its connections.

Li et al., "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion", Eqs. 4 and 5,
predict T_s / k + (k - 1) T_c seconds on k ranks, where T_s is the time on one rank and T_c the time
of an exchange. In addition, part of a step's time here does not shrink with the number of time
steps, and each rank lags behind the previous one: by the scan of one chunk of the batch and its
exchange, or by a repair and an exchange if it scans speculatively. If batch norms with exact
statistics synchronize the ranks at each layer, the lags of layers add up; otherwise only the
longest counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spikefuse.distributed.mesh import split_batch
from spikefuse.distributed.time_sharding import import_dynamo
from spikefuse.kernels.norm import BatchNorm
from spikefuse.memory.policies import Checkpoint
from spikefuse.neurons.definition import Neuron
from spikefuse.nn import Temporal
from spikefuse.nn import neuron as neuron_module
from spikefuse.nn.call import Observer, Scan, observing
from spikefuse.nn.neuron import scan_neuron
from spikefuse.scan import op
from spikefuse.scan.program import program
from spikefuse.scan.records import Arguments, Results, Wanted
from spikefuse.scan.state_passing import Buffers, Channel, StatePassing

DEVICE = "cuda"  # steps are measured as CUDA graphs
WARMUP, REPETITIONS = 2, 5
TURNS = 8  # exchanges per measurement: the time of a single one is mostly host overhead
CHUNKS = 4  # of the scan that measures the overhead of a chunk


class ScanCost(NamedTuple):
    """Cost of one neuron layer on the whole batch, forward and backward together."""

    scan: float  # seconds over all time steps
    per_chunk: float  # overhead in seconds of each additional chunk of the batch
    state_bytes: int  # bytes sent in each direction
    repair: float = math.inf  # seconds to repair a speculative scan; infinite without support


class Option(NamedTuple):
    """One way to share the work, and the predicted time of a training step."""

    data: int  # ranks that share a batch
    time: int  # ranks that share a sequence
    chunks: int
    speculate: bool
    seconds: float
    speedup: float  # over one rank


@dataclass(frozen=True)
class Plan:
    """Measurements of a training step on the whole input, and predictions from them.

    Args:
        num_ranks: number of ranks of the mesh.
        batch: number of samples of all ranks together.
        fixed: seconds of a step that do not shrink with the input.
        scaled: seconds of a step that shrink with the input.
        layers: the costs of the neuron layers.
        latency: seconds until an exchange with a neighbour begins.
        bandwidth: bytes per second of an exchange with a neighbour.
        barriers: number of batch norms with exact statistics.
        barrier: seconds that one of them needs to exchange statistics, forward and backward.
    """

    num_ranks: int
    batch: int
    fixed: float
    scaled: float
    layers: list[ScanCost]
    latency: float
    bandwidth: float
    barriers: int = 0
    barrier: float = 0.0

    @property
    def whole(self) -> float:
        """T_s: seconds of a step on one rank."""
        return self.fixed + self.scaled

    @property
    def exchange(self) -> float:
        """T_c: seconds to exchange the largest state, in both directions."""
        return self._exchange(max((layer.state_bytes for layer in self.layers), default=0))

    @property
    def best_by_paper(self) -> float:
        """The number of ranks that maximizes Eq. 5, sqrt(T_s / T_c)."""
        return math.sqrt(self.whole / self.exchange)

    def speedup_by_paper(self, ranks: int) -> float:
        """Predict the speed-up by Eq. 5: k T_s / (k (k - 1) T_c + T_s)."""
        return ranks * self.whole / (ranks * (ranks - 1) * self.exchange + self.whole)

    @cached_property
    def options(self) -> list[Option]:
        """The fastest option for each number of ranks that share the sequence."""
        sizes = range(1, self.num_ranks + 1)
        return [self._best_of(time) for time in sizes if self.num_ranks % time == 0]

    @property
    def best(self) -> Option:
        """The fastest option."""
        return min(self.options, key=attrgetter("seconds"))

    def seconds(self, time: int, chunks: int, data: int = 1, speculate: bool = True) -> float:
        """Predict the time of a training step, in seconds.

        Args:
            time: ranks that share a sequence.
            chunks: microbatches in which states are sent.
            data: ranks that share a batch.
            speculate: whether ranks scan speculatively where they can.
        """
        total = self.fixed + self.scaled / (time * data)
        if time == 1:
            return total
        lags = []
        for layer in self.layers:
            lag = layer.scan / (time * data * chunks) + layer.per_chunk
            total += (chunks - 1) * layer.per_chunk
            if speculate and layer.repair < math.inf:
                lag = layer.repair
                total += chunks * layer.repair
            lags.append(lag + self._exchange(layer.state_bytes / (data * chunks)))
        waits = sum(lags) if self.barriers else max(lags, default=0.0)
        return total + (time - 1) * waits + self.barriers * self.barrier

    def _exchange(self, num_bytes: float) -> float:
        return 2 * (self.latency + num_bytes / self.bandwidth)

    def _best_of(self, time: int) -> Option:
        data, options = self.num_ranks // time, []
        # Of equally fast options, the first one is recommended.
        for speculate in (False, True):
            for chunks in (2**i for i in range(max(1, self.batch // data).bit_length())):
                seconds = self.seconds(time, chunks, data, speculate)
                speedup = self.whole / seconds
                options.append(Option(data, time, chunks, speculate, seconds, speedup))
        return min(options, key=attrgetter("seconds"))

    def __str__(self) -> str:
        lines = [
            f"a step takes {1e3 * self.whole:.2f} ms on one rank, an exchange "
            f"{1e3 * self.exchange:.3f} ms; Eq. 5 is best on {self.best_by_paper:.1f} ranks",
            "data  time  chunks  speculate        ms  speed-up  by Eq. 5",
        ]
        for o in self.options:
            lines.append(
                f"{o.data:4}  {o.time:4}  {o.chunks:6}  {'yes' if o.speculate else 'no':>9}  "
                f"{1e3 * o.seconds:8.2f}  {o.speedup:8.2f}  {self.speedup_by_paper(o.time):8.2f}"
                f"{'  <- best' if o is self.best else ''}"
            )
        return "\n".join(lines)


def plan(model: nn.Module, example: Tensor, mesh: DeviceMesh, statistics: str = "exact") -> Plan:
    """Predict the time of training steps that share their work among the ranks of `mesh`.

    Every rank must call it; all ranks get the same plan. Steps, scans and exchanges are measured as
    replays of CUDA graphs, and the plan predicts replays. At most two ranks' shares of `example`
    run. Running statistics change, gradients do not. Repairs are measured on inputs that make
    neurons fire; quiet inputs take longer. With `Checkpoint` ranks do not speculate, and the lag is
    an estimate.

    Args:
        model: contains a `Temporal`, fused or not, and is not sharded yet.
        example: the input of the whole job, `[T, B, ...]`, on a GPU; may be an expanded tensor.
        mesh: at least two ranks.
        statistics: of batch norms in training, as in `shard_time`.

    Returns:
        The measurements. `best` is the fastest option; `print` shows a table of all `options`.

    Raises:
        ValueError: the model is sharded already, the mesh has a single rank, the example has fewer
            steps than there are ranks, or it is not on a GPU.
    """
    containers = [m for m in model.modules() if isinstance(m, Temporal)]
    if any(container.passing is not None for container in containers):
        raise ValueError("the model's time is sharded already: make a plan before shard_time")
    num_ranks, num_steps = mesh.size(), len(example)
    if num_ranks < 2 or num_steps < num_ranks:
        given = f"{num_ranks} ranks and {num_steps} steps"
        raise ValueError(f"{given}: a plan needs two ranks, and a step for each")
    if example.device.type != DEVICE:
        raise ValueError(f"example is on {example.device}: CUDA graphs need a CUDA GPU")
    import_dynamo()
    share = num_steps // num_ranks
    scale = num_steps / share
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]

    def step(x: Tensor) -> None:
        leaves = parameters or [x.detach().requires_grad_()]
        y = model(x if parameters else leaves[0])
        torch.autograd.grad(y.sum(), leaves, allow_unused=True)

    one, two = (_measure(partial(step, example[: share * n])) for n in (1, 2))
    observer = _NeuronInputs(example[:share])
    with torch.no_grad(), observing(observer):
        model(example[:share])
    layers = [_measure_scan(neuron, inputs, scale) for neuron, inputs in observer.found]
    if any(isinstance(container.memory, Checkpoint) for container in containers):
        layers = [layer._replace(repair=math.inf) for layer in layers]
    largest = max((layer.state_bytes for layer in layers), default=1)
    latency, bandwidth = _measure_link(largest, example.device)
    norms = [m for m in model.modules() if isinstance(m, BatchNorm) and m.training]
    barriers = len(norms) if statistics == "exact" else 0
    x = torch.zeros(1024, device=example.device)
    sums = _measure(lambda: [dist.all_reduce(x) for _ in range(TURNS)]) if barriers else 0.0
    fixed, scaled = max(2 * one - two, 0.0), max(scale * (two - one), 0.0)
    batch, barrier = example.shape[1], 2 * sums / TURNS
    plans = [Plan(num_ranks, batch, fixed, scaled, layers, latency, bandwidth, barriers, barrier)]
    dist.broadcast_object_list(plans, src=0)
    return plans[0]


class _NeuronInputs(Observer):
    """Finds the neurons that a model calls, with stand-ins for their inputs `[T, B, ...]`."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.found: list[tuple[Neuron, list[Tensor]]] = []

    def scan(
        self, neuron: nn.Module, scan: Scan, arguments: Arguments[Tensor], wanted: Wanted
    ) -> Results[Tensor]:
        assert isinstance(neuron, Neuron)
        shape = *self.x.shape[:2], *arguments.inputs[0].shape[2:]
        own = arguments.inputs[: len(type(neuron).input_names)]  # without the residual of a block
        self.found.append((neuron, [y.new_empty(()).expand(shape) for y in own]))
        return scan(arguments, wanted)


class _NoNeighbours(StatePassing):
    """State passing without neighbours, to measure the cost of chunks and of repairs."""

    def __init__(self, chunks: int, speculates: bool = False) -> None:
        self.chunks, self.speculates = chunks, speculates
        self.is_first = self.is_last = not speculates

    def microbatches(self, batch: int) -> list[slice]:
        return split_batch(batch, self.chunks)

    def forward(self, buffers: Buffers) -> Channel:
        for states in buffers:
            for x in states:
                x.fill_(0.5)
        return Channel(buffers)

    backward = forward


def _measure_scan(neuron: Neuron, inputs: list[Tensor], scale: float) -> ScanCost:
    xs = tuple(torch.rand(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
    gradient = torch.ones_like(xs[0])

    def run(passing: _NoNeighbours) -> None:
        outputs = scan_neuron(neuron, Arguments(xs, passing=passing), Wanted()).outputs
        torch.autograd.grad(outputs, xs, [gradient] * len(outputs), allow_unused=True)

    def seconds(chunks: int, speculates: bool = False) -> float:
        return _measure(partial(run, _NoNeighbours(chunks, speculates)))

    for x in xs:
        x.requires_grad_()
    chunks, whole = min(CHUNKS, xs[0].shape[1]), seconds(1)
    wanted = Wanted(impl=neuron_module.backend_of(xs, "auto"))
    name, *_ = op.choose(neuron, xs[0], wanted)
    repaired = seconds(1, speculates=True) if program(name).repairs else math.inf
    return ScanCost(
        scan=scale * whole,
        per_chunk=max(seconds(chunks) - whole, 0.0) / (chunks - 1) if chunks > 1 else 0.0,
        state_bytes=4 * len(type(neuron).states) * xs[0][0].numel(),
        repair=max(repaired - whole, 0.0),
    )


def _measure_link(num_bytes: int, device: torch.device) -> tuple[float, float]:
    """Measure latency in seconds and bandwidth in bytes per second between pairs of ranks."""
    rank = dist.get_rank()
    peer = rank ^ 1
    if peer >= dist.get_world_size():  # only the plan of rank 0 counts
        return 0.0, math.inf

    def ping_pong(x: Tensor) -> None:
        for sends in (rank < peer, rank > peer) * TURNS:
            (dist.send if sends else dist.recv)(x, peer)

    tensors = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (1, num_bytes)]
    latency, seconds = [_measure(partial(ping_pong, x)) / (2 * TURNS) for x in tensors]
    return latency, num_bytes / max(seconds - latency, 1e-9)


def _measure(run: Callable[[], object]) -> float:
    """Return the median time in seconds of replays of a CUDA graph of `run`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.clear_autocast_cache()  # its casts of weights belong to the stream that made them
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            run()
    torch.cuda.synchronize()
    graph, seconds = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        run()
    torch.clear_autocast_cache()
    for _ in range(WARMUP + REPETITIONS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[WARMUP:])[REPETITIONS // 2]
