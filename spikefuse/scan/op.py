"""The fused scan as a PyTorch operation: library ops, their fakes, and autograd.

`spikefuse::scan` runs a program forward on inputs, initial states and parameters, the first two of
which `counts` counts. It returns the outputs, then the final states (if asked), then the states
saved for backward (if asked). `spikefuse::scan_backward` also takes the saved states, and the
gradients of outputs and final states. It returns the gradients of the needed inputs, of all initial
states and of the needed parameters. Eager calls share forward and backward with the ops but skip
the dispatcher, which costs several times a small kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from spikefuse.compiler.adjoint import has_gradient
from spikefuse.kernels.triton_runtime import interpreted
from spikefuse.neurons.definition import Definition, States, channel_view, with_outputs
from spikefuse.neurons.surrogate import no_gradient
from spikefuse.scan import state_passing
from spikefuse.scan.double_backward import no_double_backward
from spikefuse.scan.execution import (
    Arguments,
    Execution,
    Incoming,
    Needs,
    Results,
    ScanGradients,
    Wanted,
    execution_of,
)
from spikefuse.scan.program import kind_of, prepare, program, sizes_of
from spikefuse.scan.state_passing import StatePassing

#: Kernels are compiled in this process, and an exported program would not find them in another.
NO_EXPORT = (
    "torch.export, ONNX and TorchScript can't contain fused kernels: pass spikefuse.exportable(net)"
    " to torch.export.export, torch.onnx.export(..., dynamo=True) or torch.jit.trace"
)

_HAS_TRITON = importlib.util.find_spec("triton") is not None

library = torch.library.Library("spikefuse", "DEF")
library.define(
    "scan(str program, Tensor[] tensors, int[] counts, float[] scalars, bool save, bool final) "
    "-> Tensor[]"
)
library.define(
    "scan_backward(str program, Tensor[] tensors, int[] counts, float[] scalars, "
    "Tensor?[] grads, bool[] needed) -> Tensor[]"
)


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


def scan(definition: Definition, request: Request) -> tuple[Results, tuple[bool, ...]]:
    """Run `definition` over dim 0 of the inputs in one kernel; see `spikefuse.reference.scan`.

    Returns:
        The results, and for each output whether all its values are sure to be 0 or 1.
    """
    inputs = request.inputs
    check(request.backend, inputs[0])
    name, binary, scalars, params = choose(definition, request.backend, inputs[0], request.outputs)
    arguments = Arguments(inputs, request.state or (), params, scalars)
    wanted = Wanted(False, request.final, request.bits)
    return run(name, arguments, wanted, request.passing), binary


def run(
    name: str, arguments: Arguments, wanted: Wanted, passing: StatePassing | None = None
) -> Results:
    """Run a program, with gradients of all tensors. The results hold no saved states."""
    tensors = (*arguments.inputs, *arguments.states, *arguments.params)
    if torch.is_grad_enabled():
        for t in tensors:
            if t.requires_grad:
                wanted = wanted._replace(save=True)
                break
    if passing is None and not is_plain(tensors):
        return _run_op(name, arguments, wanted)
    if torch.compiler.is_compiling():
        return _run_outside_dynamo(name, arguments, wanted, passing)
    return _run_eager(name, arguments, wanted, passing)


def _run_op(name: str, arguments: Arguments, wanted: Wanted) -> Results:
    inputs, states, params, scalars = arguments
    counts = [len(inputs), len(states)]
    tensors = [*inputs, *states, *params]
    found = torch.ops.spikefuse.scan(
        name, tensors, counts, list(scalars), wanted.save, wanted.final
    )
    return split_results(name, found, wanted.final)


def split_results(name: str, found: list[Tensor], final: bool) -> Results:
    num_outputs, num_states = sizes_of(name)
    end = num_outputs + (num_states if final else 0)
    return Results(found[:num_outputs], found[num_outputs:end], None, [])


def _run_eager(
    name: str, arguments: Arguments, wanted: Wanted, passing: StatePassing | None
) -> Results:
    call = ScanCall(name, arguments.scalars, len(arguments.inputs), len(arguments.states), passing)
    if not wanted.save:
        return call.forward(arguments, wanted)[0]
    tensors = (*arguments.inputs, *arguments.states, *arguments.params)
    found, num_outputs = _apply(call, wanted, *tensors), call.num_outputs
    # The graph keeps `call` alive, but must not hold the bits.
    bits, call.bits = call.bits, []
    return Results(list(found[:num_outputs]), list(found[num_outputs:]), None, bits)


# States are passed between processes, which torch.compile must not trace.
_run_outside_dynamo = _disable_dynamo(_run_eager)


@dataclass
class ScanCall:
    """A scan without its tensors: what autograd keeps between forward and backward.

    Attributes:
        num_inputs, num_states: of the tensors, which are inputs, states and parameters.
        counts: with state passing, the numbers of initial and saved states of each microbatch.
    """

    name: str
    scalars: Sequence[float]
    num_inputs: int
    num_states: int
    passing: StatePassing | None = None
    num_outputs: int = 0
    execution: Execution | None = None
    counts: list[tuple[int, int]] = field(default_factory=list)
    bits: list[Tensor] = field(default_factory=list)

    def arguments(self, tensors: Sequence[Tensor]) -> Arguments:
        split, end = self.num_inputs, self.num_inputs + self.num_states
        return Arguments(tensors[:split], tensors[split:end], tensors[end:], self.scalars)

    def needs(self, needed: Sequence[bool]) -> Needs:
        split, end = self.num_inputs, self.num_inputs + self.num_states
        return Needs(tuple(needed[:split]), self.num_states > 0, tuple(needed[end:]))

    def forward(self, arguments: Arguments, wanted: Wanted) -> tuple[Results, Sequence[Tensor]]:
        """The results, and the states to save for backward."""
        if self.passing is not None:
            done = state_passing.scan_forward(self.passing, self.name, arguments, wanted)
            results, parts = done
            saved, self.counts = state_passing.flatten(parts)
            return results, saved
        execution = self.execution = execution_of(self.name, arguments.inputs)
        results = execution.forward(arguments, execution.new_results(wanted))
        return results, results.saved or ()

    def backward(
        self, arguments: Arguments, saved: Sequence[Tensor], incoming: Incoming, needs: Needs
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Gradients of the inputs, the initial states and the parameters, as far as needed."""
        execution = self.execution
        if self.passing is None:
            execution = execution or execution_of(self.name, arguments.inputs)
            found = execution.new_gradients(needs)
            execution.backward(arguments, saved, incoming, found)
            if not found.params:
                return found.inputs, found.states, []
            params = list(compress(arguments.params, needs.params))
            return found.inputs, found.states, execution.reduce(found.params, params)
        execution = execution_of(self.name, arguments.inputs)
        parts = state_passing.split(self.passing, self.name, arguments)
        parts = state_passing.unflatten(parts, saved, self.counts)
        inputs = execution.new_gradients(Needs(needs.inputs, False, ())).inputs
        starts = bool(parts[0].arguments.states)
        whole = ScanGradients(needs._replace(states=starts), inputs, [], [])
        totals = state_passing.scan_backward(self.passing, parts, whole, incoming)
        return whole.inputs, whole.states if needs.states else [], totals


