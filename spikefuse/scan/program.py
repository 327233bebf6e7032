"""Programs: a traced definition with its kernels, one for each backend and kinds of parameters."""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import compress
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from spikefuse._torch import constant_result
from spikefuse.compiler import (
    emit_numba,
    emit_recurrent_numba,
    emit_recurrent_triton,
    emit_triton,
)
from spikefuse.compiler.adjoint import Reverse, reverse_step
from spikefuse.compiler.trace import Step, trace_step
from spikefuse.compiler.variables import KERNELS, Variables
from spikefuse.kernels.threads import compiling, on_thread
from spikefuse.neurons.definition import Neuron
from spikefuse.neurons.description import Cache
from spikefuse.scan import cache as files
from spikefuse.scan.kinds import CHANNEL, FLOAT, SCALAR, Kinds, kinds_of, skeleton
from spikefuse.scan.layout import Layout

T = TypeVar("T")


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


class StateFlow(NamedTuple):
    """How a state depends on inputs and states of earlier steps, as autograd follows them.

    Attributes:
        inputs, states: the indices of inputs and earlier states.
        is_uniform: whether the derivatives are the same for all neurons and at all steps, and so
            are those of these states.
    """

    inputs: Sequence[int]
    states: Sequence[int]
    is_uniform: bool

    def joined(self, others: Sequence[StateFlow]) -> StateFlow:
        """Add what the states depend on that this one depends on."""
        flows = [self, *others]
        inputs = {i for flow in flows for i in flow.inputs}
        states = {i for flow in flows for i in flow.states}
        return StateFlow(sorted(inputs), sorted(states), all(flow.is_uniform for flow in flows))


_Maybe = Sequence[Tensor | None]
#: A kernel on sequences of certain shapes, strides, dtypes and on one device. In the order of the
#: kernel, it takes sequences (inputs, then what is written; all fit the layout), states (one step
#: each, or None where the kernel may do without), for backward sums of the gradients of parameters
#: or for forward outputs as bits, and parameters (floats, and contiguous float32 tensors).
Launch = Callable[[Sequence[Tensor], _Maybe, _Maybe, Sequence[float | Tensor]], None]


class Operands(NamedTuple):
    """The tensors of a recurrent kernel, by role in its order.

    Attributes:
        weight: `[heads, width, width]`.
        packed: the weight as the kernel reads it, from `Launcher.pack`.
        binary: whether what is multiplied by the weight is sure to be 0 or 1.
        start: what is multiplied at the first step: outputs in their dtype for forward, gradients
            in float32 for backward; None for 0.
        read: sequences `[T, B, N]` whose neurons are adjacent in memory.
        written: contiguous sequences, or None where the kernel may do without.
        steps: contiguous steps, or None where the kernel may do without.
        sums: from `Launcher.new_sums`.
        params: floats, and contiguous float32 tensors.
    """

    weight: Tensor
    packed: Tensor
    binary: bool
    start: Tensor | None
    read: Sequence[Tensor]
    written: Sequence[Tensor | None]
    steps: Sequence[Tensor | None]
    sums: Sequence[Tensor]
    params: Sequence[float | Tensor]


