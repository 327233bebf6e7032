"""The fused scan as a PyTorch operation: two library ops, their fakes, and autograd.

`spikefuse::scan` runs a program forward and returns outputs, then final states (if asked), then
states stored for backward (if asked). `spikefuse::scan_backward` returns gradients of inputs,
initial states (if asked) and the chosen parameters.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from spikefuse.compiler.adjoint import has_gradient
from spikefuse.kernels.triton_runtime import interpreted
from spikefuse.neurons.definition import Definition, Outputs, States, channel_view
from spikefuse.neurons.surrogate import no_gradient
from spikefuse.scan.execution import Call, call_of, spec
from spikefuse.scan.program import kind_of, prepare, program
from spikefuse.scan.state_passing import Relay, relayed

_HAS_TRITON = importlib.util.find_spec("triton") is not None

library = torch.library.Library("spikefuse", "DEF")
library.define(
    "scan(str program, Tensor[] inputs, Tensor[] states, Tensor[] params, float[] scalars, "
    "bool save, bool final) -> Tensor[]"
)
library.define(
    "scan_backward(str program, Tensor[] inputs, Tensor[] states, Tensor[] params, "
    "float[] scalars, Tensor[] saved, Tensor?[] grad_outputs, Tensor?[] grad_states, "
    "bool[] input_grads, bool[] param_grads) -> Tensor[]"
)


def scan(
    definition: Definition,
    inputs: tuple[Tensor, ...],
    state: States | None,
    backend: str,
    return_state: bool = True,
    relay: Relay | None = None,
    bits: list[Tensor] | None = None,
) -> tuple[Outputs, States, tuple[bool, ...]]:
    """Run `definition` over dim 0 of `inputs` in one kernel; see `spikefuse.reference.scan`.

    Args:
        backend: "triton" or "numba".
        return_state: whether to write the final states; without, they are ().
        relay: how states travel if other processes have the steps before and after.
        bits: gets the bits of each output that is sure to be binary, one per value in memory, if
            the kernel can write them.

    Returns:
        (outputs, final states, for each output whether all its values are sure to be 0 or 1)
    """
    check(backend, inputs[0])
    name, binary, scalars, params = choose(definition, backend, inputs[0])
    states = [] if state is None else list(state)
    num_finals = len(type(definition).states) if return_state else 0
    tensors = list(inputs), states, params
    outputs, finals = run(name, len(binary), num_finals, *tensors, scalars, relay, bits)
    return outputs, finals, binary


def run(
    name: str,
    num_outputs: int,
    num_finals: int,
    inputs: list[Tensor],
    states: list[Tensor],
    params: list[Tensor],
    scalars: list[float],
    relay: Relay | None = None,
    bits: list[Tensor] | None = None,
) -> tuple[Outputs, States]:
    """(outputs, final states) of a program, with gradients of all tensors.

    Args:
        num_finals: of its states if they are wanted, else 0.
        relay, bits: as in `scan`.
    """
    tensors = (*inputs, *states, *params)
    save = torch.is_grad_enabled() and True in [t.requires_grad for t in tensors]
    arguments = name, inputs, states, params, scalars, save, num_finals > 0
    if relay is not None:
        results = relayed(*arguments, relay, bits)
    elif not is_plain(tensors):
        results = torch.ops.spikefuse.scan(*arguments)
    elif save:
        results = _apply(arguments, bits, *tensors)
    else:
        outputs, finals, _ = call_of(name, spec(inputs)).forward(*arguments[1:], bits=bits)
        return tuple(outputs), tuple(finals)
    end = num_outputs + num_finals
    return tuple(results[:num_outputs]), tuple(results[num_outputs:end])


def choose(
    definition: Definition, backend: str, x: Tensor
) -> tuple[str, tuple[bool, ...], list[float], list[Tensor]]:
    """(program, which of its outputs are binary, the floats and the tensors that it reads)."""
    if torch.compiler.is_compiling():
        notes, values = None, definition.values()
        name, used, binary = definition.evaluate(_prepare, backend, _kinds(values))
    else:
        description = definition.description()
        notes, values = description.notes, description.values()
        if backend in notes:
            return notes[backend]
        name, used = prepare(definition, backend, description.statics, _kinds(values))
        binary = program(name).step.binary
    scalars, params = [], []
    for label in used:
        value = values[label]
        if isinstance(value, float):
            scalars.append(value)
        else:
            _check_param(definition, label, value, x)
            params.append(value)
    chosen = name, binary, scalars, params
    if notes is not None and all(isinstance(value, float) for value in values.values()):
        notes[backend] = chosen
    return chosen


def _prepare(
    definition: Definition, backend: str, kinds: tuple[tuple[str, str], ...]
) -> tuple[str, tuple[str, ...], tuple[bool, ...]]:
    name, used = prepare(definition, backend, definition.describe()[1], kinds)
    return name, used, program(name).step.binary


def _kinds(values: Mapping[str, float | Tensor]) -> tuple[tuple[str, str], ...]:
    return tuple([(name, kind_of(value)) for name, value in values.items()])


def check(backend: str, x: Tensor) -> None:
    """Refuse what kernels can't do: transforms of functions, and tensors of another device."""
    _check_transforms()
    _check_backend(backend, x)


def _check_transforms() -> None:
    if torch.compiler.is_compiling():
        return
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if forward_ad._current_level >= 0 or (
        interpreter is not None and interpreter.key().name in ("Grad", "Jvp", "Vmap")
    ):
        raise NotImplementedError(
            "forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap) don't "
            'work through a fused neuron: use backward(), or impl="reference"'
        )


def _check_backend(backend: str, x: Tensor) -> None:
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