class _Scan(torch.autograd.Function):
    """The autograd of eager scans."""

    @staticmethod
    def forward(ctx: Any, call: ScanCall, wanted: Wanted, *tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = call.arguments(tensors)
        results, saved = call.forward(arguments, wanted)
        if call.execution is not None and not call.execution.is_ahead:
            needs = call.needs(ctx.needs_input_grad[2:])
            call.execution.compile_backward(arguments, results, needs)
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        ctx.call, call.bits, call.num_outputs = call, results.bits, len(results.outputs)
        return (*results.outputs, *results.finals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call, saved, needs = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[2:]
        return (None, None, *_differentiate(call, saved, grads, needs))


# That of torch.autograd.Function first looks for transforms, which `is_plain` has excluded.
_apply = super(torch.autograd.Function, _Scan).apply


def _differentiate(
    call: ScanCall,
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of a scan's tensors, None where none is needed.

    Args:
        tensors: inputs, states, parameters, then what the forward pass saved.
        needed: whether a tensor, saved ones excepted, needs a gradient.
    """
    arguments = call.arguments(tensors[: len(needed)])
    needs = call.needs(needed)
    # With create_graph, the library op raises the error about double backward. It passes no states.
    plain = not torch.is_grad_enabled() and is_plain(tensors)
    if call.passing is not None or plain:
        incoming = Incoming(grads[: call.num_outputs], grads[call.num_outputs :])
        saved = tensors[len(needed) :]
        with torch.no_grad():
            inputs, states, params = call.backward(arguments, saved, incoming, needs)
    else:
        counts = [call.num_inputs, call.num_states]
        given = call.name, list(tensors), counts, list(call.scalars), list(grads), list(needed)
        found = torch.ops.spikefuse.scan_backward(*given)
        split = sum(needs.inputs)
        end = split + call.num_states
        inputs, states, params = found[:split], found[split:end], found[end:]
    if states:
        states = [g.to(s.dtype) for g, s in zip(states, arguments.states, strict=True)]
    rest = iter((*inputs, *states, *params))
    returned = (*needs.inputs, *(True,) * call.num_states, *needs.params)
    return [next(rest) if need else None for need in returned]


def choose(
    definition: Definition, backend: str, x: Tensor, outputs: tuple[str, ...] = ()
) -> ProgramChoice:
    """The program of a definition on a backend, for inputs like `x`; see `Request.outputs`."""
    if torch.compiler.is_compiling():
        notes, values = None, definition.values()
        name, used, binary = definition.evaluate(_prepare, backend, _kinds(values), outputs)
    else:
        description = definition.description()
        notes = description.notes
        found: ProgramChoice | None = notes.get((backend, outputs))
        if found is not None:  # for definitions whose values are all floats
            return found
        values = description.values()
        selected, statics = with_outputs(definition, outputs), (*description.statics, outputs)
        name, used = prepare(selected, backend, statics, _kinds(values))
        binary = program(name).step.binary
    scalars, params = [], []
    for label in used:
        value = values[label]
        if isinstance(value, float):
            scalars.append(value)
        else:
            _check_param(definition, label, value, x)
            params.append(value)
    chosen = ProgramChoice(name, binary, scalars, params)
    if notes is not None and all(isinstance(value, float) for value in values.values()):
        notes[backend, outputs] = chosen
    return chosen


def _prepare(
    definition: Definition,
    backend: str,
    kinds: tuple[tuple[str, str], ...],
    outputs: tuple[str, ...],
) -> tuple[str, tuple[str, ...], tuple[bool, ...]]:
    definition = with_outputs(definition, outputs)
    name, used = prepare(definition, backend, definition.describe()[1], kinds)
    return name, used, program(name).step.binary


def _kinds(values: Mapping[str, float | Tensor]) -> tuple[tuple[str, str], ...]:
    return tuple([(name, kind_of(value)) for name, value in values.items()])


def refuse_export() -> None:
    """Raise NotImplementedError inside torch.export and torch.jit.trace."""
    # In torch 2.11, is_exporting() is True in every graph of torch.compile; its flag is not.
    if torch.compiler._is_exporting_flag or torch._C._get_tracing_state() is not None:
        raise NotImplementedError(NO_EXPORT)


def check(backend: str, x: Tensor) -> None:
    """Refuse transforms of functions, exports, and tensors that are not on the backend's device.

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


def _check_param(definition: Definition, name: str, value: Tensor, x: Tensor) -> None:
    channel_view(name, value, x.shape[1:])
    if value.device != x.device:
        raise ValueError(
            f"parameter '{name}' is on {value.device}, the input on {x.device}: move the module "
            f"with .to({str(x.device)!r})"
        )
    if value.requires_grad and not has_gradient(definition, name):
        raise no_gradient(name)


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing observes or transforms operations, so that the dispatcher can be skipped."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
    ):
        return False
    for t in tensors:
        if type(t) not in _PLAIN or torch._C._functorch.is_functorch_wrapped_tensor(t):
            return False
    return True


_PLAIN = (Tensor, torch.nn.Parameter)


def _scan(
    name: str,
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    save: bool,
    final: bool,
) -> list[Tensor]:
    call = ScanCall(name, scalars, counts[0], counts[1])
    results, saved = call.forward(call.arguments(tensors), Wanted(save, final))
    return [*results.outputs, *results.finals, *saved]


def _scan_fake(
    name: str,
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    save: bool,
    final: bool,
) -> list[Tensor]:
    results = fake_execution(name, tensors[: counts[0]]).new_results(Wanted(save, final))
    return [*results.outputs, *results.finals, *(results.saved or ())]


def _scan_backward(
    name: str,
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    grads: list[Tensor | None],
    needed: list[bool],
) -> list[Tensor]:
    call = ScanCall(name, scalars, counts[0], counts[1])
    num, num_outputs = len(needed), program(name).step.num_outputs
    incoming = Incoming(grads[:num_outputs], grads[num_outputs:])
    arguments = call.arguments(tensors[:num])
    inputs, states, params = call.backward(arguments, tensors[num:], incoming, call.needs(needed))
    return [*inputs, *states, *params]


def _scan_backward_fake(
    name: str,
    tensors: list[Tensor],
    counts: list[int],
    scalars: list[float],
    grads: list[Tensor | None],
    needed: list[bool],
) -> list[Tensor]:
    call = ScanCall(name, scalars, counts[0], counts[1])
    arguments, needs = call.arguments(tensors[: len(needed)]), call.needs(needed)
    found = fake_execution(name, arguments.inputs).new_gradients(needs._replace(params=()))
    params = compress(arguments.params, needs.params)
    return [*found.inputs, *found.states, *map(torch.empty_like, params)]


def fake_execution(name: str, inputs: Sequence[Tensor]) -> Execution:
    # Not cached: sizes may be symbols.
    return Execution(name, [(x.shape, x.stride(), x.dtype, x.device) for x in inputs])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    name, tensors, counts, scalars, _, final = inputs
    num_outputs, num_states = sizes_of(name)
    ctx.call = ScanCall(name, scalars, counts[0], counts[1], num_outputs=num_outputs)
    ctx.num_tensors, ctx.end = len(tensors), num_outputs + (num_states if final else 0)
    ctx.save_for_backward(*tensors, *output[ctx.end :])
    ctx.set_materialize_grads(False)


def _op_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    needed = [t.requires_grad for t in tensors[: ctx.num_tensors]]
    found = _differentiate(ctx.call, tensors, grads[: ctx.end], needed)
    # PyTorch takes an empty list for one of tensors, and expects the gradients of its items.
    return None, found, None, None if ctx.call.scalars else [], None, None


def implement(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: tuple[Callable[..., Any], Callable[..., Any]] | None,
) -> None:
    """Implement an op of the library.

    Args:
        fake: its results without values.
        autograd: its backward and `setup_context`, if it has them.
    """
    for key in ("CPU", "CUDA"):
        # torch.compile must call it, not trace it.
        library.impl(name, _disable_dynamo(function), key)
    torch.library.register_fake(f"spikefuse::{name}", fake, lib=library)
    if autograd is not None:
        backward, setup = autograd
        torch.library.register_autograd(
            f"spikefuse::{name}", backward, setup_context=setup, lib=library
        )


#: The `autograd` of an op that computes gradients.
ONCE: Any = no_double_backward, lambda ctx, inputs, output: None

implement("scan", _scan, _scan_fake, (_op_backward, _setup_context))
implement("scan_backward", _scan_backward, _scan_backward_fake, ONCE)
