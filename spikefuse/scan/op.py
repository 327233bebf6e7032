"""The fused scan as a PyTorch operation: library ops, their fakes, and autograd.

A `Call` is an operation without its tensors. `register` makes it an op of the library and its
backward another one, for torch.compile, fake tensors and subclasses. Eager calls share forward and
backward with the ops but skip the dispatcher, which costs several times a small kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from spikefuse.compiler.adjoint import has_gradient
from spikefuse.kernels.triton_runtime import interpreted
from spikefuse.neurons.definition import Neuron, States, channel_view, with_outputs
from spikefuse.neurons.surrogate import no_gradient
from spikefuse.scan import state_passing
from spikefuse.scan.double_backward import no_double_backward, refuse_double_backward
from spikefuse.scan.execution import (
    Arguments,
    Execution,
    Flags,
    Incoming,
    MaybeTensors,
    Needs,
    Results,
    Tensors,
    Wanted,
    execution_of,
)
from spikefuse.scan.program import Kinds, kinds_of, prepare, sizes_of
from spikefuse.scan.state_passing import StatePassing

#: Kernels are compiled in this process, and an exported program would not find them in another.
NO_EXPORT = (
    "torch.export, ONNX and TorchScript can't contain fused kernels: pass spikefuse.exportable(net)"
    " to torch.export.export, torch.onnx.export(..., dynamo=True) or torch.jit.trace"
)

_HAS_TRITON = importlib.util.find_spec("triton") is not None

library = torch.library.Library("spikefuse", "DEF")


class Request(NamedTuple):
    """What a neuron asks of its scan.

    Attributes:
        inputs: `[T, B, ...]` each.
        state: the initial states, or None to start from rest.
        backend: "triton" or "numba"; for neurons also "reference" or "auto".
        final: whether to return the final states.
        bits: whether to return binary outputs as bits, if the kernel can write them.
        passing: where the first state comes from, None for `state`.
        outputs: names of the outputs and states to return over time; empty for all outputs.
    """

    inputs: tuple[Tensor, ...]
    state: States | None = None
    backend: str = "auto"
    final: bool = False
    bits: bool = False
    passing: StatePassing | None = None
    outputs: tuple[str, ...] = ()


class ProgramChoice(NamedTuple):
    """The program of a definition and the values that it reads.

    Attributes:
        binary: for each output, whether all its values are sure to be 0 or 1.
    """

    name: str
    binary: tuple[bool, ...]
    scalars: list[float]
    params: list[Tensor]


def scan(definition: Neuron, request: Request) -> tuple[Results, tuple[bool, ...]]:
    """Run `definition` over dim 0 of the inputs in one kernel; see `spikefuse.reference.scan`.

    Returns:
        The results, and for each output whether all its values are sure to be 0 or 1.
    """
    inputs = request.inputs
    check_backend(request.backend, inputs[0])
    name, binary, scalars, params = choose(definition, request.backend, inputs[0], request.outputs)
    arguments = Arguments(inputs, request.state or (), params, scalars)
    wanted = Wanted(False, request.final, request.bits)
    return run(name, arguments, wanted, request.passing), binary


def run(
    name: str, arguments: Arguments, wanted: Wanted, passing: StatePassing | None = None
) -> Results:
    """Run a program, with gradients of all tensors. The results hold no saved states."""
    inputs, states, params, scalars = arguments
    counts = [len(inputs), len(states)]
    call = ScanCall([name], counts, scalars, passing, wanted.bits)
    return execute(call, [*inputs, *states, *params], wanted.final)


@dataclass
class Call:
    """An operation without its tensors: what autograd stores between forward and backward.

    Its tensors are inputs, initial states and others. `forward` returns outputs, final states (if
    asked), and what backward reads besides the tensors (if asked). `backward` takes what was saved,
    and returns the gradients of the needed tensors.

    Attributes:
        programs: their names; the first one determines the outputs and states.
        counts: the numbers of inputs and initial states.
        saves_states: whether forward saves what backward could recompute.
        num_outputs: known after forward.
        overwrites: whether backward may write into what forward saved.
        microbatches: with state passing, the numbers of initial and saved states of each.
    """

    programs: Sequence[str]
    counts: Sequence[int]
    scalars: Sequence[float]
    passing: StatePassing | None = None
    wants_bits: bool = False
    saves_states: bool = True
    num_outputs: int = field(default=0, init=False)
    overwrites: bool = field(default=False, init=False)
    bits: Tensors = field(default=(), init=False)
    microbatches: Sequence[tuple[int, int]] = field(default=(), init=False)
    #: The name of the library op.
    op: ClassVar[str]
    #: Which of the tensors backward reads.
    read = slice(None)

    def arguments(self, tensors: Tensors) -> Arguments:
        split, end = self.counts[0], sum(self.counts)
        return Arguments(tensors[:split], tensors[split:end], tensors[end:], self.scalars)

    def num_results(self, final: bool) -> int:
        self.num_outputs, num_states = sizes_of(self.programs[0])
        return self.num_outputs + (num_states if final else 0)

    def forward(self, tensors: Tensors, save: bool, final: bool) -> tuple[Tensors, Tensors]:
        """The outputs and final states, and what else to save for backward."""
        raise NotImplementedError

    def backward(self, tensors: Tensors, grads: MaybeTensors, needed: Flags) -> list[Tensor]:
        """The gradients of the needed tensors of `forward`.

        Args:
            tensors: those of `forward` that it reads, and then what else was saved.
            grads: of the outputs and final states.
        """
        raise NotImplementedError

    def new_results(self, tensors: Tensors, save: bool, final: bool) -> list[Tensor]:
        """What `forward` returns, without values."""
        execution = fake_execution(self.programs[0], self.arguments(tensors).inputs)
        results = execution.new_results(Wanted(save, final))
        return [*results.outputs, *results.finals, *(results.saved or ())]

    def new_gradients(self, tensors: Tensors, grads: MaybeTensors, needed: Flags) -> list[Tensor]:
        """What `backward` returns, without values."""
        arguments, needs = self.arguments(tensors[: len(needed)]), self.needs(needed)
        execution = fake_execution(self.programs[0], arguments.inputs)
        found = execution.new_gradients(needs._replace(params=()))
        states = compress(found.states, needed[self.counts[0] : sum(self.counts)])
        params = compress(arguments.params, needs.params)
        return [*found.inputs, *states, *map(torch.empty_like, params)]

    def needs(self, needed: Flags) -> Needs:
        split, end = self.counts[0], sum(self.counts)
        return Needs(tuple(needed[:split]), end > split, tuple(needed[end:]))


def execute(call: Call, tensors: Tensors, final: bool) -> Results:
    """The results of a call, with gradients of all tensors. They hold no saved states."""
    save = False
    if torch.is_grad_enabled():
        for t in tensors:
            if t.requires_grad:
                save = True
                break
    found: Tensors
    if call.passing is None and not is_plain(tensors):
        given = call.programs, list(tensors), call.counts, list(call.scalars)
        run_op = getattr(torch.ops.spikefuse, call.op)
        found = run_op(*given, save and call.saves_states, final)[: call.num_results(final)]
    elif call.passing is not None and torch.compiler.is_compiling():
        return _execute_outside_dynamo(call, tensors, final)
    else:
        found = _apply(call, final, *tensors) if save else call.forward(tensors, False, final)[0]
    # The graph keeps `call` alive, but must not hold the bits.
    num, bits, call.bits = call.num_outputs, list(call.bits), ()
    return Results(list(found[:num]), list(found[num:]), None, bits)


# States are passed between processes, which torch.compile must not trace.
_execute_outside_dynamo = _disable_dynamo(execute)


class _Eager(torch.autograd.Function):
    """The autograd of eager calls."""

    @staticmethod
    def forward(ctx: Any, call: Call, final: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, saved = call.forward(tensors, True, final)
        ctx.save_for_backward(*tensors[call.read], *saved)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[2:]
        return None, None, *_differentiate(ctx.call, ctx.saved_tensors, grads, needed)


# `torch.autograd.Function.apply` also checks for function transforms. Here, `is_plain` or
# `check_backend` has already excluded them.
_apply = super(torch.autograd.Function, _Eager).apply


def _differentiate(
    call: Call, tensors: Tensors, grads: MaybeTensors, needed: Flags
) -> list[Tensor | None]:
    """The gradients of a call's tensors, None where none is needed; see `Call.backward`."""
    found: MaybeTensors
    if call.passing is not None or is_plain(tensors):  # the library op passes no states
        # Without retain_graph, nobody reads the saved tensors after this.
        call.overwrites = not torch._C._autograd._get_current_graph_task_keep_graph()
        if torch.is_grad_enabled():
            with torch.no_grad():
                found = call.backward(tensors, grads, needed)
            found = refuse_double_backward(found, *tensors, *grads)
        else:
            found = call.backward(tensors, grads, needed)
    else:
        given = call.programs, list(tensors), call.counts, list(call.scalars)
        backward = getattr(torch.ops.spikefuse, f"{call.op}_backward")
        found = backward(*given, list(grads), list(needed))
    if False in needed:
        rest = iter(found)
        return [next(rest) if need else None for need in needed]
    return list(found)


