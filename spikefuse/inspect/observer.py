"""Observe one call of a model: its scans, and what its layers save for backward."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.parametrize import is_parametrized

from spikefuse._torch import dynamo_is_imported
from spikefuse.block import block
from spikefuse.block.block import kind_of
from spikefuse.block.program import prepare_block
from spikefuse.compiler import UnsupportedOperation
from spikefuse.kernels.norm import BatchNorm
from spikefuse.memory.policies import Policy
from spikefuse.memory.saved_tensors import SavedTensors
from spikefuse.neurons.definition import Neuron, SpikingLayer
from spikefuse.nn.call import Observer, Scan, active, current_policy, observing
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.neuron import backend_of, check_module, scan_neuron, with_values_per_step
from spikefuse.scan.layout import flatten_steps, unflatten_steps
from spikefuse.scan.op import choose
from spikefuse.scan.records import Arguments, Results, Wanted

OUTSIDE = "(not in the model)"


@dataclass(frozen=True)
class NeuronScan:
    """One scan of a neuron, or of a block of norms and neuron, which can run once more.

    Attributes:
        name: the neuron's qualified name in the model.
        modules: the norms of a block, a recurrent layer, and the neuron.
        tensors: inputs `[T, B, ...]`, then others, such as initial states.
        num_inputs: how many of them are inputs.
        run: computes the outputs from such tensors; with `eager=True` as PyTorch alone would.
        program: the name of its kernels; None on the reference.
        memory: the policy in effect.
        reason: why it ran on the reference, or "".
        grad: whether gradients were enabled.
    """

    modules: tuple[nn.Module, ...]
    tensors: list[Tensor]
    num_inputs: int
    run: Callable[..., Sequence[Tensor]]
    program: str | None
    memory: Policy
    grad: bool
    name: str = ""
    reason: str = ""

    @property
    def inputs(self) -> list[Tensor]:
        return self.tensors[: self.num_inputs]

    @property
    def norms(self) -> list[BatchNorm]:
        return [m for m in self.modules if isinstance(m, BatchNorm)]

    @property
    def label(self) -> str:
        """The types of the modules, such as "BatchNorm2d + residual + LIF"."""
        types = [type(m).__name__ for m in self.modules]
        if len(self.norms) == 1 < self.num_inputs:
            types.insert(1, "residual")
        return " + ".join(types)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters and buffers."""
        return [x for m in self.modules for x in (*m.parameters(), *m.buffers())]

    def forward(
        self, num_steps: int | None = None, **options: Any
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Run the scan on new leaves: (outputs, leaves that receive a gradient in backward).

        Args:
            num_steps: the number of leading steps to run, None for all.
            options: of `run`.
        """
        tensors = [leaf(x[:num_steps]) for x in self.inputs]
        tensors += map(leaf, self.tensors[self.num_inputs :])
        with torch.set_grad_enabled(self.grad):
            outputs = self.run(tensors, **options)
        if not any(y.requires_grad for y in outputs):
            return outputs, []
        return outputs, [x for x in (*tensors, *self.parameters) if x.requires_grad]


def leaf(x: Tensor) -> Tensor:
    """Return `x` as a leaf that requires a gradient if `x` does."""
    return x.detach().requires_grad_(x.requires_grad)


# Module hooks are global, so one thread observes at a time.
_lock = threading.RLock()


def parametrizations(layer: nn.Module) -> nn.ModuleDict:
    """Return what computes parameters of a layer, such as the rounded ones of `sf.quantize`."""
    found = layer.parametrizations if is_parametrized(layer) else None
    return found if isinstance(found, nn.ModuleDict) else nn.ModuleDict()


def own_parameters(layer: nn.Module) -> set[Tensor]:
    """Return the parameters of a layer without those of its layers."""
    own = {*layer.parameters(recurse=isinstance(layer, Neuron | SpikingLayer))}
    return own | {*parametrizations(layer).parameters()}


class ModuleObserver(Observer):
    """Follows which layer of a model runs, in the thread that created the observer.

    Attributes:
        names: the qualified name of each module in the model, without the modules inside neurons
            and those that compute parameters.
        modules: the modules by name.
        layer: name of the running layer, "" outside.
    """

    def __init__(self, model: nn.Module) -> None:
        check_module("model", model)
        neurons = [m for m in model.modules() if isinstance(m, Neuron | SpikingLayer)]
        inner = {m for neuron in neurons for m in neuron.modules()}.difference(neurons)
        inner |= {m for layer in model.modules() for m in parametrizations(layer).modules()}
        self.modules = {name: m for name, m in model.named_modules() if m not in inner}
        self.names = {m: name for name, m in self.modules.items()}
        self.layer = ""
        self._thread = threading.get_ident()
        self._outer: list[str] = []

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        # Compiled modules would not call the hooks.
        with _lock, stance("force_eager"), observing(self), warnings.catch_warnings():
            # The hooks also run for the wrapper that torch.compile returns, which does no harm.
            warnings.filterwarnings("ignore", "Using `torch.compile.* global hooks")
            self._hook()
            try:
                yield
            finally:
                self._hooks.close()

    def _hook(self) -> None:
        # Global hooks, which also see neurons outside the model.
        self._hooks = contextlib.ExitStack()
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        leave = register_module_forward_hook(self._leave, always_call=True)
        self._hooks.callback(leave.remove)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() == self._thread:
            self._outer.append(self.layer)
            if module in self.names or isinstance(module, Neuron):
                self.layer = self.names.get(module, OUTSIDE)
                self.enter(module, inputs)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            if module in self.names and output is not None:  # None after an exception
                self.leave(module, output)
            self.layer = self._outer.pop()

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """See that a layer is called, with positional arguments `inputs`."""

    def leave(self, module: nn.Module, output: Any) -> None:
        """See the output of a layer."""


def stance(name: str) -> contextlib.AbstractContextManager[Any]:
    """Set the stance of torch.compile, if it is in use; see `torch.compiler.set_stance`."""
    is_used = dynamo_is_imported()
    return torch.compiler.set_stance(name) if is_used else contextlib.nullcontext()


class CallObserver(ModuleObserver):
    """Records what happens in one call of a model, in the thread that created the observer.

    Attributes:
        saved: what layers save for backward.
        layers: the type of each layer by name, in the order of the calls.
        scans: the scans of neurons and blocks.
        pooled: (layer, input, number of outputs) of each differentiable max pooling by our kernels.
        is_captured: whether a network ran that would run as a fused graph without an observer.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.saved = SavedTensors(lambda: self.layer)
        self.layers: dict[str, str] = {}
        self.scans: list[NeuronScan] = []
        self.pooled: list[tuple[str, Tensor, int]] = []
        self.is_captured = False

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        with super().observing(), self.saved.hooks():
            yield

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self.layers[self.layer] = type(module).__name__

    def scan(
        self, neuron: nn.Module, scan: Scan, arguments: Arguments[Tensor], wanted: Wanted
    ) -> Results[Tensor]:
        """Run a scan, on the reference if the neuron cannot be compiled, and record it."""
        assert isinstance(neuron, Neuron)
        if isinstance(getattr(scan, "__self__", neuron), Feedback):  # many scans, of a step each
            return super().scan(neuron, scan, arguments, wanted)
        self._enter(neuron, ())  # a block does not call the module
        try:
            wanted = wanted._replace(impl=backend_of(arguments.inputs, wanted.impl))
            reason, call = "", active.call
            if wanted.impl == "reference":
                is_inside = call is not None and id(neuron) in call.names
                caller = "Temporal" if is_inside else "the neuron"
                reason = f'on the reference: impl="reference" was passed to {caller}'
            try:
                results = super().scan(neuron, scan, arguments, wanted)
            except UnsupportedOperation as error:
                reason = f"not compiled, which a call raises as an error: {error}"
                wanted = wanted._replace(impl="reference")
                results = super().scan(neuron, scan, arguments, wanted)
            recorded = _recorded(neuron, scan, arguments, wanted)
            name = self.names.get(neuron, OUTSIDE)
            self.scans.append(replace(recorded, name=name, reason=reason))
        finally:
            self._leave(neuron, (), None)
        return results

    def pool(self, x: Tensor, y: Tensor) -> None:
        """Record a max pooling by our kernels."""
        super().pool(x, y)
        if y.requires_grad:
            self.pooled.append((self.layer, x.detach(), y.numel()))

    def network(
        self, function: Callable[..., Any], net: nn.Module, args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Run a network layer by layer that would run as a fused graph."""
        self.is_captured = True
        return super().network(function, net, args, kwargs)


def _recorded(
    neuron: Neuron, scan: Scan, arguments: Arguments[Tensor], wanted: Wanted
) -> NeuronScan:
    inputs, states = arguments.inputs, arguments.states or ()
    norms, memory, definition = (), None, neuron
    if isinstance(scan, partial) and scan.func is block.scan:
        norms, _, memory = scan.args
    elif isinstance(scan, partial) and scan.func is scan_neuron:
        definition, inputs = with_values_per_step(neuron, inputs)
        scan = partial(scan_neuron, definition)

    def run(tensors: Sequence[Tensor], eager: bool = False) -> Sequence[Tensor]:
        xs, state = tensors[: len(inputs)], tensors[len(inputs) :] or None
        if not eager:
            return scan(Arguments(xs, state), wanted).outputs
        xs, call = ([_sum(norms, xs)], partial(scan_neuron, neuron)) if norms else (xs, scan)
        return call(Arguments(xs, state), wanted._replace(impl="reference")).outputs

    return NeuronScan(
        modules=(*norms, *dict.fromkeys((getattr(scan, "__self__", neuron), neuron))),
        tensors=[*map(leaf, (*inputs, *states))],
        num_inputs=len(inputs),
        run=run,
        program=_program_of(definition, norms, inputs, wanted),
        memory=memory or current_policy(),
        grad=torch.is_grad_enabled(),
    )


def _program_of(
    neuron: Neuron, norms: Sequence[BatchNorm], inputs: Sequence[Tensor], wanted: Wanted
) -> str | None:
    if wanted.impl == "reference":
        return None
    kind = kind_of(norms, len(inputs), wanted.impl) if norms else None
    with torch.no_grad():
        if kind is None:
            return choose(neuron, inputs[0], wanted)[0]
        return prepare_block(neuron, wanted.impl, kind, wanted.outputs).name


def _sum(norms: Sequence[BatchNorm], inputs: Sequence[Tensor]) -> Tensor:
    """The sum of the inputs, of which the first are normalized, by PyTorch's operations."""
    values = list(inputs)
    for i, norm in enumerate(norms):
        # That of all norms except SyncBatchNorm, whose own needs a GPU.
        y = nn.BatchNorm1d.forward(norm, flatten_steps(inputs[i]))
        values[i] = unflatten_steps(y, len(inputs[i]))
    return sum(values[1:], values[0])


@contextlib.contextmanager
def unchanged(model: nn.Module, inputs: Iterable[Any]) -> Iterator[None]:
    """Restore the model's buffers, such as the running statistics of norms, and the state of
    PyTorch's random number generators on exit."""
    tensors = [x for x in (*inputs, *model.parameters()) if isinstance(x, Tensor)]
    devices = list({x.device for x in tensors if x.device.type == "cuda"})
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
