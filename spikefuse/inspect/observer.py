"""Observe one call of a model: its scans, and what its layers save for backward."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spikefuse.block import block
from spikefuse.compiler import UnsupportedOperation
from spikefuse.kernels.norm import by_batch
from spikefuse.memory.policies import Policy, Recompute
from spikefuse.memory.saved_tensors import SavedTensors
from spikefuse.neurons.definition import Neuron, Outputs, States
from spikefuse.nn.call import Observer, Scan, active, observing
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.neuron import backend_of, check_module, scan_neuron
from spikefuse.nn.recurrent import Recurrent
from spikefuse.scan.op import Request

OUTSIDE = "(not in the model)"


@dataclass(frozen=True)
class NeuronScan:
    """One scan of a neuron, or of a block of norm and neuron.

    Attributes:
        name: the neuron's qualified name in the model.
        owner: the module that ran: the neuron, or the recurrent layer around it.
        norms: of the input, and of the residual if it has one; none for a neuron alone.
        request: the inputs `[T, B, ...]` and the state as leaves, and the implementation that ran.
        memory: the policy in effect.
        reason: why it ran on the reference, or "".
        grad: whether gradients were enabled.
    """

    name: str
    neuron: Neuron
    owner: Neuron | Recurrent
    norms: tuple[_BatchNorm, ...]
    request: Request
    memory: Policy
    reason: str
    grad: bool

    @property
    def module(self) -> str:
        norms = [type(norm).__name__ for norm in self.norms]
        if len(norms) == 1 and len(self.request.inputs) > 1:
            norms.append("residual")
        layer = [type(self.owner).__name__] if self.owner is not self.neuron else []
        return " + ".join([*norms, *layer, type(self.neuron).__name__])

    def tensors(self) -> list[Tensor]:
        """Return the parameters and buffers."""
        modules = self.owner, *self.norms
        return [x for m in modules for x in (*m.parameters(), *m.buffers())]

    def forward(
        self, num_steps: int | None = None, eager: bool = False
    ) -> tuple[Outputs, list[Tensor]]:
        """Run the scan on new leaves: (outputs, leaves that receive a gradient in backward).

        Args:
            num_steps: the number of leading steps to run, None for all.
            eager: run norm, sum and neuron one after the other, as PyTorch alone would.
        """
        request = self.request
        inputs = tuple(leaf(x, num_steps) for x in request.inputs)
        state = None if request.state is None else tuple(map(leaf, request.state))
        leaves = [x for x in (*inputs, *(state or ()), *self.tensors()) if x.requires_grad]
        with torch.set_grad_enabled(self.grad):
            if eager:
                inputs = (_normalized(self.norms, inputs),) if self.norms else inputs
                request = request._replace(backend="reference")
            request = request._replace(inputs=inputs, state=state)
            if eager or not self.norms:
                if isinstance(self.owner, Recurrent):
                    outputs, _ = self.owner._scan(request)
                else:
                    outputs, _ = scan_neuron(self.owner, request)
            else:
                outputs, _ = block.scan(self.norms, self.neuron, self.memory, request)
        return outputs, leaves if any(y.requires_grad for y in outputs) else []


def _normalized(norms: Iterable[_BatchNorm], inputs: tuple[Tensor, ...]) -> Tensor:
    values = list(inputs)
    for i, norm in enumerate(norms):
        batch, affine, x = by_batch(norm), (norm.weight, norm.bias), values[i]
        running = (None, None) if batch else (norm.running_mean, norm.running_var)
        y = nn.functional.batch_norm(x.flatten(0, 1), *running, *affine, batch, eps=norm.eps)
        values[i] = y.unflatten(0, x.shape[:2])
    return sum(values[1:], values[0])


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
        dynamo = "torch._dynamo" in sys.modules
        eager = torch.compiler.set_stance("force_eager") if dynamo else contextlib.nullcontext()
        with _lock, eager, observing(self), warnings.catch_warnings():
            # The hooks also run for the wrapper that torch.compile returns, which does no harm.
            warnings.filterwarnings("ignore", "Using `torch.compile.* global hooks")
            # Global hooks, because Temporal runs modules with local hooks differently.
            enter = register_module_forward_pre_hook(self._enter)
            leave = register_module_forward_hook(self._leave, always_call=True)
            try:
                yield
            finally:
                enter.remove()
                leave.remove()

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


class CallObserver(ModuleObserver):
    """Records what happens in one call of a model, in the thread that created the observer.

    Attributes:
        saved: what layers save for backward.
        layers: the type of each layer by name, in the order of the calls.
        scans: the scans of neurons and blocks.
        pooled: (layer, input, number of outputs) of each differentiable max pooling by our kernels.
        recomputed: modules that `Checkpoint` recomputes, and the name of their network.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.saved = SavedTensors(lambda: self.layer)
        self.layers: dict[str, str] = {}
        self.scans: list[NeuronScan] = []
        self.pooled: list[tuple[str, Tensor, int]] = []
        self.recomputed: dict[nn.Module, str] = {}

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        with super().observing(), self.saved.hooks():
            yield

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self.layers[self.layer] = type(module).__name__

    def scan(self, neuron: nn.Module, scan: Scan, request: Request) -> tuple[Outputs, States]:
        """Run a scan, on the reference if the neuron cannot be compiled, and record it."""
        assert isinstance(neuron, Neuron)
        owner = getattr(scan, "__self__", neuron)
        if isinstance(owner, Feedback):  # many scans, of a step each
            return super().scan(neuron, scan, request)
        self._enter(neuron, ())  # a block does not call the module
        try:
            backend, call = backend_of(request.inputs, request.backend), active.call
            who = "the neuron" if call is None or id(neuron) not in call.names else "Temporal"
            reason = f'on the reference: impl="reference" was passed to {who}'
            try:
                results = super().scan(neuron, scan, request._replace(backend=backend))
            except UnsupportedOperation as error:
                backend = "reference"
                reason = f"not compiled, which a call raises as an error: {error}"
                results = super().scan(neuron, scan, request._replace(backend=backend))
            state = None if request.state is None else tuple(map(leaf, request.state))
            norms, memory = (), None
            if isinstance(scan, functools.partial) and scan.func is block.scan:
                norms, _, memory = scan.args
            recorded = NeuronScan(
                name=self.names.get(neuron, OUTSIDE),
                neuron=neuron,
                owner=owner,
                norms=tuple(norms),
                request=Request(
                    tuple(map(leaf, request.inputs)),
                    state,
                    backend,
                    request.final,
                    outputs=request.outputs,
                ),
                memory=memory or (Recompute() if call is None else call.policy),
                reason=reason if backend == "reference" else "",
                grad=torch.is_grad_enabled(),
            )
            self.layers[recorded.name] = recorded.module
            self.scans.append(recorded)
        finally:
            self._leave(neuron, (), None)
        return results

    def pool(self, x: Tensor, y: Tensor) -> None:
        """Record a max pooling by our kernels."""
        super().pool(x, y)
        if y.requires_grad:
            self.pooled.append((self.layer, x.detach(), y.numel()))

    def checkpoint(self, modules: Iterable[nn.Module]) -> None:
        """Record the modules that `Checkpoint` runs and recomputes in backward."""
        super().checkpoint(modules)
        self.recomputed |= dict.fromkeys(modules, self.layer)


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


def leaf(x: Tensor, num_steps: int | None = None) -> Tensor:
    """Return `x`, or its first steps, as a leaf that requires a gradient if `x` does."""
    return x[:num_steps].detach().requires_grad_(x.requires_grad)