class Launcher(Protocol):
    """How a backend runs a kernel; the modules launch_numba and launch_triton are two."""

    def prepare(
        self,
        kernel: Any,
        layout: Layout,
        sequences: Sequence[Tensor],
        variant: Variant,
        by_channel: bool,
        has_sums: bool,
    ) -> Launch:
        """Prepare a kernel for these sequences and for others that differ in values only.

        Args:
            by_channel: whether it reads parameters with one value per channel.
            has_sums: whether it sums gradients of parameters.
        """

    def sums_shape(
        self, layout: Layout, itemsize: int, device: torch.device, by_channel: bool
    ) -> tuple[tuple[int], torch.dtype]:
        """Return shape and dtype of the sums that make up the gradient of one parameter: one per
        channel, or one for each of some neurons, which are whole rows of channels.

        Args:
            itemsize: of the first input.
        """

    def new_sums(self, like: Tensor, count: int) -> list[Tensor]:
        """Sums of the gradients of `count` parameters in recurrent scans like `like`, which add up
        to one value per neuron along dim 0."""

    def pack(self, weight: Tensor, transposed: bool) -> Tensor:
        """A weight as recurrent kernels read it, those of `backward` if it is transposed."""
        ...

    def run_recurrent(self, kernel: Any, operands: Operands) -> None:
        """Run `forward` or `backward` of a recurrent module."""

    def spike_product(self, grad: Tensor, spikes: Tensor, heads: int) -> Tensor | None:
        """`out[h, i, j]`, the sum of `grad[t, b, h, i] spikes[t, b, h, j]` over steps and samples,
        or None where a dense product is at least as fast.

        Args:
            grad: float32, contiguous `[T, B, N]`, where N is heads times width.
            spikes: 0 or 1 after the first step, likewise.
        """


@dataclass
class Program:
    """One traced definition on one backend; `kinds` says what each parameter of the step is."""

    step: Step
    reverse: Reverse
    backend: str
    kinds: tuple[str, ...]
    #: What was traced, without the values of its tensors; see `skeleton`.
    definition: Neuron = field(compare=False, repr=False)
    #: By the arguments of `source`.
    modules: dict[tuple[Any, ...], ModuleType] = field(default_factory=dict)
    #: The caches of the neurons that run it, or None where its users are not known, as those of
    #: captured graphs.
    users: WeakSet[Cache] | None = field(default_factory=WeakSet, compare=False, repr=False)
    #: The launches of its kernels, which each `Execution` prepares.
    launches: WeakSet[Cache] = field(default_factory=WeakSet, compare=False, repr=False)

    @cached_property
    def name(self) -> str:
        """A name that the same kernels, called alike, have in every process."""
        identity = repr((self.step.params, self.kinds, [*map(sorted, self.reverse.paths)]))
        identity += self.source(self.step.inputs, self.learnable())
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        return f"{self.step.name}-{self.backend}-{digest}"

    def chunk(self, num_steps: int) -> int:
        """Steps between two saved states of a sequence."""
        return emit_triton.chunk(num_steps) if self.backend == "triton" else emit_numba.CHUNK

    @property
    def rebuilds(self) -> bool:
        """Whether backward can do without saved states. Numba's kernels save few."""
        return self.backend == "triton" and bool(self.step.states)

    #: Whether kernels can repair a pass that began from the wrong states.
    repairs = rebuilds

    @cached_property
    def follows_input(self) -> bool:
        """Whether autograd follows every result of the step back to its first input."""
        return all(self.step.graph.inputs[0] in path for path in self.reverse.paths)

    @cached_property
    def state_flow(self) -> list[StateFlow]:
        """For each new state, how autograd follows it back."""
        step, graph = self.step, self.reverse.graph
        first, num = len(step.inputs), len(step.states)
        varying = {*step.graph.inputs[: first + num]}
        tensors = step.graph.inputs[first + num :]
        varying.update(n for n, kind in zip(tensors, self.kinds, strict=True) if kind == CHANNEL)
        found = []
        for new in step.gradients[step.num_outputs :]:
            alone = graph.without([name for name in step.gradients if name != new])
            outputs = alone.outputs[: first + num]
            reads = [i for i, y in enumerate(outputs) if y != 0.0]
            inputs = [i for i in reads if i < first]
            states = [i - first for i in reads[len(inputs) :]]
            is_uniform = varying.isdisjoint(alone.select(outputs).used())
            found.append(StateFlow(inputs, states, is_uniform))
        for _ in found:  # what a state depends on through another one, some steps later
            found = [f.joined([found[i] for i in f.states]) for f in found]
        return found

    @cached_property
    def is_differentiable(self) -> bool:
        """Whether an output of the step passes gradients on."""
        return any(self.reverse.paths[: self.step.num_outputs])

    def params(self, *kinds: str) -> list[str]:
        """The parameters of these kinds."""
        return [n for n, k in zip(self.step.params, self.kinds, strict=True) if k in kinds]

    def learnable(self) -> tuple[str, ...]:
        """Parameters that may require gradients."""
        return tuple(n for n in self.params(SCALAR, CHANNEL) if n in self.reverse.params)

    def forward(self, recurrent: bool = False) -> Any:
        return self._load("forward", (self.step.inputs, (), (), recurrent))

    def backward(
        self,
        grad_inputs: tuple[str, ...],
        grad_params: tuple[str, ...],
        absent: tuple[str, ...] = (),
        recurrent: bool = False,
    ) -> Any:
        """The backward kernel that gives the gradients of these inputs and parameters, where
        `absent` gradients are neither read nor counted."""
        return self._load("backward", (grad_inputs, grad_params, absent, recurrent))

    def _load(self, kernel: str, key: tuple[Any, ...]) -> Any:
        # Numba's cache is keyed by the file, so neurons that differ in their gradients only share
        # the machine code of a forward kernel of its own.
        key = (*key, (kernel,) if self.backend == "numba" else KERNELS)
        module = self.modules.get(key)
        found = getattr(module, kernel, None)
        if found is not None:
            return found
        with compiling:
            if key not in self.modules:
                _drop_unused(self)
                made = self.source(*key), self.step.name, self.backend
                self.modules[key] = on_thread(files.load, *made)
            return getattr(self.modules[key], kernel)

    def source(
        self,
        grad_inputs: tuple[str, ...],
        grad_params: tuple[str, ...],
        absent: tuple[str, ...] = (),
        recurrent: bool = False,
        kernels: tuple[str, ...] = KERNELS,
    ) -> str:
        reverse = self.reverse.select(self.step, grad_inputs, grad_params, absent)
        emitter = _EMITTERS[self.backend, recurrent]
        made = emitter(self.step, reverse, self.params(CHANNEL), self.params(SCALAR))
        return made.source(kernels)


