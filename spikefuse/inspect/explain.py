"""What a model's neurons run on, what they cost, and what its layers keep, layer by layer."""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spikefuse.block.batch_norm import by_batch
from spikefuse.block.program import block_program as kernels_of
from spikefuse.compiler import UnsupportedOperation
from spikefuse.events.linear import EventLinear
from spikefuse.inspect.explanation import LOOP_STEPS, Explanation, Kept, Layer
from spikefuse.kernels import pool
from spikefuse.memory import checkpoint
from spikefuse.memory.policies import Checkpoint, Policy, Recompute
from spikefuse.memory.segments import Segments
from spikefuse.memory.spikes import Ledger, num_bytes
from spikefuse.neurons.definition import Outputs, States
from spikefuse.nn.call import Scan
from spikefuse.nn.call import TemporalCall as Sequence
from spikefuse.nn.neuron import Neuron, backend_of, calls
from spikefuse.nn.temporal import Temporal
from spikefuse.scan.layout import layout_of, outer_stride
from spikefuse.scan.program import kind_of, prepare, program

# What the copy reads that stands for the bandwidth, and as much again that it writes.
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}

WARMUPS, REPETITIONS = 5, 11


def explain(
    model: nn.Module, *inputs: Any, time: bool | None = None, **keywords: Any
) -> Explanation:
    """Run `model(*inputs, **keywords)` once and say what its neurons run on, what they cost, and
    what each layer keeps for backward.

    A neuron that can't be compiled is left to the eager loop, and its row says why; a call of the
    model itself raises that error. Buffers of the model and the state of PyTorch's random numbers
    are afterwards what they were.

    Args:
        inputs, keywords: what to call the model with. Backward is counted where a call would
            prepare for it: gradients are enabled, and an input or a parameter requires one.
        time: whether to measure times, each layer alone on the input that it was given; None for
            layers on a GPU only.

    Returns:
        The rows of the table, for programs; `print` shows the table.

    Raises:
        TypeError: `model` is not a module.
        Anything that the call itself raises, except UnsupportedOperation.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    tensors = [x for x in (*inputs, *model.parameters()) if isinstance(x, Tensor)]
    devices = list({x.device for x in tensors if x.device.type == "cuda"})
    with _unchanged(model), torch.random.fork_rng(devices):
        watch, kept = _record(model, inputs, keywords)
        seen = watch.seen
        layers = tuple(_layer(call, time) for call in seen)
    on_events = [(n, m) for n, m in model.named_modules() if isinstance(m, EventLinear)]
    pairs: list[tuple[nn.Module, nn.Module | None]] = [(call.neuron, call.norm) for call in seen]
    pairs += [(layer, layer.neuron) for _, layer in on_events]
    called = {m for pair in pairs for m in pair if m is not None} | watch.again.keys()
    missed = [n for n, m in model.named_modules() if isinstance(m, Neuron) and m not in called]
    timed = [c.device for c, layer in zip(seen, layers, strict=True) if layer.least is not None]
    bandwidth = copy_bandwidth(timed[0]) if timed else None
    events = tuple(_told(*layer) for layer in on_events)
    others = _num_others(model, called)
    again = tuple(dict.fromkeys(watch.again.values()))
    return Explanation(layers, kept, tuple(missed), others, bandwidth, events, again)


def _told(name: str, layer: EventLinear) -> str:
    """What an `EventLinear` did in its last call."""
    widths = f"{name or '(the model)'}: EventLinear, {layer.in_features} to {layer.out_features}"
    activity = layer.activity
    if activity is None:
        return f"{widths}: not called"
    sites = max(activity.sites, 1)
    dropped = activity.dropped + activity.dropped_candidates
    return (
        f"{widths}, on {activity.choice.impl} ({activity.choice.reason}): {activity.rate:.2%} of "
        f"the inputs fired, {activity.candidates / sites:.2%} listed, {dropped} dropped"
    )


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put the model's buffers back, such as the statistics of its norms."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, saved in before:
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)


def _num_others(model: nn.Module, called: Collection[nn.Module]) -> int:
    neurons = [m for m in model.modules() if isinstance(m, Neuron)]
    ours = {part for neuron in neurons for part in neuron.modules()}.union(called)
    leaves = [m for m in model.modules() if not any(m.children()) and m not in ours]
    return sum(not isinstance(m, Temporal) for m in leaves)


@dataclass(frozen=True)
class _Call:
    """A call of a neuron as it was seen, `[T, B, ...]`; enough to repeat it."""

    name: str
    neuron: Neuron
    norm: _BatchNorm | None  # of the block that the neuron is a part of
    scan: Scan
    memory: Policy
    inputs: tuple[Tensor, ...]
    state: States | None
    return_state: bool
    backend: str
    program: str | None
    notes: tuple[str, ...]
    grad: bool

    @property
    def device(self) -> torch.device:
        return self.inputs[0].device

    @property
    def module(self) -> str:
        residual = ["residual"] if self.norm and len(self.inputs) > 1 else []
        norm = [type(self.norm).__name__] if self.norm else []
        return " + ".join([*norm, *residual, type(self.neuron).__name__])

    def tensors(self) -> Iterator[Tensor]:
        for module in (self.neuron, self.norm):
            if module is not None:
                yield from (*module.parameters(), *module.buffers())

    def repeated(self) -> _Repeated:
        """The same call on leaves of its own."""
        return self._repeated(self.scan, self.backend, None)

    def eager(self, num_steps: int | None = None) -> _Repeated:
        """What PyTorch alone would do, perhaps for the first steps only."""
        norm, neuron = self.norm, self.neuron
        scan = neuron._scan if norm is None else functools.partial(_unfused, norm, neuron)
        return self._repeated(scan, "reference", num_steps)

    def _repeated(self, scan: Scan, backend: str, num_steps: int | None) -> _Repeated:
        xs = tuple(_leaf(x, x[:num_steps]) for x in self.inputs)
        state = None if self.state is None else tuple(_leaf(s, s) for s in self.state)
        leaves = [x for x in (*xs, *(state or ()), *self.tensors()) if x.requires_grad]
        return _Repeated(self, scan, backend, xs, state, leaves)


def _unfused(
    norm: _BatchNorm,
    neuron: Neuron,
    inputs: tuple[Tensor, ...],
    state: States | None,
    impl: str,
    return_state: bool,
) -> tuple[Outputs, States]:
    """Norm, sum and neuron one after the other."""
    (x, *residual), batch = inputs, by_batch(norm)
    running = (None, None) if batch else (norm.running_mean, norm.running_var)
    affine = norm.weight, norm.bias
    folded = nn.functional.batch_norm(x.flatten(0, 1), *running, *affine, batch, eps=norm.eps)
    u = sum(residual, folded.unflatten(0, x.shape[:2]))
    return neuron._scan((u,), state, impl, return_state)


@dataclass(frozen=True)
class _Repeated:
    call: _Call
    scan: Scan
    backend: str
    inputs: tuple[Tensor, ...]
    state: States | None
    leaves: list[Tensor]

    def forward(self) -> Outputs:
        call, before = self.call, calls.sequence
        calls.sequence = Sequence(len(self.inputs[0]), {}, memory=call.memory)
        try:
            with torch.set_grad_enabled(call.grad):
                return self.scan(self.inputs, self.state, self.backend, call.return_state)[0]
        finally:
            calls.sequence = before

    def differentiable(self, outputs: Outputs) -> list[Tensor]:
        return [y for y in outputs if y.requires_grad] if self.leaves else []

    def forward_backward(self) -> None:
        ys = self.differentiable(self.forward())
        if ys:
            # Any gradients will do: the outputs themselves cost nothing to make.
            torch.autograd.grad(ys, self.leaves, [y.detach() for y in ys], allow_unused=True)


def _leaf(like: Tensor, x: Tensor) -> Tensor:
    return x.detach().requires_grad_(like.requires_grad)


# Modules are watched by one thread at a time.
_watching = threading.RLock()


class _Watch:
    """Notes, in the thread that made it, calls of neurons and what layers keep."""

    def __init__(self, model: nn.Module) -> None:
        self.ledger, self.seen = Ledger(), list[_Call]()
        neurons = [m for m in model.modules() if isinstance(m, Neuron)]
        parts = {part for neuron in neurons for part in neuron.modules()}.difference(neurons)
        self.names = {m: name for name, m in model.named_modules() if m not in parts}
        #: The type of each layer in the order of the calls, by name.
        self.modules: dict[str, str] = {}
        #: (layer, input, number of outputs) of each max pooling by our kernels with a gradient.
        self.pooled: list[tuple[str, Tensor, int]] = []
        #: The name of the network in which `Checkpoint` computes a neuron, or a norm, again.
        self.again: dict[nn.Module, str] = {}

    @contextlib.contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """What is kept meanwhile is kept by `module`, or if it is no layer, by that around it."""
        outer = self.ledger.layer
        if module in self.names or isinstance(module, Neuron):
            self.ledger.layer = self.names.get(module, OUTSIDE)
            self.modules[self.ledger.layer] = type(module).__name__
        try:
            yield
        finally:
            self.ledger.layer = outer

    def scan(
        self,
        neuron: Neuron,
        scan: Scan,
        inputs: tuple[Tensor, ...],
        state: States | None,
        impl: str,
        return_state: bool,
        relay: Shard | None = None,
    ) -> tuple[Outputs, States]:
        norm = scan.args[0] if isinstance(scan, functools.partial) else None
        sequence = calls.sequence
        backend, error = backend_of(inputs, impl), ""
        try:
            result = scan(inputs, state, backend, return_state, relay)
        except UnsupportedOperation as unsupported:
            backend, error = "reference", str(unsupported)
            result = scan(inputs, state, backend, return_state, relay)
        fused = backend != "reference"
        labels = type(neuron).input_names if norm is None else ("x", "residual")
        call = _Call(
            name=self.names.get(neuron, OUTSIDE),
            neuron=neuron,
            norm=norm,
            scan=scan,
            memory=Recompute() if sequence is None else sequence.policy,
            inputs=tuple(_leaf(x, x) for x in inputs),
            state=None if state is None else tuple(_leaf(s, s) for s in state),
            return_state=return_state,
            backend=backend,
            program=_program(neuron, norm, backend, len(inputs) > 1) if fused else None,
            notes=tuple(_copies(labels, inputs)) if fused else (_reason(neuron, error),),
            grad=torch.is_grad_enabled(),
        )
        self.modules[call.name] = call.module
        self.seen.append(call)
        return result


OUTSIDE = "(not in the model)"


def _record(
    model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[_Watch, tuple[Kept, ...]]:
    """Call the model, and note every call of a neuron and what is kept."""
    watch, thread = _Watch(model), threading.get_ident()
    run, call, select = nn.Module.__call__, Neuron.call, pool.max_pool2d
    run_again = checkpoint.run

    def watched_run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(module, *args, **kwargs)
        with watch.inside(module):
            return run(module, *args, **kwargs)

    def watched_call(neuron: Neuron, scan: Scan, *args: Any) -> Any:
        if threading.get_ident() != thread:
            return call(neuron, scan, *args)
        with watch.inside(neuron):
            return call(neuron, functools.partial(watch.scan, neuron, scan), *args)

    def watched_select(x: Tensor, maps: pool.Maps) -> Tensor:
        y = select(x, maps)
        if threading.get_ident() == thread and y.requires_grad:
            watch.pooled.append((watch.ledger.layer, x.detach(), y.numel()))
        return y

    def watched_again(segments: Segments, policy: Checkpoint, sequence: Sequence, x: Tensor) -> Any:
        if threading.get_ident() == thread:
            layers = [s.block or s.neuron for s in segments]
            modules = (m for layer in layers if layer is not None for m in layer.modules)
            watch.again |= dict.fromkeys(modules, watch.ledger.layer)
        return run_again(segments, policy, sequence, x)

    # A compiled model would not come this way.
    dynamo = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if dynamo else contextlib.nullcontext()
    with _watching, eager:
        # On the classes, not by hooks: blocks call their neurons as no module, and Temporal
        # computes networks with hooks in another way.
        nn.Module.__call__ = watched_run  # type: ignore[method-assign]
        Neuron.call = watched_call  # type: ignore[assignment, method-assign]
        pool.max_pool2d, checkpoint.run = watched_select, watched_again
        try:
            with watch.ledger.hooks():
                outputs = model(*inputs, **keywords)
        finally:
            nn.Module.__call__ = run  # type: ignore[method-assign]
            Neuron.call = call  # type: ignore[method-assign]
            pool.max_pool2d, checkpoint.run = select, run_again
    kept = _kept_by_layers(model, watch)
    del outputs  # What is kept lives as long as they do.
    return watch, kept


def _kept_by_layers(model: nn.Module, watch: _Watch) -> tuple[Kept, ...]:
    """What each layer keeps, and what it would in PyTorch alone."""
    ignored = {_address(x) for x in (*model.parameters(), *model.buffers())}
    now, eager = dict.fromkeys(watch.modules, 0), dict.fromkeys(watch.modules, 0)
    for size in watch.ledger.sizes(ignored):
        now[size.layer] += size.now
    counted: set[int] = set()
    for size in watch.ledger.sizes(ignored, now.keys() - {call.name for call in watch.seen}):
        eager[size.layer] += size.plain
        counted.add(size.address)
    for layer, x, num in watch.pooled:
        # PyTorch keeps 8 bytes per output instead of 1, and what is pooled.
        eager[layer] += 7 * num + (0 if _address(x) in counted else num_bytes(x))
        counted.add(_address(x))
    for call in watch.seen:
        inputs, others = _eager(call)
        eager[call.name] += others
        for x in inputs:
            eager[call.name] += 0 if _address(x) in counted else num_bytes(x)
            counted.add(_address(x))
    on_events = {name for name, m in model.named_modules() if isinstance(m, EventLinear)}
    plain = {name: None if name in on_events else size for name, size in eager.items()}
    rows = [Kept(name, kind, now[name], plain[name]) for name, kind in watch.modules.items()]
    return tuple(row for row in rows if row.now or row.eager)


def _program(neuron: Neuron, norm: _BatchNorm | None, backend: str, adds: bool) -> str:
    if norm is not None:
        return kernels_of(neuron, backend, adds, by_batch(norm))[0].name
    with torch.no_grad():
        values, statics = neuron.describe()
    kinds = tuple((name, kind_of(value)) for name, value in values.items())
    return prepare(neuron, backend, statics, kinds)[0]


def _reason(neuron: Neuron, error: str) -> str:
    """Why a call runs on the reference."""
    if error:
        return f"not compiled, which a call raises as an error: {error}"
    inside = calls.sequence is not None and id(neuron) in calls.sequence.names
    who = "Temporal" if inside else "the neuron"
    return f'on the reference: impl="reference" was passed to {who}'


def _copies(labels: Collection[str], inputs: tuple[Tensor, ...]) -> Iterator[str]:
    """What is said of inputs that kernels can't read where they lie."""
    layout = layout_of(inputs)
    for i, (label, x) in enumerate(zip(labels, inputs, strict=False)):
        if outer_stride(x.shape, x.stride(), layout.order, layout.inner) is None:
            shape = f"input copied: {label} {list(x.shape)} with strides {list(x.stride())}"
            first = "its steps are not dense, or in pieces too short to read in place"
            yield f"{shape}: {'it lies unlike the first input' if i else first}"


