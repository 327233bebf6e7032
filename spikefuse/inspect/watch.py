"""Watch one call of a model: its scans, and what its layers save for backward."""

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
from spikefuse.block.batch_norm import by_batch
from spikefuse.block.program import block_program
from spikefuse.compiler import UnsupportedOperation
from spikefuse.memory.policies import Policy, Recompute
from spikefuse.memory.saved_tensors import SavedTensors
from spikefuse.neurons.definition import Outputs, States
from spikefuse.nn.call import Scan, active, observing
from spikefuse.nn.neuron import Neuron, backend_of
from spikefuse.scan.op import Request
from spikefuse.scan.program import kind_of, prepare

OUTSIDE = "(not in the model)"


@dataclass(frozen=True)
class NeuronScan:
    """One scan of a neuron, or of a block of norm and neuron, on inputs `[T, B, ...]`.

    Attributes:
        name: the neuron's qualified name in the model.
        memory: the policy in effect.
        program: the name of its kernels, or None on the reference.
        error: why the neuron could not be compiled, or "".
        in_temporal: whether a `Temporal` made the call.
        grad: whether gradients were enabled.
    """

    name: str
    neuron: Neuron
    norm: _BatchNorm | None
    memory: Policy
    inputs: tuple[Tensor, ...]
    state: States | None
    return_state: bool
    backend: str
    program: str | None
    error: str
    in_temporal: bool
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
        """Yield the parameters and buffers."""
        for module in (self.neuron, self.norm):
            if module is not None:
                yield from (*module.parameters(), *module.buffers())

    def run(self, inputs: tuple[Tensor, ...], state: States | None) -> tuple[Outputs, States]:
        """Run the scan on other values."""
        request = Request(inputs, state, self.backend, self.return_state)
        if self.norm is None:
            return self.neuron._scan(request)
        return block.scan(self.norm, self.neuron, self.memory, request)

    def run_eager(self, inputs: tuple[Tensor, ...], state: States | None) -> tuple[Outputs, States]:
        """Run norm, sum and neuron one after the other, as PyTorch alone would."""
        norm = self.norm
        if norm is not None:
            (x, *residual), batch = inputs, by_batch(norm)
            running = (None, None) if batch else (norm.running_mean, norm.running_var)
            affine, folded = (norm.weight, norm.bias), x.flatten(0, 1)
            y = nn.functional.batch_norm(folded, *running, *affine, batch, eps=norm.eps)
            inputs = (sum(residual, y.unflatten(0, x.shape[:2])),)
        return self.neuron._scan(Request(inputs, state, "reference", self.return_state))


class Watch:
    """What happens in one call of a model, in the thread that created the watch.

    Attributes:
        saved: what layers save for backward.
        layers: the type of each layer by name, in the order of the calls.
        scans: the scans of neurons and blocks.
        pooled: (layer, input, number of outputs) of each differentiable max pooling by our kernels.
        recomputed: modules that `Checkpoint` recomputes, and the name of their network.
    """

    def __init__(self, model: nn.Module) -> None:
        neurons = [m for m in model.modules() if isinstance(m, Neuron)]
        parts = {part for neuron in neurons for part in neuron.modules()}.difference(neurons)
        self._names = {m: name for name, m in model.named_modules() if m not in parts}
        self._thread = threading.get_ident()
        self._outer: list[str] = []
        self.saved = SavedTensors()
        self.layers: dict[str, str] = {}
        self.scans: list[NeuronScan] = []
        self.pooled: list[tuple[str, Tensor, int]] = []
        self.recomputed: dict[nn.Module, str] = {}

    @property
    def is_watching(self) -> bool:
        return threading.get_ident() == self._thread

    def name_of(self, neuron: Neuron) -> str:
        return self._names.get(neuron, OUTSIDE)

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Attribute saved tensors to `module`, or if it is no layer, to the layer around it."""
        if not self.is_watching:
            return
        self._outer.append(self.saved.layer)
        if module in self._names or isinstance(module, Neuron):
            self.saved.layer = self._names.get(module, OUTSIDE)
            self.layers[self.saved.layer] = type(module).__name__

    def leave(self, module: nn.Module, *_: Any) -> None:
        if self.is_watching:
            self.saved.layer = self._outer.pop()

    def scan(self, neuron: nn.Module, scan: Scan, request: Request) -> tuple[Outputs, States]:
        """Run a scan, on the reference if the neuron cannot be compiled, and record it."""
        assert isinstance(neuron, Neuron)
        self.enter(neuron)
        try:
            backend, error = backend_of(request.inputs, request.backend), ""
            try:
                results = scan(request._replace(backend=backend))
            except UnsupportedOperation as unsupported:
                backend, error = "reference", str(unsupported)
                results = scan(request._replace(backend=backend))
            found = self._neuron_scan(neuron, scan, request._replace(backend=backend), error)
            self.layers[found.name] = found.module
            self.scans.append(found)
        finally:
            self.leave(neuron)
        return results

    def _neuron_scan(self, neuron: Neuron, scan: Scan, request: Request, error: str) -> NeuronScan:
        inputs, state, backend, call = request.inputs, request.state, request.backend, active.call
        # A block passes a partial of `block.scan` on (norm, neuron, memory).
        norm, _, memory = scan.args if isinstance(scan, functools.partial) else (None, None, None)
        return NeuronScan(
            name=self.name_of(neuron),
            neuron=neuron,
            norm=norm,
            memory=memory or (Recompute() if call is None else call.policy),
            inputs=tuple(leaf(x, x) for x in inputs),
            state=None if state is None else tuple(leaf(s, s) for s in state),
            return_state=request.final,
            backend=backend,
            program=_program(neuron, norm, backend, len(inputs) > 1),
            error=error,
            in_temporal=call is not None and id(neuron) in call.names,
            grad=torch.is_grad_enabled(),
        )

    def pool(self, x: Tensor, y: Tensor) -> None:
        """Record a max pooling by our kernels."""
        if y.requires_grad:
            self.pooled.append((self.saved.layer, x.detach(), y.numel()))

    def checkpoint(self, modules: Iterable[nn.Module]) -> None:
        """Record the modules that `Checkpoint` runs and recomputes in backward."""
        self.recomputed |= dict.fromkeys(modules, self.saved.layer)


# Hooks are global, so one thread watches at a time.
_lock = threading.RLock()


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Notify `watch` of what its thread does."""
    # Compiled modules would not call the hooks.
    dynamo = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if dynamo else contextlib.nullcontext()
    with _lock, eager, observing(watch), warnings.catch_warnings():
        # The hooks also run for the wrapper that torch.compile returns, which does no harm.
        warnings.filterwarnings("ignore", "Using `torch.compile.* global hooks")
        # Global hooks: Temporal runs modules with hooks of their own differently.
        enter = register_module_forward_pre_hook(watch.enter)
        leave = register_module_forward_hook(watch.leave, always_call=True)
        try:
            with watch.saved.hooks():
                yield
        finally:
            enter.remove()
            leave.remove()


def _program(neuron: Neuron, norm: _BatchNorm | None, backend: str, adds: bool) -> str | None:
    if backend == "reference":
        return None
    if norm is not None:
        return block_program(neuron, backend, adds, by_batch(norm))[0].name
    with torch.no_grad():
        values, statics = neuron.describe()
    kinds = tuple((name, kind_of(value)) for name, value in values.items())
    return prepare(neuron, backend, statics, kinds)[0]


def leaf(like: Tensor, x: Tensor) -> Tensor:
    """Return `x` as a leaf that requires a gradient if `like` does."""
    return x.detach().requires_grad_(like.requires_grad)