# By backend, and whether outputs are fed back.
_EMITTERS: dict[tuple[str, bool], type[Variables]] = {
    ("numba", False): emit_numba.NumbaEmitter,
    ("numba", True): emit_recurrent_numba.RecurrentNumbaEmitter,
    ("triton", False): emit_triton.TritonEmitter,
    ("triton", True): emit_recurrent_triton.RecurrentTritonEmitter,
}
_by_signature: dict[tuple[Any, ...], Program] = {}
_by_name: dict[str, Program] = {}


def program(name: str) -> Program:
    """The program of a name."""
    return _by_name[name]


# torch.compile would not see a program that is added while it traces.
@constant_result
def sizes_of(name: str) -> tuple[tuple[bool, ...], int]:
    """For each output of a program, whether all its values are sure to be 0 or 1; and the number of
    its states."""
    step = program(name).step
    return step.binary, len(step.states)


@constant_result
def follows_input(name: str) -> bool:
    """See `Program.follows_input`."""
    return program(name).follows_input


@cache
def _requires_grad(
    name: str,
    inputs: tuple[bool, ...],
    states: tuple[bool, ...],
    params: tuple[bool, ...],
    num_steps: int,
    feeds_back: bool = False,
) -> tuple[bool, ...]:
    """For each output and final state of a program, whether the eager loop's requires a gradient.

    Args:
        inputs, states, params: which of these do. The last parameters of the program are meant, and
            with `feeds_back` the last state is the first output before the first step.
    """
    own = program(name)
    step, paths = own.step, own.reverse.paths
    if not own.is_differentiable and not own.definition._selected:
        warnings.warn(
            f"no output of {step.name}.step has a gradient, so nothing before it learns from its "
            "outputs: make spikes with a surrogate, as in self.surrogate(v - threshold), not with "
            "a comparison",
            stacklevel=4,
        )
    names, first, split = step.graph.inputs, len(step.inputs), len(step.inputs) + len(step.states)
    tensors = [names[split + step.params.index(p)] for p in own.params(SCALAR, CHANNEL)]
    fixed = {*compress(names[:first], inputs), *compress(tensors[-len(params) :], params)}
    alive, is_fed = [*compress(names[first:split], states)], feeds_back and any(states[-1:])
    outputs = [False] * step.num_outputs
    for _ in range(num_steps):
        known = fixed.union(alive, names[:1] if is_fed else ())
        found = [not path.isdisjoint(known) for path in paths]
        outputs = [*map(operator.or_, outputs, found)]
        finals, is_fed = found[step.num_outputs :], feeds_back and found[0]
        alive = [*compress(names[first:split], finals)]
    return (*outputs, *finals)


