"""How many ranks should share a sequence: from measurements of a network and of its connections.

Li et al., "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion", Eqs. 4 and 5, take
T_s for the whole task on one rank, T_c for one exchange, and k ranks to need T_s / k + (k - 1) T_c,
which is least near k = sqrt(T_s / T_c). Two things are added here. A part of a step's time does not
shrink with its number of time steps. And a neuron layer's scan can begin on a rank only when the
rank before has scanned a part of the batch: with n parts each rank lags behind the one before by

    lag = scan / (k n) + exchange of 1/n of a state,

in each pass. Ranks that begin before the state is there lag by what they mend and an exchange
instead, and each of them mends. Where nothing else makes ranks wait for each other, the lags of
layers overlap, and only the longest counts; norms with exact statistics let all ranks wait at each
layer, and their lags add up.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.distributed.mesh import parts_of
from spikefuse.distributed.time_sharding import import_dynamo
from spikefuse.memory.policies import Checkpoint
from spikefuse.nn import Temporal
from spikefuse.nn.call import Scan
from spikefuse.nn.neuron import Neuron

WARMUP, REPETITIONS = 2, 5
# Exchanges that are measured together: one alone is mostly the host's.
TURNS = 8
# Parts in which a scan is measured to find out what a part costs.
PARTS = 4


@dataclass(frozen=True)
class Layer:
    """A neuron layer on the whole batch, forward and backward together.

    Args:
        scan: seconds over all time steps.
        part: seconds that each part of the batch costs beyond its share.
        state_bytes: that travel one way.
        mend: seconds to mend what was scanned before the state was there; None if kernels can't.
    """

    scan: float
    part: float
    state_bytes: int
    mend: float | None = None

    def lag(self, time: int, chunks: int, data: int, speculate: bool) -> float:
        """Seconds by which a rank is behind the one before, but for the exchange."""
        if speculate and self.mend is not None:
            return self.mend
        return self.scan / (time * data * chunks) + self.part

    def parts(self, chunks: int, speculate: bool) -> float:
        """Seconds that handing on in parts takes on each rank."""
        mended = chunks * (self.mend or 0.0) if speculate else 0.0
        return (chunks - 1) * self.part + mended


@dataclass(frozen=True)
class Option:
    """One way to share the work; seconds of a training step, bytes on each rank."""

    data: int
    time: int
    chunks: int
    speculate: bool
    seconds: float
    speedup: float
    bytes: int
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What was measured of a training step on the whole input, and what follows.

    Args:
        num_ranks: of the mesh.
        batch: B.
        fixed: seconds of a step that do not shrink with its input.
        scaled: seconds that do.
        layers: the neuron layers.
        latency: seconds of an exchange with a neighbour.
        bandwidth: of such an exchange, bytes per second.
        barriers: norms with exact statistics.
        barrier: seconds that the exchange of one takes, forward and backward.
        fixed_bytes, scaled_bytes: memory that does not, and that does shrink with the input.
        capacity: bytes of memory of a rank.
    """

    num_ranks: int
    batch: int
    fixed: float
    scaled: float
    layers: list[Layer]
    latency: float
    bandwidth: float
    barriers: int = 0
    barrier: float = 0.0
    fixed_bytes: int = 0
    scaled_bytes: int = 0
    capacity: int = 0
    options: list[Option] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", [self._option(k) for k in _divisors(self.num_ranks)])

    @property
    def whole(self) -> float:
        """T_s: seconds on one rank."""
        return self.fixed + self.scaled

    @property
    def exchange(self) -> float:
        """T_c: seconds of an exchange of the largest state, there and back."""
        largest = max((layer.state_bytes for layer in self.layers), default=0)
        return 2 * (self.latency + largest / self.bandwidth)

    @property
    def best_by_paper(self) -> float:
        """sqrt(T_s / T_c), the number of ranks for which Eq. 5 has its maximum."""
        return math.sqrt(self.whole / self.exchange)

    @property
    def best(self) -> Option:
        """The fastest option of those that fit, or if none does, the smallest."""
        fitting = [option for option in self.options if option.fits]
        if fitting:
            return min(fitting, key=lambda option: option.seconds)
        return min(self.options, key=lambda option: option.bytes)

    def speedup_by_paper(self, ranks: int) -> float:
        """Eq. 5: k T_s / (k (k - 1) T_c + T_s)."""
        return ranks * self.whole / (ranks * (ranks - 1) * self.exchange + self.whole)

    def seconds(self, time: int, chunks: int, data: int = 1, speculate: bool = True) -> float:
        """A training step on `data` × `time` ranks, states handed on in `chunks` parts; with
        `speculate`, ranks begin before the state is there, where kernels can."""
        shared = self.fixed + self.scaled / (time * data)
        if time == 1:
            return shared
        lags = [
            layer.lag(time, chunks, data, speculate)
            + 2 * (self.latency + layer.state_bytes / (data * chunks) / self.bandwidth)
            for layer in self.layers
        ]
        waits = sum(lags) if self.barriers else max(lags, default=0.0)
        parts = sum(layer.parts(chunks, speculate) for layer in self.layers)
        return shared + (time - 1) * waits + parts + self.barriers * self.barrier

    def _option(self, time: int) -> Option:
        data = self.num_ranks // time
        rows = max(1, self.batch // data)
        counts = [2**i for i in range(rows.bit_length())] if time > 1 else [1]
        can_speculate = time > 1 and any(layer.mend is not None for layer in self.layers)
        starts = (True, False) if can_speculate else (False,)
        ways = [(n, early) for early in starts for n in counts]
        chunks, speculate = min(ways, key=lambda way: self.seconds(time, way[0], data, way[1]))
        seconds = self.seconds(time, chunks, data, speculate)
        needed = self.fixed_bytes + self.scaled_bytes // (time * data)
        fits = needed <= self.capacity
        speedup = self.whole / seconds
        return Option(data, time, chunks, speculate, seconds, speedup, needed, fits)

    def __str__(self) -> str:
        lines = [
            f"a step takes {1e3 * self.whole:.2f} ms on one rank, an exchange "
            f"{1e3 * self.exchange:.3f} ms; by Eq. 5 best on {self.best_by_paper:.1f} ranks",
            "data  time  chunks  speculate        ms  speed-up  by Eq. 5      GiB  fits",
        ]
        lines += [
            f"{o.data:4}  {o.time:4}  {o.chunks:6}  {'yes' if o.speculate else 'no':>9}  "
            f"{1e3 * o.seconds:8.2f}  {o.speedup:8.2f}  "
            f"{self.speedup_by_paper(o.time):8.2f}  {o.bytes / 2**30:7.2f}  "
            + ("yes" if o.fits else "no")
            + ("  <- best" if o is self.best else "")
            for o in self.options
        ]
        return "\n".join(lines)


def plan(
    model: nn.Module,
    example: Tensor,
    mesh: DeviceMesh,
    statistics: str = "exact",
    memory: int | None = None,
    recorded: bool = False,
) -> Plan:
    """Measure training steps of `model` and exchanges between ranks, and predict what sharing the
    work among the ranks of `mesh` gains. Every rank has to call it; all get the same plan.

    Nothing larger than two ranks' shares of `example` runs here, so that it may be larger than
    one rank's memory. Gradients are left as they were, running statistics are not.

    What ranks mend is measured on inputs that make neurons fire; quiet ones take more. With
    `Checkpoint` ranks wait, in parts of its own: the chunks are not those, and the lag an estimate.

    Of norms and neurons as one, scans are measured by the neurons alone: of the passes of a block's
    backward, the one that hands states on costs about as much.

    Args:
        model: not sharded yet, with `Temporal` inside, fused or not.
        example: the input of the whole job, `[T, B, ...]`, its memory perhaps expanded.
        mesh: all ranks, of which two at least.
        statistics: of batch norms in training, as `shard_time` takes it.
        memory: bytes that a rank may use, or None for what its device has.
        recorded: of steps that will be replays of a CUDA graph, as which they are measured too.

    Raises:
        ValueError: a model that is sharded already, a single rank, or a recording on a CPU.
    """
    count = mesh.size()
    _check(model, example, count, recorded)
    import_dynamo()
    share = len(example) // count
    parts = [example[: share * n] for n in (1, 2)]
    times, sizes = zip(*(_step(model, x, recorded) for x in parts), strict=True)
    scale = len(example) / share
    calls = _neuron_inputs(model, example[:share])
    how = scale, example.device, recorded
    layers = [_layer(neuron, inputs, *how) for neuron, inputs in calls]
    if any(isinstance(m, Temporal) and isinstance(m.memory, Checkpoint) for m in model.modules()):
        layers = [replace(layer, mend=None) for layer in layers]  # its ranks wait
    largest = max([layer.state_bytes for layer in layers], default=1)
    latency, bandwidth = _exchange(largest, example.device, recorded)
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    barriers = len(norms) if statistics == "exact" else 0
    numbers = [2 * times[0] - times[1], scale * (times[1] - times[0]), latency, bandwidth]
    numbers += [_barrier(example.device, recorded) if barriers else 0.0]
    numbers += [_capacity(example.device) if memory is None else memory]
    numbers += [x for layer in layers for x in (layer.scan, layer.part, layer.mend or 0.0)]
    columns = _of_all_ranks(numbers)
    means = [fmean(column) for column in columns]
    return Plan(
        num_ranks=count,
        batch=example.shape[1],
        fixed=max(means[0], 0.0),
        scaled=max(means[1], 0.0),
        layers=_averaged(layers, means[6:]),
        # A rank without a neighbour to ask has measured nothing: 0, and infinity.
        latency=max(columns[2]),
        bandwidth=min(columns[3]),
        barriers=barriers,
        barrier=means[4],
        fixed_bytes=max(2 * sizes[0] - sizes[1], 0),
        scaled_bytes=int(scale * (sizes[1] - sizes[0])),
        capacity=int(min(columns[5])),
    )


def _of_all_ranks(numbers: list[float]) -> list[tuple[float, ...]]:
    """For each number that of every rank."""
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, numbers)
    return list(zip(*everyone, strict=True))


