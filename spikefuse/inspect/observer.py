"""Observe one call of a model: its scans, and what its layers save for backward."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spikefuse.compiler import UnsupportedOperation
from spikefuse.inspect.scans import NeuronScan, scan_of_call
from spikefuse.memory.saved_tensors import SavedTensors
from spikefuse.neurons.definition import Neuron
from spikefuse.nn.call import Observer, Scan, active, current_policy, observing
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.neuron import backend_of, check_module
from spikefuse.scan.records import Arguments, Results, Wanted

OUTSIDE = "(not in the model)"

# Module hooks are global, so one thread observes at a time.
_lock = threading.RLock()


class ModuleObserver(Observer):
    """Follows which layer of a model runs, in the thread that created the observer.

    Attributes:
        names: the qualified name of each module in the model, without the modules inside neurons.
        layer: name of the running layer, "" outside.
    """

    def __init__(self, model: nn.Module) -> None:
        check_module("model", model)
        neurons = [m for m in model.modules() if isinstance(m, Neuron)]
        inner = {m for neuron in neurons for m in neuron.modules()}.difference(neurons)
        self.names = {m: name for name, m in model.named_modules() if m not in inner}
        self.layer = ""
        self._thread = threading.get_ident()
        self._outer: list[str] = []

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        # Compiled modules would not call the hooks.
        with _lock, _stance("force_eager"), observing(self), warnings.catch_warnings():
            # The hooks also run for the wrapper that torch.compile returns, which does no harm.
            warnings.filterwarnings("ignore", "Using `torch.compile.* global hooks")
            self._hook()
            try:
                yield
            finally:
                self._unhook()

    def _hook(self) -> None:
        # Global hooks, which also see neurons outside the model.
        enter = register_module_forward_pre_hook(self._enter)
        self._hooks = enter, register_module_forward_hook(self._leave, always_call=True)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let what runs in a `with` block be compiled, without hooks, which are compiled, too."""
        layer, active.observer = self.layer, None
        self._unhook()
        try:
            with _stance("default"):
                yield
        finally:
            self.layer, active.observer = layer, self
            self._hook()

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


def _stance(name: str) -> contextlib.AbstractContextManager[Any]:
    """Let torch.compile do as `torch.compiler.set_stance` says, if it is in use."""
    is_used = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance(name) if is_used else contextlib.nullcontext()


class CallObserver(ModuleObserver):
    """Records what happens in one call of a model, in the thread that created the observer.

    Attributes:
        saved: what layers save for backward.
        layers: the type of each layer by name, in the order of the calls.
        scans: the scans of neurons and blocks.
        pooled: (layer, input, number of outputs) of each differentiable max pooling by our kernels.
        is_captured: whether a network would run as a fused graph.
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
            name = self.names.get(neuron, OUTSIDE)
            found = scan_of_call(name, neuron, scan, arguments, wanted, current_policy())
            found = replace(found, reason=reason)
            self.layers[name] = found.label
            self.scans.append(found)
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
        """Run a network that would run as a fused graph, layer by layer."""
        self.is_captured = True
        return super().network(function, net, args, kwargs)


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