@constant_result
def requires_grad(name: str, *flags: Any) -> tuple[bool, ...]:
    """See `_requires_grad`, whose cache torch.compile would trace through."""
    return _requires_grad(name, *flags)


def _drop_unused(current: Program) -> None:
    """Drop the machine code of Numba's programs that no neuron runs any longer, except `current`.

    A later call, such as a backward pass of a neuron that is gone, loads it from disk, for good.
    """
    loaded = [own for own in _by_name.values() if own.backend == "numba" and own.modules]
    unused = [o for o in loaded if o.users is not None and not o.users and o is not current]
    # Neurons that differ in their gradients only share modules.
    others = [own for own in loaded if not any(own is o for o in unused)]
    shared = {id(module) for own in others for module in own.modules.values()}
    for own in unused:
        for module in own.modules.values():
            if id(module) not in shared:
                files.unload(module, KERNELS)
        own.modules.clear()
        own.users = None
        for launches in own.launches:
            launches.clear()


def prepare(
    definition: Neuron,
    backend: str,
    statics: tuple[Any, ...],
    kinds: Kinds,
    user: Cache | None = None,
) -> Program:
    """The program of a definition.

    Args:
        statics: those of the description of `definition`.
        user: the cache of a neuron that may call the program; without, its kernels are never
            dropped.
    """
    signature = (statics, backend, kinds)
    found = _by_signature.get(signature) or _new(definition, backend, signature, kinds)
    if user is None:
        found.users = None
    elif found.users is not None:
        found.users.add(user)
    return found


def _new(definition: Neuron, backend: str, signature: tuple[Any, ...], kinds: Kinds) -> Program:
    with compiling:
        step, reverse, model = _without_modes(_trace, definition, kinds)
        used = tuple(dict(kinds)[name] for name in step.params)
        made = Program(step, reverse, backend, used, model)
        return _by_signature.setdefault(signature, _by_name.setdefault(made.name, made))


def check_compiles(definition: Neuron) -> None:
    """Trace a definition and its derivatives, whatever its tensors are.

    Raises:
        UnsupportedOperation: kernels do not support an operation.
    """
    with compiling:
        _without_modes(_trace, definition, kinds_of(definition.values()))


def _without_modes(trace: Callable[..., T], *args: Any) -> T:
    """Call a function that traces, outside PyTorch's modes, hooks and transforms."""
    # They belong to the caller's thread, so trace in another.
    return on_thread(trace, *args)


def traced(definition: Neuron) -> Step:
    """One step of a definition, without its derivatives; see `trace_step`."""
    with compiling:
        return _without_modes(trace_step, definition)


def _trace(definition: Neuron, kinds: Kinds) -> tuple[Step, Reverse, Neuron]:
    step = trace_step(definition)
    # A float is not learned, so operations that only its gradient needs may lack a kernel.
    learned = [name for name, kind in kinds if kind != FLOAT]
    reverse = reverse_step(definition, step, learned)
    step = step.without_unused(step.graph.used() | reverse.graph.used())
    return step, reverse, skeleton(definition, kinds)