def _averaged(layers: list[Layer], means: list[float]) -> list[Layer]:
    """The layers with means over all ranks: three of each."""
    triples = zip(means[::3], means[1::3], means[2::3], layers, strict=True)
    return [
        Layer(scan, part, layer.state_bytes, None if layer.mend is None else mend)
        for scan, part, mend, layer in triples
    ]


def _check(model: nn.Module, example: Tensor, num_ranks: int, recorded: bool) -> None:
    """Refuse what `plan` cannot measure."""
    for module in model.modules():
        if isinstance(module, Temporal) and module.passing is not None:
            raise ValueError("the model's time is sharded already: make a plan before shard_time")
    if num_ranks < 2 or len(example) < num_ranks:
        raise ValueError(
            f"{num_ranks} ranks and {len(example)} steps: a plan needs two ranks, and a step for "
            "each"
        )
    if recorded and not example.is_cuda:
        raise ValueError(
            f"recorded=True and an example on {example.device}: CUDA graphs need a CUDA GPU"
        )


def _step(model: nn.Module, x: Tensor, recorded: bool) -> tuple[float, int]:
    """(seconds, bytes) of a forward and backward pass."""
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    kept: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    def run() -> None:
        leaves = parameters or [x.detach().requires_grad_()]
        y = model(x if parameters else leaves[0])
        torch.autograd.grad(y.sum(), leaves, allow_unused=True)

    seconds = _measured(run, x.device, recorded)
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats(x.device)
        run()
        return seconds, torch.cuda.max_memory_allocated(x.device)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        run()
    return seconds, sum(kept.values())


