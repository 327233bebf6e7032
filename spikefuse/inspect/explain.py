"""Explain a call of a model: how its neurons run, what they cost, and what its layers save."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.block.batch_norm import by_batch
from spikefuse.events.linear import EventLinear
from spikefuse.inspect.explanation import LOOP_STEPS, Explanation, Layer, SavedBytes
from spikefuse.inspect.timing import copy_bandwidth, seconds
from spikefuse.inspect.watch import NeuronScan, Watch, leaf, watching
from spikefuse.memory.saved_tensors import SavedTensors, num_bytes
from spikefuse.neurons.definition import Outputs, States
from spikefuse.nn.neuron import Neuron
from spikefuse.nn.temporal import Temporal
from spikefuse.scan.layout import layout_of, outer_stride
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
        inputs, keywords: arguments of the call. Backward is included if the call would prepare for
            it: gradients are enabled, and an input or a parameter requires one.
        time: whether to measure times, each layer alone on the input it received; by default only
            for layers on a GPU.

    Returns:
        The rows of the report; `print` shows it as tables.

    Raises:
        TypeError: `model` is not a module.
        Any exception of the call itself, except UnsupportedOperation.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
    tensors = [x for x in (*inputs, *model.parameters()) if isinstance(x, Tensor)]
    devices = list({x.device for x in tensors if x.device.type == "cuda"})
    watch = Watch(model)
    with _buffers_restored(model), torch.random.fork_rng(devices):
        with watching(watch):
            outputs = model(*inputs, **keywords)
        saved = _saved_by_layers(model, watch)
        del outputs  # Saved tensors live as long as the outputs.
        layers = tuple(_layer(scan, time) for scan in watch.scans)
    event_layers = {n: m for n, m in model.named_modules() if isinstance(m, EventLinear)}
    called: set[nn.Module] = {*event_layers.values(), *watch.recomputed}
    called |= {m for scan in watch.scans for m in (scan.neuron, scan.norm) if m is not None}
    called |= {m.neuron for m in event_layers.values() if m.neuron is not None}
    neurons = {name: m for name, m in model.named_modules() if isinstance(m, Neuron)}
    timed = [
        s.device for s, layer in zip(watch.scans, layers, strict=True) if layer.least is not None
    ]
    return Explanation(
        layers=layers,
        saved=saved,
        not_called=tuple(name for name, m in neurons.items() if m not in called),
        num_others=_num_others(model, called.union(*(m.modules() for m in neurons.values()))),
        bandwidth=copy_bandwidth(timed[0]) if timed else None,
        events=tuple(_describe_events(name, m) for name, m in event_layers.items()),
        recomputed=tuple(dict.fromkeys(watch.recomputed.values())),
    )


def _describe_events(name: str, layer: EventLinear) -> str:
    """Describe the last call of an `EventLinear`."""
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
def _buffers_restored(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers, such as the running statistics of norms, on exit."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _num_others(model: nn.Module, ours: Collection[nn.Module]) -> int:
    leaves = [m for m in model.modules() if not any(m.children()) and m not in ours]
    return sum(not isinstance(m, Temporal) for m in leaves)


def _saved_by_layers(model: nn.Module, watch: Watch) -> tuple[SavedBytes, ...]:
    """Return what each layer saves, and what it would save in PyTorch alone."""
    ignored = {_address(x) for x in (*model.parameters(), *model.buffers())}
    now, eager = dict.fromkeys(watch.layers, 0), dict.fromkeys(watch.layers, 0)
    counted: set[int] = set()  # addresses that `eager` includes

    def count(layer: str, x: Tensor) -> None:
        if _address(x) not in counted:
            counted.add(_address(x))
            eager[layer] += num_bytes(x)

    for size in watch.saved.sizes(ignored):
        now[size.layer] += size.now
    for size in watch.saved.sizes(ignored, now.keys() - {scan.name for scan in watch.scans}):
        eager[size.layer] += size.unpacked
        counted.add(size.address)
    for layer, x, num in watch.pooled:
        # PyTorch saves 8 bytes per output instead of 1, and the input.
        eager[layer] += 7 * num
        count(layer, x)
    for scan in watch.scans:
        inputs, others = _saved_eagerly(scan)
        eager[scan.name] += others
        for x in inputs:
            count(scan.name, x)
    on_events = {name for name, m in model.named_modules() if isinstance(m, EventLinear)}
    rows = [
        SavedBytes(name, module, now[name], None if name in on_events else eager[name])
        for name, module in watch.layers.items()
    ]
    return tuple(row for row in rows if row.now or row.eager)


def _saved_eagerly(scan: NeuronScan) -> tuple[list[Tensor], int]:
    """Return what PyTorch alone would save: the inputs among it, and the bytes of the rest."""
    num_steps = len(scan.inputs[0])
    measured = min(num_steps, LOOP_STEPS)
    inputs, others = _saved_in_steps(scan, measured)
    if num_steps > measured:
        others += (num_steps - measured) * (others - _saved_in_steps(scan, measured - 1)[1])
    return inputs, others


def _saved_in_steps(scan: NeuronScan, num_steps: int) -> tuple[list[Tensor], int]:
    """Return the same for the first steps only."""
    saved = SavedTensors()
    with saved.hooks():
        outputs = _Replay(scan, scan.run_eager, num_steps).forward()
    sizes = list(saved.sizes({_address(x) for x in scan.tensors()}))
    del outputs
    inputs = [x for x in scan.inputs if any(size.address == _address(x) for size in sizes)]
    addresses = {_address(x) for x in inputs}
    return inputs, sum(size.now for size in sizes if size.address not in addresses)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _Replay:
    """A scan on new leaves, perhaps of its first steps only."""

    def __init__(
        self,
        scan: NeuronScan,
        run: Callable[[tuple[Tensor, ...], States | None], tuple[Outputs, States]],
        num_steps: int | None = None,
    ) -> None:
        self.run, self.grad = run, scan.grad
        self.inputs = tuple(leaf(x, x[:num_steps]) for x in scan.inputs)
        self.state = None if scan.state is None else tuple(leaf(s, s) for s in scan.state)
        tensors = (*self.inputs, *(self.state or ()), *scan.tensors())
        self.leaves = [x for x in tensors if x.requires_grad]

    def forward(self) -> Outputs:
        with torch.set_grad_enabled(self.grad):
            return self.run(self.inputs, self.state)[0]

    def differentiable(self, outputs: Outputs) -> list[Tensor]:
        return [y for y in outputs if y.requires_grad] if self.leaves else []

    def forward_backward(self) -> None:
        ys = self.differentiable(self.forward())
        if ys:
            # The values of the gradients do not matter, and the outputs cost nothing to make.
            torch.autograd.grad(ys, self.leaves, [y.detach() for y in ys], allow_unused=True)


def _layer(scan: NeuronScan, time: bool | None) -> Layer:
    """Return the row of a scan."""
    xs = scan.inputs
    replay = _Replay(scan, scan.run)
    moved = _bytes_moved(scan, replay)
    least = achieved = None
    if time or (time is None and scan.device.type == "cuda"):
        least = moved / copy_bandwidth(scan.device)
        achieved = seconds(replay.forward_backward, scan.device)
    return Layer(
        name=scan.name,
        module=scan.module,
        shape=tuple(xs[0].shape),
        dtypes=tuple(x.dtype for x in xs),
        implementation=scan.backend,
        memory=scan.memory,
        program=scan.program,
        chunk=program(scan.program).chunk(len(xs[0])) if scan.program else None,
        moved=moved,
        least=least,
        achieved=achieved,
        notes=tuple(_copied_inputs(scan)) if scan.program else (_reason(scan),),
    )


def _bytes_moved(scan: NeuronScan, replay: _Replay) -> int:
    """Return the bytes that must move. Batch statistics take one more pass in each direction."""
    outputs = replay.forward()
    read, written = (sum(map(num_bytes, xs)) for xs in (scan.inputs, outputs))
    twice = scan.norm is not None and by_batch(scan.norm)
    forward = read + written + (num_bytes(scan.inputs[0]) if twice else 0)
    if not replay.differentiable(outputs):
        return forward
    gradients = sum(x.nbytes for x in scan.inputs if x.requires_grad)
    return forward + (2 if twice else 1) * (read + written) + gradients


def _reason(scan: NeuronScan) -> str:
    """Return why a scan ran on the reference."""
    if scan.error:
        return f"not compiled, which a call raises as an error: {scan.error}"
    who = "Temporal" if scan.in_temporal else "the neuron"
    return f'on the reference: impl="reference" was passed to {who}'


def _copied_inputs(scan: NeuronScan) -> Iterator[str]:
    """Yield a note for every input that kernels cannot read in place."""
    labels = type(scan.neuron).input_names if scan.norm is None else ("x", "residual")
    layout = layout_of(scan.inputs)
    for i, (label, x) in enumerate(zip(labels, scan.inputs, strict=False)):
        if outer_stride(x.shape, x.stride(), layout.order, layout.inner) is None:
            shape = f"input copied: {label} {list(x.shape)} with strides {list(x.stride())}"
            first = "its steps are not dense, or their pieces are too short to read in place"
            yield f"{shape}: {'its layout differs from the first input' if i else first}"