def _layer(call: _Call, time: bool | None) -> Layer:
    """The row of a call."""
    xs = call.inputs
    moved = _moved(call)
    least = achieved = None
    if time or (time is None and call.device.type == "cuda"):
        least = moved / copy_bandwidth(call.device)
        achieved = _seconds(call.repeated().forward_backward, call.device)
    return Layer(
        name=call.name,
        module=call.module,
        shape=tuple(xs[0].shape),
        dtypes=tuple(x.dtype for x in xs),
        implementation=call.backend,
        memory=call.memory,
        program=call.program,
        chunk=program(call.program).chunk(len(xs[0])) if call.program else None,
        moved=moved,
        least=least,
        achieved=achieved,
        notes=call.notes,
    )


def _eager(call: _Call) -> tuple[list[Tensor], int]:
    """What PyTorch alone would keep: (the inputs among it, bytes of the rest)."""
    num_steps = len(call.inputs[0])
    some = min(num_steps, LOOP_STEPS)
    inputs, others = _kept(call, some)
    if num_steps > some:
        others += (num_steps - some) * (others - _kept(call, some - 1)[1])
    return inputs, others


def _kept(call: _Call, num_steps: int) -> tuple[list[Tensor], int]:
    """The same for the first steps; what lives as long as the outputs is kept."""
    ledger = Ledger()
    with ledger.hooks():
        outputs = call.eager(num_steps).forward()
    sizes = list(ledger.sizes({_address(x) for x in call.tensors()}))
    del outputs
    inputs = [x for x in call.inputs if any(size.address == _address(x) for size in sizes)]
    addresses = {_address(x) for x in inputs}
    return inputs, sum(size.now for size in sizes if size.address not in addresses)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _moved(call: _Call) -> int:
    """The bytes that must move: a norm's statistics take a pass more, forward and backward."""
    repeated = call.repeated()
    outputs = repeated.forward()
    read, written = (sum(map(num_bytes, xs)) for xs in (call.inputs, outputs))
    twice = call.norm is not None and by_batch(call.norm)
    forward = read + written + (num_bytes(call.inputs[0]) if twice else 0)
    if not repeated.differentiable(outputs):
        return forward
    gradients = sum(x.nbytes for x in call.inputs if x.requires_grad)
    return forward + (2 if twice else 1) * (read + written) + gradients


@functools.lru_cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes on `device`, measured once."""
    size = COPIED_BYTES.get(device.type, COPIED_BYTES["cpu"])
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(functools.partial(target.copy_, source), device)


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The median time of a call: by events on a GPU, else by the clock."""
    for _ in range(WARMUPS):
        run()
    if device.type != "cuda":
        return statistics.median(_wall(run) for _ in range(REPETITIONS))
    pairs = []
    with torch.cuda.device(device):
        for _ in range(REPETITIONS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def _wall(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
