"""What a model's neurons run on and what they cost, layer by layer."""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.compiler import UnsupportedOperation
from spikefuse.compiler.layout import layout_of, outer_stride
from spikefuse.compiler.program import kind_of, prepare, program
from spikefuse.neurons.candidates import has_candidates
from spikefuse.neurons.definition import Outputs, States
from spikefuse.nn.event import EventLinear
from spikefuse.nn.explanation import LOOP_STEPS, Explanation, Layer
from spikefuse.nn.neuron import Neuron, calls
from spikefuse.nn.temporal import Temporal

# What the copy reads that stands for the bandwidth, and as much again that it writes.
COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}

WARMUPS, REPETITIONS = 5, 11


def explain(
    model: nn.Module, *inputs: Any, time: bool | None = None, **keywords: Any
) -> Explanation:
    """Run `model(*inputs, **keywords)` once and say what its neurons run on and what they cost.

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
        seen = _record(model, inputs, keywords)
        layers = tuple(_layer(call, time) for call in seen)
    layers_on_events = [(n, m) for n, m in model.named_modules() if isinstance(m, EventLinear)]
    called = {id(call.neuron) for call in seen} | {id(m.neuron) for _, m in layers_on_events}
    missed = [n for n, m in model.named_modules() if isinstance(m, Neuron) and id(m) not in called]
    timed = [c.device for c, layer in zip(seen, layers, strict=True) if layer.least is not None]
    bandwidth = copy_bandwidth(timed[0]) if timed else None
    told = tuple(_told(*layer) for layer in layers_on_events)
    return Explanation(layers, tuple(missed), _num_others(model), bandwidth, told)


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


def _num_others(model: nn.Module) -> int:
    neurons = [m for m in model.modules() if isinstance(m, Neuron)]
    ours = {id(part) for neuron in neurons for part in neuron.modules()}
    leaves = [m for m in model.modules() if not any(m.children()) and id(m) not in ours]
    return sum(not isinstance(m, Temporal) for m in leaves)


@dataclass(frozen=True)
class _Call:
    """A call of a neuron as it was seen, `[T, B, ...]`; enough to repeat it."""

    name: str
    neuron: Neuron
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

    def repeated(self, backend: str, num_steps: int | None = None) -> _Repeated:
        """The same call on leaves of its own, perhaps of its first steps only."""
        xs = tuple(_leaf(x, x[:num_steps]) for x in self.inputs)
        state = None if self.state is None else tuple(_leaf(s, s) for s in self.state)
        leaves = [x for x in (*xs, *(state or ()), *self.neuron.parameters()) if x.requires_grad]
        return _Repeated(self, backend, xs, state, leaves)


@dataclass(frozen=True)
class _Repeated:
    call: _Call
    backend: str
    inputs: tuple[Tensor, ...]
    state: States | None
    leaves: list[Tensor]

    def forward(self) -> Outputs:
        call = self.call
        with torch.set_grad_enabled(call.grad):
            return call.neuron._scan(self.inputs, self.state, self.backend, call.return_state)[0]

    def differentiable(self, outputs: Outputs) -> list[Tensor]:
        return [y for y in outputs if y.requires_grad] if self.leaves else []

    def forward_backward(self) -> None:
        ys = self.differentiable(self.forward())
        if ys:
            # Any gradients will do: the outputs themselves cost nothing to make.
            torch.autograd.grad(ys, self.leaves, [y.detach() for y in ys], allow_unused=True)


def _leaf(like: Tensor, x: Tensor) -> Tensor:
    return x.detach().requires_grad_(like.requires_grad)


# Neurons are watched by one thread at a time.
_watching = threading.RLock()


def _record(model: nn.Module, inputs: Sequence[Any], keywords: dict[str, Any]) -> list[_Call]:
    """Call the model, and note every call of a neuron."""
    names = {id(module): name for name, module in model.named_modules()}
    seen: list[_Call] = []
    thread = threading.get_ident()

    def watched(
        neuron: Neuron,
        inputs: tuple[Tensor, ...],
        state: States | None,
        impl: str,
        return_state: bool,
    ) -> tuple[Outputs, States]:
        # Neurons of an `EventLinear` are told of with their layer.
        if threading.get_ident() != thread or has_candidates(neuron):
            return scan(neuron, inputs, state, impl, return_state)
        backend, error = neuron._backend(inputs, impl), ""
        try:
            result = scan(neuron, inputs, state, backend, return_state)
        except UnsupportedOperation as unsupported:
            backend, error = "reference", str(unsupported)
            result = scan(neuron, inputs, state, backend, return_state)
        fused = backend != "reference"
        call = _Call(
            name=names.get(id(neuron), "(not in the model)"),
            neuron=neuron,
            inputs=tuple(_leaf(x, x) for x in inputs),
            state=None if state is None else tuple(_leaf(s, s) for s in state),
            return_state=return_state,
            backend=backend,
            program=_program(neuron, backend) if fused else None,
            notes=tuple(_copies(neuron, inputs)) if fused else (_reason(neuron, error),),
            grad=torch.is_grad_enabled(),
        )
        seen.append(call)
        return result

    # A compiled model would not come this way.
    dynamo = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if dynamo else contextlib.nullcontext()
    with _watching, eager:
        scan = Neuron._scan
        # On the class, not by hooks: a neuron's own `forward` may draw noise and pass it on.
        Neuron._scan = watched  # type: ignore[assignment, method-assign]
        try:
            model(*inputs, **keywords)
        finally:
            Neuron._scan = scan  # type: ignore[method-assign]
    return seen


def _program(neuron: Neuron, backend: str) -> str:
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


def _copies(neuron: Neuron, inputs: tuple[Tensor, ...]) -> Iterator[str]:
    """What is said of inputs that kernels can't read where they lie."""
    layout = layout_of(inputs)
    for i, (label, x) in enumerate(zip(type(neuron).input_names, inputs, strict=True)):
        if outer_stride(x.shape, x.stride(), layout.order, layout.inner) is None:
            shape = f"input copied: {label} {list(x.shape)} with strides {list(x.stride())}"
            first = "its steps are not dense, or in pieces too short to read in place"
            yield f"{shape}: {'it lies unlike the first input' if i else first}"


