"""Explain a call of a model: how its neurons run, what they cost, and what its layers save."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.compiler import UnsupportedOperation
from spikefuse.events.linear import EventLinear
from spikefuse.inspect.explanation import LOOP_STEPS, Explanation, Layer, SavedBytes, label
from spikefuse.inspect.graphs import GraphObserver
from spikefuse.inspect.observer import CallObserver, NeuronScan, unchanged
from spikefuse.inspect.timing import copy_bandwidth, seconds
from spikefuse.kernels.norm import by_batch
from spikefuse.memory.saved_tensors import SavedTensors, address_of, num_bytes
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.call import active
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.temporal import Temporal
from spikefuse.scan.layout import layout_of, outer_stride
from spikefuse.scan.program import program


def explain(
    model: nn.Module, *inputs: Any, time: bool | None = None, **keywords: Any
) -> Explanation:
    """Run `model(*inputs, **keywords)` and report how its neurons run and what they cost.

    The report shows the kernel of each neuron, its memory traffic and time, and what each layer
    saves for backward. A neuron that cannot be compiled runs in the eager loop, and its row gives
    the reason; a call of the model itself raises the error. Buffers of the model and the state of
    PyTorch's random number generators are restored.

    A model with networks of `spikefuse.fuse`, or with the policy `Checkpoint`, runs twice. The
    first call runs each layer on its own, which takes the memory of the plain network and shows
    what eager PyTorch would save. In the second call, the networks are captured anew and run as
    fused graphs, in the mode "eager": it shows the kernels of neurons with the norms fused with
    them, what is saved, and why other norms were not fused. What the segments of `Checkpoint` save
    counts for the network. Inside `spikefuse.record` there is no second call.

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(784, 128), sf.LIF(), nn.Linear(128, 10)))
        print(sf.explain(net, torch.rand(8, 32, 784)))

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
    call, graphs = CallObserver(model), GraphObserver(model)
    with unchanged(model, inputs):
        with call.observing():
            outputs = model(*inputs, **keywords)
        saved, eager, scans = _saved(model, call), _saved_eagerly(model, call), call.scans
        del outputs  # Saved tensors live as long as the outputs.
        if call.is_captured and active.observer is None:
            # A network with a neuron that cannot be compiled has no graphs.
            with contextlib.suppress(UnsupportedOperation), graphs.observing():
                outputs = model(*inputs, **keywords)
                if any(report.graphs for report in graphs.reports):
                    saved, scans = _saved(model, graphs), _with_graphs(scans, graphs.scans)
                del outputs
        layers = tuple(_layer(scan, time) for scan in scans)
    timed = [scan for scan in scans if _is_timed(scan, time)]
    neurons = {name: m for name, m in call.modules.items() if isinstance(m, Neuron)}
    ours = {m for scan in scans for m in scan.modules}
    ours = ours.union(*(neuron.modules() for neuron in neurons.values()))
    others = [m for m in model.modules() if not any(m.children()) and m not in ours]
    labels = {scan.name: scan.label for scan in scans}
    return Explanation(
        layers=layers,
        saved=tuple(_saved_rows(call, labels, saved, eager)),
        not_called=tuple(name for name in neurons if not _was_called(name, call)),
        num_others=sum(not isinstance(m, Temporal | EventLinear) for m in others),
        bandwidth=copy_bandwidth(timed[0].inputs[0].device) if timed else None,
        notes=tuple(dict.fromkeys(_notes(call, graphs))),
    )


def _saved(model: nn.Module, call: CallObserver) -> Counter[str]:
    """The bytes that each layer saves."""
    saved = Counter[str]()
    for size in call.saved.sizes([*model.parameters(), *model.buffers()]):
        saved[size.layer] += size.now
    return saved


def _saved_eagerly(model: nn.Module, call: CallObserver) -> Counter[str]:
    """The bytes that each layer would save in PyTorch alone."""
    eager = Counter[str]()
    counted: set[int] = set()  # addresses that `eager` includes

    def count(layer: str, x: Tensor) -> None:
        if address_of(x) not in counted:
            counted.add(address_of(x))
            eager[layer] += num_bytes(x)

    ordinary = call.layers.keys() - {scan.name for scan in call.scans}
    for size in call.saved.sizes([*model.parameters(), *model.buffers()], ordinary):
        eager[size.layer] += size.unpacked
        counted.add(size.address)
    for layer, x, num in call.pooled:
        # PyTorch saves 8 bytes per output instead of 1, and the input.
        eager[layer] += 7 * num
        count(layer, x)
    for scan in call.scans:
        num_steps = len(scan.inputs[0])
        measured = min(num_steps, LOOP_STEPS)
        saved, others = _saved_by_loop(scan, measured)
        if num_steps > measured:
            per_step = others - _saved_by_loop(scan, measured - 1)[1]
            others += (num_steps - measured) * per_step
        eager[scan.name] += others
        for x in scan.inputs:
            if address_of(x) in saved:
                count(scan.name, x)
    return eager


def _saved_by_loop(scan: NeuronScan, num_steps: int) -> tuple[set[int], int]:
    """What PyTorch alone would save for the first steps: (addresses, bytes besides the inputs)."""
    saved = SavedTensors()
    with saved.hooks():
        outputs, _ = scan.forward(num_steps, eager=True)
    sizes, inputs = [*saved.sizes(scan.parameters)], {*map(address_of, scan.inputs)}
    del outputs
    others = sum(size.now for size in sizes if size.address not in inputs)
    return {size.address for size in sizes}, others


