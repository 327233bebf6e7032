"""How a neuron runs: alone or inside `Temporal`, checked, in a kernel or in the eager loop."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse import neurons, reference
from spikefuse._torch import constant_result
from spikefuse.neurons.checks import check_tensor, is_dense, is_plain
from spikefuse.neurons.definition import (
    NO_NAME,
    Neuron,
    States,
    UnknownOutput,
    ValuePerStep,
    first_states,
    with_outputs,
)
from spikefuse.neurons.parameters import shallow_copy
from spikefuse.neurons.per_step import per_step_values, with_inputs
from spikefuse.nn.call import Scan, active, mark_binary, refuse_second_call, wants_bits
from spikefuse.nn.checkpoint import refuse_recomputation
from spikefuse.nn.symbolic import leaf
from spikefuse.scan import op
from spikefuse.scan.checks import call_untraced
from spikefuse.scan.layout import flatten_steps
from spikefuse.scan.program import check_compiles, traced
from spikefuse.scan.records import Arguments, Results, Wanted

IMPLEMENTATIONS = ("auto", "triton", "numba", "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@leaf
def forward(
    neuron: Neuron,
    *inputs: Tensor,
    state: States | None = None,
    return_state: bool = False,
    impl: str = "auto",
    outputs: tuple[str, ...] | None = None,
) -> Any:
    """Run a neuron over time; see `Neuron`."""
    names = () if outputs is None else checked_names(outputs)
    scan: Scan = partial(scan_neuron, neuron)
    wanted = Wanted(return_state, outputs=names, impl=impl)
    return call_neuron(neuron, scan, Arguments(inputs, state), wanted)


# `spikefuse.neurons` knows neither kernels nor `Temporal`.
Neuron.forward = forward


def call_neuron(neuron: Neuron, scan: Scan, arguments: Arguments[Tensor], wanted: Wanted) -> Any:
    """Call a neuron by its own scan or by that of a layer around it."""
    if neuron._converted_from:
        refuse_second_call(neuron)
    call = active.call
    if call is not None and id(neuron) not in call.names:
        call.refuse_rows(neuron, arguments.inputs)
        call = None
    elif call is None:
        refuse_recomputation(neuron)
        if _may_be_batch(neuron, arguments, wanted):
            _warn_batch()
    if active.observer is not None:
        scan = partial(active.observer.scan, neuron, scan)
    if call is not None:
        arguments, wanted = call.unfolded(neuron, arguments, wanted)
    results = scan(arguments, wanted)
    outputs, finals = tuple(results.outputs), tuple(results.finals)
    is_single = len(outputs) == 1 and not wanted.outputs
    if call is not None:
        if call.has_states:
            call.finals[call.names[id(neuron)]] = finals
        if is_single:
            return flatten_steps(outputs[0])
        return tuple(map(flatten_steps, outputs))
    result = outputs[0] if is_single else outputs
    return (result, finals) if wanted.final else result


def _may_be_batch(neuron: Neuron, arguments: Arguments[Tensor], wanted: Wanted) -> bool:
    """Whether a neuron, called by itself, may read the batch `[B, ...]` of a network as time: it is
    `[B, F]`, or comes from a convolution or a norm, after which sequences need another shape,
    perhaps by a pooling or an activation."""
    x = arguments.inputs[0] if arguments.inputs else None
    if not (isinstance(x, Tensor) and neuron.training and torch.is_grad_enabled()):
        return False
    if x.is_leaf or arguments.states is not None or wanted.final:
        return False
    if x.ndim == 2:
        return True
    node = x.grad_fn if is_plain((x,)) else None
    while node is not None and _BETWEEN.match(node.name()):
        node = node.next_functions[0][0]
    return node is not None and _LAYERS.match(node.name()) is not None


_LAYERS = re.compile("Convolution|(Native|Cudnn|Miopen)BatchNorm")
_BETWEEN = re.compile(
    "(Adaptive)?(Max|Avg)Pool|Squeeze|Relu|LeakyRelu|Elu|Gelu|Silu|Hardtanh|NativeDropout|"
    "AddBackward|MulBackward"
)


#: Warnings of this process.
warned: set[str] = set()


@constant_result  # TorchDynamo calls it as it traces
def _warn_batch() -> None:
    """Warn once in a process that a batch may be read as time."""
    if "batch" in warned:
        return
    warnings.warn(
        "a neuron outside of Temporal reads dim 0 of its input as time: if that is a batch "
        "[B, ...], its samples are mixed. Wrap the network, net = spikefuse.Temporal(net), and "
        "call it on [T, B, ...], for static data on spikefuse.nn.encode.direct(x, num_steps). If "
        "it is the time of one sample, use x.unsqueeze(1)",
        stacklevel=6,
    )
    warned.add("batch")


def scan_neuron(neuron: Neuron, arguments: Arguments[Tensor], wanted: Wanted) -> Results[Tensor]:
    """Run a neuron on inputs `[T, B, ...]`."""
    inputs, state = arguments[:2]
    final, _, save, outputs, impl = wanted
    backend = backend_of(inputs, impl)
    check_inputs(neuron, type(neuron).input_names, inputs, state, backend)
    if neuron.has_first_states:
        arguments = from_rest(neuron, arguments)
    try:
        if backend == "reference":
            states = arguments.states
            return Results(*reference.scan(with_outputs(neuron, outputs), tuple(inputs), states))
        bits = wants_bits(inputs[0])
        results = op.scan(neuron, arguments, Wanted(final, bits, save, outputs, backend))
    except ValuePerStep:
        return call_untraced(_scan_per_step, neuron, arguments, wanted)
    if bits:
        mark_binary(results)
    return results


def _scan_per_step(neuron: Neuron, arguments: Arguments[Tensor], wanted: Wanted) -> Results[Tensor]:
    """Run a neuron some of whose parameters have a value per step."""
    inputs = arguments.inputs
    dtype = reduce(torch.promote_types, [x.dtype for x in inputs])
    definition, inputs = with_values_per_step(neuron, inputs)
    results = scan_neuron(definition, arguments._replace(inputs=inputs), wanted)
    return results._replace(outputs=[y.to(dtype) for y in results.outputs])


def with_values_per_step(
    neuron: Neuron, inputs: Sequence[Tensor]
) -> tuple[Neuron, Sequence[Tensor]]:
    """Return the definition and its inputs that take the place of values per step, if any."""
    values = neuron.values()
    steps = per_step_values(values, inputs[0])
    if not steps:
        return neuron, inputs
    more = [value.expand(inputs[0].shape) for value in steps.values()]
    return with_inputs(neuron, values, tuple(steps)), [*inputs, *more]


def refusal_of(neuron: Neuron) -> str:
    """Why kernels cannot run a neuron; "" if they can."""
    try:
        check_compiles(neuron)
    except NotImplementedError as error:
        return str(error)
    return ""


def fires(neuron: Neuron) -> bool | None:
    """Whether the first output of a neuron is spikes, of any height: True if it is a function of
    comparisons and roundings of inputs and states, False if the step is continuous, as that of a
    leaky integrator is; None of others, and where kernels cannot run the neuron."""
    cache = neuron.description().cache
    if "fires" not in cache:
        definition = shallow_copy(neuron)
        definition.__dict__.update(_description=None, state_bits=0)  # rounded states do not count
        try:
            step = traced(definition)
            cache["fires"] = step.is_discrete or (False if step.is_continuous else None)
        except NotImplementedError:
            cache["fires"] = None
    result: bool | None = cache["fires"]
    return result


def exposed_names(neuron: Neuron) -> tuple[str, ...] | None:
    """The names of the values that a step exposes; None where kernels cannot run the neuron."""
    cache = neuron.description().cache
    if "exposed" not in cache:
        try:
            traced(with_outputs(neuron, (NO_NAME,)))
        except UnknownOutput as error:
            cache["exposed"] = error.exposed
        except NotImplementedError:
            cache["exposed"] = None
    result: tuple[str, ...] | None = cache["exposed"]
    return result


def from_rest(neuron: Neuron, arguments: Arguments[Tensor]) -> Arguments[Tensor]:
    """The arguments with the first states that attributes of the neuron hold, if any do."""
    passing = arguments.passing
    is_first = passing is None or passing.is_first
    if not neuron.has_first_states or arguments.states is not None or not is_first:
        return arguments
    x = arguments.inputs[0]
    # Not like a step of x, which a graph would read once more, so that no norm before is fused.
    like = torch.empty(x.shape[1:], dtype=torch.float32, device=x.device)
    return arguments._replace(states=first_states(neuron, neuron.values(), like))


def checked_names(outputs: tuple[str, ...]) -> tuple[str, ...]:
    """The names in the `outputs` of a call.

    Raises:
        ValueError: it is not a sequence of names.
    """
    names = isinstance(outputs, tuple | list) and all(isinstance(n, str) for n in outputs)
    if not (names and outputs):
        raise ValueError(
            f"outputs is {outputs!r}: expected a tuple of names, such as ('spikes', 'v')"
        )
    return tuple(outputs)


def backend_of(inputs: Sequence[Tensor], impl: str) -> str:
    """The implementation that `impl` selects for these inputs."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    if impl != "auto" or not inputs or not isinstance(inputs[0], Tensor):
        return impl
    x = inputs[0]
    if x.is_cuda:
        return "triton"
    if x.is_cpu:
        return "numba"
    raise ValueError(
        f"no kernels for device '{x.device.type}': move the input to cuda or cpu, or pass "
        'impl="reference" for the eager loop'
    )