@dataclass
class ScanCall(Call):
    """A scan; its tensors are inputs, initial states and parameters."""

    op = "scan"
    execution: Execution | None = None

    def forward(self, tensors: Tensors, save: bool, final: bool) -> tuple[Tensors, Tensors]:
        (name,), arguments = self.programs, self.arguments(tensors)
        wanted = Wanted(save, final, self.wants_bits)
        saved: Tensors
        if self.passing is None:
            execution = self.execution = execution_of(name, arguments.inputs)
            results = execution.new_results(wanted)
            if save and not execution.is_ahead:
                needs = self.needs([t.requires_grad for t in tensors])
                execution.compile_backward(arguments, results, needs)
            execution.forward(arguments, results)
            saved = results.saved or ()
        else:
            passed = state_passing.scan_forward(self.passing, name, arguments, wanted)
            results, saved, self.microbatches = passed
        self.num_outputs, self.bits = len(results.outputs), results.bits
        return [*results.outputs, *results.finals], saved

    def backward(self, tensors: Tensors, grads: MaybeTensors, needed: Flags) -> list[Tensor]:
        arguments, saved = self.arguments(tensors[: len(needed)]), tensors[len(needed) :]
        execution = self.execution or execution_of(self.programs[0], arguments.inputs)
        incoming = Incoming(grads[: execution.num_outputs], grads[execution.num_outputs :])
        needs = self.needs(needed)
        if self.passing is None:
            found = execution.new_gradients(needs)
            execution.backward(arguments, saved, incoming, found)
            params = found.params
            if params:
                params = execution.reduce(params, [*compress(arguments.params, needs.params)])
        else:
            scans = state_passing.split(self.passing, self.programs[0], arguments)
            scans = state_passing.with_states(scans, saved, self.microbatches)
            inputs = execution.new_gradients(Needs(needs.inputs, False, ())).inputs
            found = state_passing.scan_backward(self.passing, scans, incoming, needs, inputs)
            params = found.params
        states = compress(found.states, needed[self.counts[0] : sum(self.counts)])
        return [*found.inputs, *states, *params]