def _neuron_inputs(model: nn.Module, x: Tensor) -> list[tuple[Neuron, list[Tensor]]]:
    """Each call of a neuron, and inputs like those it gets, `[T, B, ...]`, without memory."""
    seen: list[tuple[Neuron, list[Tensor]]] = []

    # Not hooks, which neurons that are fused with a norm do not run; nor the neurons' attributes,
    # which are a part of their definition.
    call = Neuron.call

    def noting(neuron: Neuron, scan: Scan, inputs: tuple[Tensor, ...], *rest: Any) -> Any:
        shape = *x.shape[:2], *inputs[0].shape[1:]
        own = inputs[: len(type(neuron).input_names)]  # a block's residual is none of them
        seen.append((neuron, [torch.empty((), dtype=y.dtype).expand(shape) for y in own]))
        return call(neuron, scan, inputs, *rest)

    Neuron.call = noting  # type: ignore[assignment,method-assign]
    try:
        with torch.no_grad():
            model(x)
    finally:
        Neuron.call = call  # type: ignore[method-assign]
    return seen


class _Alone:
    """A relay that is connected to nobody, to measure what parts and what mending costs."""

    exact_statistics = True

    def __init__(self, chunks: int, speculates: bool = False) -> None:
        self.chunks, self.speculates = chunks, speculates
        self.is_first = self.is_last = not speculates
        self.has_mended = False

    def parts(self, batch: int) -> list[slice]:
        return parts_of(batch, self.chunks)

    def forward(self, received: Parts, run: Run, ahead: Ahead | None = None) -> None:
        for i, tensors in enumerate(received):
            if ahead is not None and self.speculates:
                ahead(i)
                self.has_mended = True
            for x in tensors:
                x.fill_(0.5)
            run(i)

    backward = forward