def _saved_rows(
    call: CallObserver, labels: dict[str, str], saved: Counter[str], eager: Counter[str]
) -> Iterator[SavedBytes]:
    for name in dict.fromkeys((*call.layers, *saved)):
        is_known = not isinstance(call.modules.get(name), EventLinear)
        if saved[name] or (is_known and eager[name]):
            module = labels.get(name) or call.layers.get(name, "")
            yield SavedBytes(name, module, saved[name], eager[name] if is_known else None)


def _with_graphs(scans: Sequence[NeuronScan], fused: Sequence[NeuronScan]) -> list[NeuronScan]:
    """The scans of layers, and in place of those that are in graphs, the scans of these."""
    in_graphs = {scan.name for scan in fused}
    names = dict.fromkeys(scan.name for scan in scans)
    return [s for n in names for s in (fused if n in in_graphs else scans) if s.name == n]


def _was_called(neuron: str, call: CallObserver) -> bool:
    """Whether a neuron ran, on its own or as a part of a layer."""
    layer = neuron.rpartition(".")[0]
    is_part = isinstance(call.modules.get(layer), EventLinear | Feedback)
    return neuron in call.layers or (is_part and layer in call.layers)


def _notes(call: CallObserver, graphs: GraphObserver) -> Iterator[str]:
    for name, layer in call.modules.items():
        if isinstance(layer, EventLinear):
            yield f"{label(name)}: EventLinear, {_on_events(layer)}"
        elif isinstance(layer, Feedback) and name in call.layers:
            yield (
                f"{label(name)}: Feedback, a Python loop over time: each step calls "
                f"{type(layer.body).__name__} and a kernel of {type(layer.neuron).__name__}; on a "
                "GPU, sf.graph_step records it"
            )
    for report in graphs.reports:
        for place in report.places:
            if place.reason is not None:
                yield f"{label(place.norm)}: batch norm, not fused: {place.reason}"
        network = label(report.prefix.rstrip("."))
        if report.graphs > 1:
            yield f"{network}: captured in several graphs; it saves what layers of later ones save"
        for note in report.notes:
            yield f"{network}: {note}"


def _on_events(layer: EventLinear) -> str:
    widths, activity = f"{layer.in_features} to {layer.out_features}", layer.activity
    if activity is None:
        return f"{widths}: not called"
    candidates = activity.candidates / max(activity.sites, 1)
    dropped = activity.dropped + activity.dropped_candidates
    return (
        f"{widths}, on {activity.choice.impl} ({activity.choice.reason}): {activity.rate:.2%} of "
        f"the inputs fired, {candidates:.2%} listed, {dropped} dropped"
    )


def _is_timed(scan: NeuronScan, time: bool | None) -> bool:
    return scan.inputs[0].is_cuda if time is None else time


def _layer(scan: NeuronScan, time: bool | None) -> Layer:
    xs, made = scan.inputs, None if scan.program is None else program(scan.program)
    moved, least, achieved = _bytes_moved(scan), None, None
    if _is_timed(scan, time):
        least = moved / copy_bandwidth(xs[0].device)
        achieved = seconds(functools.partial(_forward_backward, scan), xs[0].device)
    return Layer(
        name=scan.name,
        module=scan.label,
        shape=tuple(xs[0].shape),
        dtypes=tuple(x.dtype for x in xs),
        implementation="reference" if made is None else made.backend,
        memory=scan.memory,
        program=scan.program,
        chunk=None if made is None else made.chunk(len(xs[0])),
        moved=moved,
        least=least,
        achieved=achieved,
        notes=(scan.reason,) if made is None else tuple(_copied_inputs(xs, made.step.inputs)),
    )


def _forward_backward(scan: NeuronScan) -> None:
    """Run forward, and backward if the call prepared for it."""
    outputs, leaves = scan.forward()
    if leaves:
        ys = [y for y in outputs if y.requires_grad]
        # The values of the gradients do not matter, and the outputs exist already.
        torch.autograd.grad(ys, leaves, [y.detach() for y in ys], allow_unused=True)


def _bytes_moved(scan: NeuronScan) -> int:
    """Return the bytes that must move; batch statistics take one more pass in each direction."""
    outputs, leaves = scan.forward()
    once = sum(map(num_bytes, (*scan.inputs, *outputs)))
    twice = [x for norm, x in zip(scan.norms, scan.inputs, strict=False) if by_batch(norm)]
    forward = once + sum(map(num_bytes, twice))
    if not leaves:
        return forward
    gradients = sum(x.nbytes for x in scan.inputs if x.requires_grad)
    return forward + (2 if twice else 1) * once + gradients


def _copied_inputs(inputs: Sequence[Tensor], names: Sequence[str]) -> Iterator[str]:
    """Yield a note for every input that kernels cannot read in place."""
    layout = layout_of([(x.shape, x.stride()) for x in inputs])
    for i, (name, x) in enumerate(zip(names, inputs, strict=True)):
        if outer_stride(x.shape, x.stride(), layout.order, layout.inner) is None:
            shape = f"input copied: {name} {list(x.shape)} with strides {list(x.stride())}"
            first = "its steps are not dense, or their pieces are too short to read in place"
            yield f"{shape}: {'its layout differs from the first input' if i else first}"
