"""Explain a call of a model: how its neurons run, what they cost, and what its layers save."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.block.block import NAMES
from spikefuse.block.program import block_program
from spikefuse.events.linear import EventLinear
from spikefuse.inspect.explanation import LOOP_STEPS, Explanation, Layer, SavedBytes, label
from spikefuse.inspect.observer import CallObserver, NeuronScan, unchanged
from spikefuse.inspect.timing import copy_bandwidth, seconds
from spikefuse.kernels.norm import by_batch
from spikefuse.memory.saved_tensors import SavedTensors, num_bytes
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.temporal import Temporal
from spikefuse.scan.layout import layout_of, outer_stride
from spikefuse.scan.op import choose
from spikefuse.scan.program import program


def explain(
    model: nn.Module, *inputs: Any, time: bool | None = None, **keywords: Any
) -> Explanation:
    """Run `model(*inputs, **keywords)` once and report how its neurons run and what they cost.

    The report shows the kernel of each neuron, its memory traffic and time, and what each layer
    saves for backward. A neuron that cannot be compiled runs in the eager loop, and its row gives
    the reason; a call of the model itself raises the error. Buffers of the model and the state of
    PyTorch's random number generators are restored.

    Args:
        model: a network.
        inputs, keywords: arguments of the call. Backward is included if the call would prepare for
            it: gradients are enabled, and an input or a parameter requires one.
        time: whether to measure times, each layer alone on the input it received; by default only
            for layers on a GPU.

    Returns:
        The rows of the report; `print` shows it as tables.

    Raises:
        TypeError: `model` is not a module.
        Exception: that of the call itself, unless it is an UnsupportedOperation.
    """
    call = CallObserver(model)
    with unchanged(model, inputs):
        with call.observing():
            outputs = model(*inputs, **keywords)
        saved = _saved_by_layers(model, call)
        del outputs  # Saved tensors live as long as the outputs.
        layers = tuple(_layer(scan, time) for scan in call.scans)
    neurons = {name: m for name, m in model.named_modules() if isinstance(m, Neuron)}
    event_layers = {n: m for n, m in model.named_modules() if isinstance(m, EventLinear)}
    loops = {n: m for n, m in model.named_modules() if isinstance(m, Feedback) and n in call.layers}
    called: set[nn.Module | None] = {*event_layers.values(), *call.recomputed}
    called |= {m.neuron for m in loops.values()}
    called |= {m for scan in call.scans for m in (scan.neuron, *scan.norms)}
    called |= {m.neuron for m in event_layers.values()}
    ours = called.union(*(m.modules() for m in neurons.values()))
    leaves = [m for m in model.modules() if not any(m.children())]
    timed = [scan for scan in call.scans if _is_timed(scan, time)]
    return Explanation(
        layers=layers,
        saved=saved,
        not_called=tuple(name for name, m in neurons.items() if m not in called),
        num_others=sum(m not in ours and not isinstance(m, Temporal) for m in leaves),
        bandwidth=copy_bandwidth(timed[0].request.inputs[0].device) if timed else None,
        events=tuple(_describe_events(name, m) for name, m in event_layers.items()),
        loops=tuple(_describe_loop(name, m) for name, m in loops.items()),
        recomputed=tuple(dict.fromkeys(call.recomputed.values())),
        unfused=(),
    )


def _describe_loop(name: str, layer: Feedback) -> str:
    return (
        f"{label(name)}: Feedback, a Python loop over time: each step calls "
        f"{type(layer.body).__name__} and a kernel of {type(layer.neuron).__name__}; on a GPU, "
        "sf.graph_step records it"
    )


def _describe_events(name: str, layer: EventLinear) -> str:
    widths = f"{label(name)}: EventLinear, {layer.in_features} to {layer.out_features}"
    activity = layer.activity
    if activity is None:
        return f"{widths}: not called"
    candidates = activity.candidates / max(activity.sites, 1)
    dropped = activity.dropped + activity.dropped_candidates
    return (
        f"{widths}, on {activity.choice.impl} ({activity.choice.reason}): {activity.rate:.2%} of "
        f"the inputs fired, {candidates:.2%} listed, {dropped} dropped"
    )


def _saved_by_layers(model: nn.Module, call: CallObserver) -> tuple[SavedBytes, ...]:
    """Return what each layer saves, and what it would save in PyTorch alone."""
    ignored = {_address(x) for x in (*model.parameters(), *model.buffers())}
    now, eager = Counter[str](), Counter[str]()
    counted: set[int] = set()  # addresses that `eager` includes

    def count(layer: str, x: Tensor) -> None:
        if _address(x) not in counted:
            counted.add(_address(x))
            eager[layer] += num_bytes(x)

    for size in call.saved.sizes(ignored):
        now[size.layer] += size.now
    for size in call.saved.sizes(ignored, call.layers.keys() - {scan.name for scan in call.scans}):
        eager[size.layer] += size.unpacked
        counted.add(size.address)
    for layer, x, num in call.pooled:
        # PyTorch saves 8 bytes per output instead of 1, and the input.
        eager[layer] += 7 * num
        count(layer, x)
    for scan in call.scans:
        num_steps = len(scan.request.inputs[0])
        measured = min(num_steps, LOOP_STEPS)
        inputs, others = _saved_eagerly(scan, measured)
        if num_steps > measured:
            per_step = others - _saved_eagerly(scan, measured - 1)[1]
            others += (num_steps - measured) * per_step
        eager[scan.name] += others
        for x in inputs:
            count(scan.name, x)
    on_events = {name for name, m in model.named_modules() if isinstance(m, EventLinear)}
    rows = [
        SavedBytes(name, module, now[name], None if name in on_events else eager[name])
        for name, module in call.layers.items()
    ]
    return tuple(row for row in rows if row.now or row.eager)


def _saved_eagerly(scan: NeuronScan, num_steps: int) -> tuple[list[Tensor], int]:
    """Return what PyTorch alone would save for the first steps: (saved inputs, other bytes)."""
    saved = SavedTensors()
    with saved.hooks():
        outputs, _ = scan.forward(num_steps, eager=True)
    sizes = list(saved.sizes({_address(x) for x in scan.tensors()}))
    del outputs
    addresses = {size.address for size in sizes}
    inputs = [x for x in scan.request.inputs if _address(x) in addresses]
    counted = {_address(x) for x in inputs}
    return inputs, sum(size.now for size in sizes if size.address not in counted)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_timed(scan: NeuronScan, time: bool | None) -> bool:
    return scan.request.inputs[0].is_cuda if time is None else time


def _layer(scan: NeuronScan, time: bool | None) -> Layer:
    xs, backend = scan.request.inputs, scan.request.backend
    name = None if backend == "reference" else _program_name(scan)
    moved, least, achieved = _bytes_moved(scan), None, None
    if _is_timed(scan, time):
        least = moved / copy_bandwidth(xs[0].device)
        achieved = seconds(functools.partial(_forward_backward, scan), xs[0].device)
    return Layer(
        name=scan.name,
        module=scan.module,
        shape=tuple(xs[0].shape),
        dtypes=tuple(x.dtype for x in xs),
        implementation=backend,
        memory=scan.memory,
        program=name,
        chunk=program(name).chunk(len(xs[0])) if name else None,
        moved=moved,
        least=least,
        achieved=achieved,
        notes=tuple(_copied_inputs(scan)) if name else (scan.reason,),
    )


@torch.no_grad()
def _program_name(scan: NeuronScan) -> str:
    request, backend = scan.request, scan.request.backend
    if not scan.norms:
        return choose(scan.neuron, backend, request.inputs[0], request.outputs).name
    has_residual, batch = len(request.inputs) > 1, by_batch(scan.norms[0])
    options = has_residual, batch, request.outputs, len(scan.norms) > 1
    return block_program(scan.neuron, backend, *options)[0].name


def _forward_backward(scan: NeuronScan) -> None:
    """Run forward, and backward if the call prepared for it."""
    outputs, leaves = scan.forward()
    if leaves:
        ys = [y for y in outputs if y.requires_grad]
        # The values of the gradients do not matter, and the outputs exist already.
        torch.autograd.grad(ys, leaves, [y.detach() for y in ys], allow_unused=True)


def _bytes_moved(scan: NeuronScan) -> int:
    """Return the bytes that must move; batch statistics take one more pass in each direction."""
    inputs = scan.request.inputs
    outputs, leaves = scan.forward()
    twice = [x for norm, x in zip(scan.norms, inputs, strict=False) if by_batch(norm)]
    once = sum(map(num_bytes, (*inputs, *outputs)))
    forward = once + sum(map(num_bytes, twice))
    if not leaves:
        return forward
    gradients = sum(x.nbytes for x in inputs if x.requires_grad)
    return forward + (2 if twice else 1) * once + gradients


def _copied_inputs(scan: NeuronScan) -> Iterator[str]:
    """Yield a note for every input that kernels cannot read in place."""
    inputs = scan.request.inputs
    labels = NAMES if scan.norms else type(scan.neuron).input_names
    layout = layout_of([(x.shape, x.stride()) for x in inputs])
    for i, (name, x) in enumerate(zip(labels, inputs, strict=False)):
        if outer_stride(x.shape, x.stride(), layout.order, layout.inner) is None:
            shape = f"input copied: {name} {list(x.shape)} with strides {list(x.stride())}"
            first = "its steps are not dense, or their pieces are too short to read in place"
            yield f"{shape}: {'its layout differs from the first input' if i else first}"