def check_module(name: str, value: Any) -> None:
    """Raise a TypeError unless an argument is an instance of `nn.Module`."""
    refuse_class(name, value)
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a torch.nn.Module")


def refuse_class(name: str, value: Any) -> None:
    """Raise a TypeError if an argument is a class of modules instead of an instance."""
    if isinstance(value, type) and issubclass(value, nn.Module):
        kind = value.__name__
        call = f"sf.{kind}()" if value is getattr(neurons, kind, None) else f"{kind}(...)"
        raise TypeError(f"{name} is the class {kind}: expected an instance, as in {call}")


def check_inputs(
    neuron: Neuron,
    names: tuple[str, ...],
    inputs: Sequence[Tensor],
    state: Sequence[Tensor] | None,
    backend: str,
    more_states: tuple[str, ...] = (),
) -> None:
    """Raise an error for inputs and states of the wrong number, dtype or shape.

    Args:
        names: of the inputs, for the error.
        more_states: names of further states, which follow the neuron's own.
    """
    name = type(neuron).__name__
    if not names:
        neuron.step()  # raises NotImplementedError
    if len(inputs) != len(names):
        raise TypeError(
            f"{name} takes {len(names)} input{'s' * (len(names) > 1)} ({', '.join(names)}), not "
            f"{len(inputs)}; pass a state as state=(...), and all time steps at once. Where a "
            f"function that makes neurons is expected, pass lambda: {name}(...)"
        )
    for label, x in zip(names, inputs, strict=True):
        # As `is_dense`, without a call.
        if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
            check_tensor(f"{name}: {label}", x)
        if x.dtype not in DTYPES and (x.dtype != torch.float64 or backend != "reference"):
            hint = ' (or impl="reference")' if x.dtype == torch.float64 else ""
            raise TypeError(
                f"{name}: {label} is {x.dtype}: expected float32, bfloat16 or float16; convert "
                f"it with {label}.float(){hint}"
            )
        if x.ndim < 2 or x.shape[0] == 0:
            raise ValueError(
                f"{name}: {label} has shape {list(x.shape)}: expected [T, B, ...] with T >= 1; "
                f"for a single step use {label}.unsqueeze(0)"
            )
        if x is not inputs[0] and (x.shape, x.device) != (inputs[0].shape, inputs[0].device):
            raise ValueError(
                f"{name}: {label} is {list(x.shape)} on {x.device}, {names[0]} is "
                f"{list(inputs[0].shape)} on {inputs[0].device}: inputs must agree"
            )
    if state is None:
        return
    step, states = inputs[0].shape[1:], (*type(neuron).states, *more_states)
    if not isinstance(state, tuple | list) or len(state) != len(states):
        raise TypeError(f"{name}: state must be a tuple of tensors ({', '.join(states)},)")
    for label, s in zip(states, state, strict=True):
        if not isinstance(s, Tensor) or not s.is_floating_point():
            raise TypeError(f"{name}: state {label} must be a floating-point tensor")
        if not is_dense(s):
            check_tensor(f"{name}: state {label}", s)
        if s.shape != step or s.device != inputs[0].device:
            raise ValueError(
                f"{name}: state {label} is {list(s.shape)} on {s.device}: expected {list(step)} "
                f"on {inputs[0].device}, the shape of one time step, since {names[0]} "
                f"{list(inputs[0].shape)} was read as T={len(inputs[0])}: for a single step use "
                f"{names[0]}.unsqueeze(0)"
            )