def choose(
    definition: Neuron, backend: str, x: Tensor, outputs: tuple[str, ...] = ()
) -> ProgramChoice:
    """The program of a definition on a backend, for inputs like `x`; see `Request.outputs`."""
    if torch.compiler.is_compiling():
        cache, values = None, definition.values()
        name, used, binary = definition.evaluate(_prepare, backend, kinds_of(values), outputs)
    else:
        description = definition.description()
        cache = description.cache
        found: ProgramChoice | None = cache.get((backend, outputs))
        if found is not None:  # for definitions whose values are all floats
            return found
        values = description.values()
        selected, statics = with_outputs(definition, outputs), (*description.statics, outputs)
        made = prepare(selected, backend, statics, kinds_of(values))
        name, used, binary = made.name, made.step.params, made.step.binary
    scalars, params = [], []
    for label in used:
        value = values[label]
        if isinstance(value, float):
            scalars.append(value)
        else:
            check_param(definition, label, value, x)
            params.append(value)
    chosen = ProgramChoice(name, binary, scalars, params)
    if cache is not None and all(isinstance(value, float) for value in values.values()):
        cache[backend, outputs] = chosen
    return chosen


def _prepare(
    definition: Neuron, backend: str, kinds: Kinds, outputs: tuple[str, ...]
) -> tuple[str, tuple[str, ...], tuple[bool, ...]]:
    definition = with_outputs(definition, outputs)
    made = prepare(definition, backend, definition.description().statics, kinds)
    return made.name, made.step.params, made.step.binary


def refuse_export() -> None:
    """Raise NotImplementedError inside torch.export and torch.jit.trace, except where TorchDynamo
    reads this code: it calls `fake`, and in torch 2.11 knows no exports from other graphs."""
    is_exported = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    if is_exported or torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(NO_EXPORT)


