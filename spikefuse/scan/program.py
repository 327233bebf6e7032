"""Programs: a traced definition with its kernels, one for each backend and kinds of parameters."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from spikefuse.compiler import emit_numba, emit_triton
from spikefuse.compiler.adjoint import Reverse, reverse_step
from spikefuse.compiler.trace import Step, trace_step
from spikefuse.neurons.definition import Definition
from spikefuse.scan import cache
from spikefuse.scan.layout import Layout

# A parameter is a Python float, a 0-d tensor, or a tensor of one value per channel.
FLOAT, SCALAR, CHANNEL = "float", "scalar", "channel"


class Variant(NamedTuple):
    """What a kernel does besides its plain pass.

    Attributes:
        pack: forward also writes its binary outputs as bits.
        repair: update the results of a pass that began from the wrong states.
        rebuild: backward first writes the saved states, which forward did not.
    """

    pack: bool = False
    repair: bool = False
    rebuild: bool = False


class Launch(Protocol):
    """A kernel on sequences of certain shapes, strides, dtypes and on one device."""

    def __call__(
        self,
        sequences: Sequence[Tensor],
        states: Sequence[Tensor | None],
        sums: Sequence[Tensor | None],
        params: Sequence[float | Tensor],
    ) -> None:
        """Run `forward` or `backward` of a module; all tensors are in the order of the kernel.

        Args:
            sequences: inputs, then what is written; all fit the layout.
            states: one step each, or None where the kernel may do without.
            sums: backward: gradients of parameters per neuron or channel; forward: outputs as
                bits.
            params: floats, and contiguous float32 tensors.
        """
        ...


class Launcher(Protocol):
    """How a backend runs a kernel; the modules launch_numba and launch_triton are two."""

    def prepare(
        self, kernel: Any, layout: Layout, sequences: Sequence[Tensor], variant: Variant
    ) -> Launch:
        """Prepare a kernel for these sequences and for others that differ in values only."""
        ...


@dataclass
class Program:
    """One traced definition on one backend.

    `params` are the run-time values that the step reads, `kinds` what each of them is.
    """

    step: Step
    reverse: Reverse
    backend: str
    kinds: tuple[str, ...]
    modules: dict[tuple[tuple[str, ...], ...], ModuleType] = field(default_factory=dict)

    def chunk(self, num_steps: int) -> int:
        """Steps between two saved states of a sequence."""
        return emit_triton.chunk(num_steps) if self.backend == "triton" else emit_numba.CHUNK

    @property
    def rebuilds(self) -> bool:
        """Whether backward can do without saved states. Numba's kernels save few."""
        return self.backend == "triton" and bool(self.step.states)

    @cached_property
    def is_differentiable(self) -> bool:
        """Whether an output of the step passes gradients on."""
        return not self.reverse.graph.used().isdisjoint(f"g{y}" for y in self.step.outputs)

    @property
    def sums_channels(self) -> bool:
        """Whether backward sums the gradients of parameters over each channel; otherwise over time
        only."""
        return self.backend == "numba"

    @property
    def repairs(self) -> bool:
        """Whether kernels can repair a pass that began from the wrong states."""
        return self.rebuilds

    def named(self, kind: str) -> list[str]:
        return [n for n, k in zip(self.step.params, self.kinds, strict=True) if k == kind]

    def learnable(self) -> tuple[str, ...]:
        """Parameters that may require gradients."""
        tensors = zip(self.step.params, self.kinds, strict=True)
        return tuple(n for n, k in tensors if k != FLOAT and n in self.reverse.params)

    def module(
        self, grad_inputs: tuple[str, ...] | None = None, grad_params: tuple[str, ...] = ()
    ) -> ModuleType:
        """The kernels whose backward gives the gradients of these inputs (all by default) and
        parameters."""
        key = self.step.inputs if grad_inputs is None else grad_inputs, grad_params
        if key not in self.modules:
            source = self.source(*key)
            with _compiling:
                self.modules[key] = cache.load(source, self.step.name, self.backend)
        return self.modules[key]

    def source(self, grad_inputs: tuple[str, ...], grad_params: tuple[str, ...]) -> str:
        reverse = self.reverse.select(self.step, grad_inputs, grad_params)
        channels, scalars = self.named(CHANNEL), self.named(SCALAR)
        if self.backend == "triton":
            return emit_triton.source(self.step, reverse, channels, scalars)
        return emit_numba.source(self.step, reverse, channels)


# Neither tracing nor the import of generated source is thread-safe.
_compiling = threading.RLock()
_by_signature: dict[tuple[Any, ...], tuple[str, tuple[str, ...]]] = {}
_by_name: dict[str, Program] = {}


def program(name: str) -> Program:
    """The program of a name that `prepare` returned."""
    return _by_name[name]


def sizes_of(name: str) -> tuple[int, int]:
    """The numbers of outputs and states of a program."""
    step = program(name).step
    return step.num_outputs, len(step.states)


# Constant for torch.compile, which would not see a program that is added while it traces.
setattr(sizes_of, "_dynamo_marked_constant", True)  # noqa: B010


def prepare(
    definition: Definition,
    backend: str,
    statics: tuple[Any, ...],
    kinds: tuple[tuple[str, str], ...],
) -> tuple[str, tuple[str, ...]]:
    """The name of a definition's program, and the run-time values that it reads.

    Args:
        statics: the constants of `definition.describe()`.
        kinds: (name, kind) of every run-time value of the definition.
    """
    signature = (statics, backend, kinds)
    found = _by_signature.get(signature)
    if found is not None:
        return found
    with _compiling:
        made = _make(definition, backend, dict(kinds))
        # The same kernels, called alike, have the same name in every process.
        identity = repr((made.step.params, made.kinds)) + made.source(
            made.step.inputs, made.learnable()
        )
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        name = f"{made.step.name}-{backend}-{digest}"
        _by_name.setdefault(name, made)
        return _by_signature.setdefault(signature, (name, made.step.params))


def _make(definition: Definition, backend: str, kinds: dict[str, str]) -> Program:
    # PyTorch's modes, hooks and transforms belong to the caller's thread, so trace in another.
    with ThreadPoolExecutor(1) as thread:
        step, reverse = thread.submit(_trace, definition, kinds).result()
    used = step.graph.used() | reverse.graph.used()
    step = step.without_unused(used)
    return Program(step, reverse, backend, tuple(kinds[name] for name in step.params))


def _trace(definition: Definition, kinds: dict[str, str]) -> tuple[Step, Reverse]:
    step = trace_step(definition)
    # A float is not learned, so operations that only its gradient needs may lack a kernel.
    learned = [name for name, kind in kinds.items() if kind != FLOAT]
    return step, reverse_step(definition, step, learned)


def kind_of(value: float | Tensor) -> str:
    if isinstance(value, float):
        return FLOAT
    return SCALAR if value.ndim == 0 else CHANNEL