def _layer(
    neuron: Neuron,
    inputs: list[Tensor],
    scale: float,
    device: torch.device,
    recorded: bool,
) -> Layer:
    xs = tuple(
        torch.rand(x.shape, dtype=x.dtype, device=device, requires_grad=True) for x in inputs
    )
    gradients = [torch.ones_like(xs[0])]

    def scan(relay: _Alone) -> Callable[[], None]:
        def run() -> None:
            outputs, _ = neuron._scan(xs, None, "auto", False, relay)
            torch.autograd.grad(outputs, xs, gradients * len(outputs), allow_unused=True)

        return run

    def measured(relay: _Alone) -> float:
        return _measured(scan(relay), device, recorded)

    whole = measured(_Alone(1))
    count = min(PARTS, xs[0].shape[1])
    several = measured(_Alone(count)) if count > 1 else whole
    part = max(several - whole, 0.0) / max(count - 1, 1)
    began = _Alone(1, speculates=True)
    mended = measured(began)
    mend = max(mended - whole, 0.0) if began.has_mended else None
    state_bytes = 4 * len(type(neuron).states) * xs[0][0].numel()
    return Layer(scale * whole, part, state_bytes, mend)


def _exchange(num_bytes: int, device: torch.device, recorded: bool) -> tuple[float, float]:
    """(seconds, bytes per second) of sending from one rank to the next one."""
    rank = dist.get_rank()
    peer = rank ^ 1
    if peer >= dist.get_world_size():
        return 0.0, math.inf
    found = []
    for size in (1, num_bytes):
        x = torch.zeros(size, dtype=torch.uint8, device=device)

        def there_and_back(x: Tensor = x) -> None:
            for sends in (rank < peer, rank > peer) * TURNS:
                (dist.send if sends else dist.recv)(x, peer)

        found.append(_measured(there_and_back, device, recorded) / (2 * TURNS))
    return found[0], num_bytes / max(found[1] - found[0], 1e-9)


def _barrier(device: torch.device, recorded: bool) -> float:
    """Seconds that all ranks need for the exchange of a norm, forward and backward."""
    x = torch.zeros(1024, device=device)

    def sums() -> None:
        for _ in range(TURNS):
            dist.all_reduce(x)

    return 2 * _measured(sums, device, recorded) / TURNS


def _measured(run: Callable[[], object], device: torch.device, recorded: bool = False) -> float:
    """The median of some runs, in seconds."""
    if recorded:
        run = _replay(run)
    found = []
    for _ in range(WARMUP + REPETITIONS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        found.append(time.perf_counter() - start)
    return median(found[WARMUP:])


def _replay(run: Callable[[], object]) -> Callable[[], object]:
    """The run as the replay of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # Autocast keeps casts of weights, and with them the streams on which these were made.
    torch.clear_autocast_cache()
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        run()
    torch.clear_autocast_cache()
    return graph.replay


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _capacity(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]