def check_backend(backend: str, x: Tensor) -> None:
    """Check that kernels of a backend can run on `x`, outside exports and function transforms.

    Raises:
        NotImplementedError: inside a transform of torch.func, forward-mode differentiation,
            torch.export or torch.jit.trace.
        ImportError: Triton is not installed.
        ValueError: the input is on another device.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        refuse_export()
    else:
        interpreter = torch._C._functorch.peek_interpreter_stack()
        if forward_ad._current_level >= 0 or (
            interpreter is not None and interpreter.key().name in ("Grad", "Jvp", "Vmap")
        ):
            raise NotImplementedError(
                "forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap) "
                'do not work through a fused neuron: use backward(), or grad with impl="reference"'
            )
    if backend == "numba" and not x.is_cpu:
        raise ValueError(f'impl="numba" runs on the CPU, but the input is on {x.device}')
    if backend == "triton":
        if not _HAS_TRITON:
            raise ImportError('Triton is not installed: pip install "spikefuse[gpu]"')
        if not x.is_cuda and not interpreted():
            raise ValueError(
                f'impl="triton" needs a GPU, but the input is on {x.device}: use impl="auto", or '
                "set TRITON_INTERPRET=1 before starting Python to run Triton's interpreter"
            )


def check_param(definition: Neuron, name: str, value: Tensor, x: Tensor) -> None:
    """Refuse a tensor parameter of a wrong shape, on another device than `x`, or that a step gives
    no gradient.

    Raises:
        ValueError, TypeError: it is refused.
    """
    channel_view(name, value, x.shape[1:])
    if value.device != x.device:
        raise ValueError(
            f"parameter '{name}' is on {value.device}, the input on {x.device}: move the module "
            f"with .to({str(x.device)!r})"
        )
    if value.requires_grad and not has_gradient(definition, name):
        raise no_gradient(name)


def is_plain(tensors: Tensors) -> bool:
    """Whether nothing observes or transforms operations, so that the dispatcher can be skipped."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
    ):
        return False
    for t in tensors:
        if type(t) not in PLAIN or torch._C._functorch.is_functorch_wrapped_tensor(t):
            return False
    return True


#: Types of tensors whose operations no subclass overrides.
PLAIN = (Tensor, torch.nn.Parameter)


def fake_execution(name: str, inputs: Tensors) -> Execution:
    # Not cached: sizes may be symbols.
    return Execution(name, [(x.shape, x.stride(), x.dtype, x.device) for x in inputs])


def implement(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Implement an op of the library; `fake` returns its results without values."""
    for key in ("CPU", "CUDA"):
        # torch.compile must call it, not trace it.
        library.impl(name, _disable_dynamo(function), key)

    def checked(*args: Any, **kwargs: Any) -> Any:
        refuse_export()
        return fake(*args, **kwargs)

    torch.library.register_fake(f"spikefuse::{name}", checked, lib=library)


def register(cls: type[Call]) -> None:
    """Make a kind of call an op of the library, and its backward another one."""
    given = "(str[] programs, Tensor[] tensors, int[] counts, float[] scalars"
    library.define(f"{cls.op}{given}, bool save, bool final) -> Tensor[]")
    library.define(f"{cls.op}_backward{given}, Tensor?[] grads, bool[] needed) -> Tensor[]")

    def method(name: str) -> Callable[..., list[Tensor]]:
        def op(programs: Any, tensors: Any, counts: Any, scalars: Any, *rest: Any) -> list[Tensor]:
            found = getattr(cls(programs, counts, scalars), name)(tensors, *rest)
            # An op returns one list.
            return [*chain(*found)] if name == "forward" else found

        return torch.no_grad()(op)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        programs, tensors, counts, scalars, _, final = inputs
        ctx.call = cls(programs, counts, scalars)
        ctx.num_results = ctx.call.num_results(final)
        ctx.needed = [t.requires_grad for t in tensors]
        ctx.save_for_backward(*tensors[ctx.call.read], *output[ctx.num_results :])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grads: MaybeTensors) -> tuple[Any, ...]:
        found = _differentiate(ctx.call, ctx.saved_tensors, grads[: ctx.num_results], ctx.needed)
        # PyTorch takes an empty list for one of tensors, and expects the gradients of its items.
        return None, found, None, None if ctx.call.scalars else [], None, None

    implement(cls.op, method("forward"), method("new_results"))
    implement(f"{cls.op}_backward", method("backward"), method("new_gradients"))
    differentiate = partial(torch.library.register_autograd, lib=library)
    differentiate(f"spikefuse::{cls.op}", backward, setup_context=setup_context)
    differentiate(f"spikefuse::{cls.op}_backward", no_double_backward)


register(ScanCall)