def _layer(call: _Call, time: bool | None) -> Layer:
    """The row of a call."""
    xs = call.inputs
    kept_inputs, kept_states = _kept(call, call.backend)
    moved = _moved(call)
    least = achieved = None
    if time or (time is None and call.device.type == "cuda"):
        least = moved / copy_bandwidth(call.device)
        achieved = _seconds(call.repeated(call.backend).forward_backward, call.device)
    return Layer(
        name=call.name,
        module=type(call.neuron).__name__,
        shape=tuple(xs[0].shape),
        dtypes=tuple(x.dtype for x in xs),
        implementation=call.backend,
        program=call.program,
        chunk=program(call.program).chunk if call.program else None,
        kept_inputs=kept_inputs,
        kept_states=kept_states,
        loop_states=_loop_states(call),
        moved=moved,
        least=least,
        achieved=achieved,
        notes=call.notes,
    )


class _Kept:
    """A tensor that a graph keeps for backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _kept(call: _Call, backend: str, num_steps: int | None = None) -> tuple[int, int]:
    """Bytes kept for backward as long as the outputs live: (of inputs, others)."""
    alive: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def pack(x: Tensor) -> _Kept:
        kept = _Kept(x)
        alive.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        outputs = call.repeated(backend, num_steps).forward()
    found = {_address(kept.tensor): kept.tensor for kept in alive}
    del outputs
    inputs = {x.data_ptr(): _num_bytes(x) for x in call.inputs if _address(x) in found}
    known = {_address(x) for x in (*call.inputs, *call.neuron.parameters(), *call.neuron.buffers())}
    others = [x.untyped_storage().nbytes() for at, x in found.items() if at not in known]
    return sum(inputs.values()), sum(others)


def _loop_states(call: _Call) -> int:
    num_steps = call.inputs[0].shape[0]
    some = min(num_steps, LOOP_STEPS)
    kept = _kept(call, "reference", some)[1]
    if num_steps == some:
        return kept
    return kept + (num_steps - some) * (kept - _kept(call, "reference", some - 1)[1])


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _num_bytes(x: Tensor) -> int:
    """The bytes in memory that a tensor reads; dims of stride 0 count once."""
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size]
    return x.itemsize * functools.reduce(int.__mul__, sizes, 1)


def _moved(call: _Call) -> int:
    repeated = call.repeated(call.backend)
    outputs = repeated.forward()
    once = sum(map(_num_bytes, (*call.inputs, *outputs)))
    if not repeated.differentiable(outputs):
        return once
    return 2 * once + sum(x.nbytes for x in call.inputs if x.requires_grad)


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