def _scan(
    name: str,
    inputs: list[Tensor],
    states: list[Tensor],
    params: list[Tensor],
    scalars: list[float],
    save: bool,
    final: bool,
) -> list[Tensor]:
    call = call_of(name, spec(inputs))
    outputs, finals, saved = call.forward(inputs, states, params, scalars, save, final)
    return [*outputs, *finals, *saved]


def _scan_fake(
    name: str,
    inputs: list[Tensor],
    states: list[Tensor],
    params: list[Tensor],
    scalars: list[float],
    save: bool,
    final: bool,
) -> list[Tensor]:
    outputs, finals, saved = Call(name, spec(inputs)).results(save, final)
    return [*outputs, *finals, *saved]


def _scan_backward(
    name: str,
    inputs: list[Tensor],
    states: list[Tensor],
    params: list[Tensor],
    scalars: list[float],
    saved: list[Tensor],
    grad_outputs: list[Tensor | None],
    grad_states: list[Tensor | None],
    input_grads: list[bool],
    param_grads: list[bool],
) -> list[Tensor]:
    call = call_of(name, spec(inputs))
    grads, starts, reduced = call.backward(
        inputs, states, params, scalars, saved, grad_outputs, grad_states, input_grads, param_grads
    )
    return [*grads, *starts, *reduced]


def _scan_backward_fake(
    name: str,
    inputs: list[Tensor],
    states: list[Tensor],
    params: list[Tensor],
    scalars: list[float],
    saved: list[Tensor],
    grad_outputs: list[Tensor | None],
    grad_states: list[Tensor | None],
    input_grads: list[bool],
    param_grads: list[bool],
) -> list[Tensor]:
    call = Call(name, spec(inputs))
    grads, starts, _ = call.gradients(input_grads, bool(states), param_grads)
    wanted = [torch.empty_like(p) for p, w in zip(params, param_grads, strict=True) if w]
    return [*grads, *starts, *wanted]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    step, final = program(inputs[0]).step, inputs[-1]
    end = step.num_outputs + (len(step.states) if final else 0)
    _keep(ctx, None, inputs, step.num_outputs, output[end:])


def _keep(
    ctx: Any,
    call: Call | None,
    arguments: tuple[Any, ...],
    num_outputs: int,
    saved: Sequence[Tensor],
) -> None:
    """Keep for backward what `arguments` of a scan, its stored states and its `Call` say."""
    name, inputs, states, params, scalars, _, final = arguments
    ctx.save_for_backward(*inputs, *states, *params, *saved)
    ctx.set_materialize_grads(False)
    ctx.kept = call, name, scalars, final, num_outputs, len(inputs), len(states), len(params)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    call, name, scalars, final, num_outputs, num_inputs, num_states, num_params = ctx.kept
    tensors = ctx.saved_tensors
    inputs, rest = tensors[:num_inputs], tensors[num_inputs:]
    states, params = rest[:num_states], rest[num_states : num_states + num_params]
    end = num_outputs + (len(program(name).step.states) if final else 0)
    input_grads = [x.requires_grad for x in inputs]
    param_grads = [p.requires_grad for p in params]
    arguments = (
        inputs,
        states,
        params,
        scalars,
        rest[num_states + num_params :],
        grads[:num_outputs],
        grads[num_outputs:end],
        input_grads,
        param_grads,
    )
    # With create_graph, the op: it has the clear error about double backward.
    if call is not None and not torch.is_grad_enabled() and is_plain(tensors):
        found, starts, reduced = call.backward(*arguments)
        results = iter((*found, *starts, *reduced))
    else:
        results = iter(torch.ops.spikefuse.scan_backward(name, *arguments))
    grad_inputs = [next(results) if wanted else None for wanted in input_grads]
    grad_starts = [next(results).to(s.dtype) for s in states]
    grad_params = [next(results) if wanted else None for wanted in param_grads]
    return None, grad_inputs, grad_starts, grad_params, None, None, None


class _Scan(torch.autograd.Function):
    """The op's autograd without the dispatcher, which costs several times a small kernel."""

    @staticmethod
    def forward(
        ctx: Any, arguments: tuple[Any, ...], bits: list[Tensor] | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        name, inputs, states, params, scalars, save, final = arguments
        call = call_of(name, spec(inputs))
        outputs, finals, saved = call.forward(inputs, states, params, scalars, save, final, bits)
        _keep(ctx, call, arguments, call.num_outputs, saved)
        return (*outputs, *finals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _, inputs, states, params, *_ = _backward(ctx, grads)
        return None, None, *inputs, *states, *params


# That of torch.autograd.Function first looks for transforms, which `is_plain` has done.
_apply = super(torch.autograd.Function, _Scan).apply


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing watches or transforms operations, so that the dispatcher can be skipped."""
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


def _setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    pass


def _no_double_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    raise RuntimeError(
        "double backward through a spikefuse neuron is not supported: the surrogate's derivative "
        'has no derivative of its own; impl="reference" differentiates the eager loop twice'
    )


for _key in ("CPU", "CUDA"):
    # torch.compile must call these, not trace them.
    library.impl("scan", _disable_dynamo(_scan), _key)
    library.impl("scan_backward", _disable_dynamo(_scan_backward), _key)
torch.library.register_fake("spikefuse::scan", _scan_fake, lib=library)
torch.library.register_fake("spikefuse::scan_backward", _scan_backward_fake, lib=library)
torch.library.register_autograd(
    "spikefuse::scan", _backward, setup_context=_setup_context, lib=library
)
torch.library.register_autograd(
    "spikefuse::scan_backward", _no_double_backward, setup_context=_setup_nothing, lib=library
)
