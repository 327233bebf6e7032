"""The fused scan as a PyTorch operation: two library ops, their fakes, and autograd.

`spikefuse::scan` runs a program forward and returns outputs, then final states (if asked), then
states stored for backward (if asked). `spikefuse::scan_backward` returns gradients of inputs,
initial states (if asked) and the chosen parameters.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from spikefuse.compiler.adjoint import has_gradient
from spikefuse.compiler.launch_triton import interpreted
from spikefuse.compiler.layout import Layout, layout_of, layout_seen
from spikefuse.compiler.program import FLOAT, Program, kind_of, prepare, program
from spikefuse.neurons.definition import Definition, Outputs, States, channel_view
from spikefuse.surrogate import no_gradient

_HAS_TRITON = importlib.util.find_spec("triton") is not None

library = torch.library.Library("spikefuse", "DEF")
library.define(
    "scan(str program, Tensor[] inputs, Tensor[] states, Tensor[] params, float[] scalars, "
    "bool save, bool final) -> Tensor[]"
)
library.define(
    "scan_backward(str program, Tensor[] inputs, Tensor[] params, float[] scalars, "
    "Tensor[] saved, Tensor?[] grad_outputs, Tensor?[] grad_states, bool[] param_grads, "
    "bool state_grads) -> Tensor[]"
)


def scan(
    definition: Definition,
    inputs: tuple[Tensor, ...],
    state: States | None,
    backend: str,
    return_state: bool = True,
) -> tuple[Outputs, States]:
    """Run `definition` over dim 0 of `inputs` in one kernel; see `spikefuse.reference.scan`.

    Args:
        backend: "triton" or "numba".
        return_state: whether to write the final states; without, they are ().
    """
    _check_transforms()
    _check_backend(backend, inputs[0])
    values, statics = definition.describe()
    kinds = tuple((name, kind_of(value)) for name, value in values.items())
    if torch.compiler.is_compiling():
        name, used, num_outputs = definition.evaluate(_prepare, backend, kinds)
    else:
        name, used = prepare(definition, backend, statics, kinds)
        num_outputs = program(name).step.num_outputs
    scalars, params = [], []
    for label in used:
        value = values[label]
        if isinstance(value, float):
            scalars.append(value)
        else:
            _check_param(definition, label, value, inputs[0])
            params.append(value)
    states = [] if state is None else list(state)
    save = torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *states, *params))
    arguments = name, list(inputs), states, params, scalars, save, return_state
    if not _plain_eager((*inputs, *states, *params)):
        results = torch.ops.spikefuse.scan(*arguments)
    elif save:
        results = _Scan.apply(arguments, *inputs, *states, *params)
    else:
        results = _scan(*arguments)
    end = num_outputs + (len(type(definition).states) if return_state else 0)
    return tuple(results[:num_outputs]), tuple(results[num_outputs:end])


def _prepare(
    definition: Definition, backend: str, kinds: tuple[tuple[str, str], ...]
) -> tuple[str, tuple[str, ...], int]:
    name, used = prepare(definition, backend, definition.describe()[1], kinds)
    return name, used, program(name).step.num_outputs


def _check_transforms() -> None:
    if torch.compiler.is_compiling():
        return
    interpreter = torch._C._functorch.peek_interpreter_stack()
    transforms = ("Grad", "Jvp", "Vmap")
    if forward_ad._current_level >= 0 or (
        interpreter is not None and interpreter.key().name in transforms
    ):
        raise NotImplementedError(
            "forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap) don't "
            'work through a fused neuron: use backward(), or impl="reference"'
        )


def _check_backend(backend: str, x: Tensor) -> None:
    device = x.device.type
    if backend == "numba" and device != "cpu":
        raise ValueError(f'impl="numba" runs on the CPU, but the input is on {x.device}')
    if backend == "triton":
        if not _HAS_TRITON:
            raise ImportError('Triton is not installed: pip install "spikefuse[gpu]"')
        if device != "cuda" and not interpreted():
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


def _values(program: Program, params: Sequence[Tensor], scalars: Sequence[float]) -> list[Any]:
    """Parameters in the order of the kernel, tensors as contiguous float32."""
    tensors, floats = iter(params), iter(scalars)
    return [
        next(floats) if kind == FLOAT else next(tensors).detach().float().contiguous()
        for kind in program.kinds
    ]


def _by_state(program: Program, *roles: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Each state's tensors in turn, in the order of the kernel; a role may be absent."""
    absent = [None] * len(program.step.states)
    return [t for row in zip(*(role or absent for role in roles), strict=True) for t in row]


def _output_dtype(inputs: Sequence[Tensor]) -> torch.dtype:
    dtype = inputs[0].dtype
    for x in inputs[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _results(
    program: Program, layout: Layout, inputs: Sequence[Tensor], save: bool, final: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Unwritten (outputs, final states, stored states)."""
    like, dtype = inputs[0], _output_dtype(inputs)
    num_states = len(program.step.states)
    chunks = -(-layout.num_steps // program.chunk)
    outputs = [layout.empty(like, dtype) for _ in range(program.step.num_outputs)]
    finals = [layout.empty_step(like) for _ in range(num_states if final else 0)]
    saved = [
        torch.empty((chunks, layout.num_neurons), dtype=torch.float32, device=like.device)
        for _ in range(num_states if save else 0)
    ]
    return outputs, finals, saved


def _scan(
    name: str,
    inputs: list[Tensor],
    states: list[Tensor],
    params: list[Tensor],
    scalars: list[float],
    save: bool,
    final: bool,
) -> list[Tensor]:
    chosen = program(name)
    layout = layout_seen(tuple((x.shape, x.stride()) for x in inputs))
    outputs, finals, saved = _results(chosen, layout, inputs, save, final)
    if layout.num_neurons:
        starts = [layout.conform_step(s) for s in states]
        chosen.launcher.run(
            chosen.module().forward,
            layout,
            [*(layout.conform(x) for x in inputs), *outputs],
            _by_state(chosen, starts, finals, saved),
            (),
            _values(chosen, params, scalars),
        )
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
    outputs, finals, saved = _results(program(name), layout_of(inputs), inputs, save, final)
    return [*outputs, *finals, *saved]


def _scan_backward(
    name: str,
    inputs: list[Tensor],
    params: list[Tensor],
    scalars: list[float],
    saved: list[Tensor],
    grad_outputs: list[Tensor | None],
    grad_states: list[Tensor | None],
    param_grads: list[bool],
    state_grads: bool,
) -> list[Tensor]:
    chosen = program(name)
    layout = layout_seen(tuple((x.shape, x.stride()) for x in inputs))
    grads, starts, sums = _gradients(chosen, layout, inputs, params, param_grads, state_grads)
    if not layout.num_neurons:
        wanted = zip(params, param_grads, strict=True)
        return [*grads, *starts, *(torch.zeros_like(p) for p, needed in wanted if needed)]
    like = inputs[0]
    incoming = [
        layout.empty_step(like).zero_().expand(like.shape) if g is None else layout.conform(g)
        for g in grad_outputs
    ]
    finals = [None if g is None else layout.conform_step(g) for g in grad_states]
    names = _grad_names(chosen, param_grads)
    chosen.launcher.run(
        chosen.module(names).backward,
        layout,
        [*(layout.conform(x) for x in inputs), *incoming, *grads],
        _by_state(chosen, saved, finals, starts),
        sums,
        _values(chosen, params, scalars),
    )
    totals = iter(sums)
    reduced = [
        layout.reduce_to(next(totals), p).to(p.dtype)
        for p, wanted in zip(params, param_grads, strict=True)
        if wanted
    ]
    return [*grads, *starts, *reduced]


def _scan_backward_fake(
    name: str,
    inputs: list[Tensor],
    params: list[Tensor],
    scalars: list[float],
    saved: list[Tensor],
    grad_outputs: list[Tensor | None],
    grad_states: list[Tensor | None],
    param_grads: list[bool],
    state_grads: bool,
) -> list[Tensor]:
    layout = layout_of(inputs)
    grads, starts, _ = _gradients(program(name), layout, inputs, params, param_grads, state_grads)
    wanted = [torch.empty_like(p) for p, w in zip(params, param_grads, strict=True) if w]
    return [*grads, *starts, *wanted]


def _gradients(
    program: Program,
    layout: Layout,
    inputs: Sequence[Tensor],
    params: Sequence[Tensor],
    param_grads: Sequence[bool],
    state_grads: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Unwritten gradients of inputs and initial states, and of parameters per neuron."""
    like = inputs[0]
    grads = [layout.empty(x, x.dtype) for x in inputs]
    starts = [layout.empty_step(like) for _ in program.step.states] if state_grads else []
    sums = [
        torch.empty(layout.num_neurons, dtype=torch.float32, device=like.device)
        for _ in range(sum(param_grads))
    ]
    return grads, starts, sums


def _grad_names(program: Program, param_grads: Sequence[bool]) -> tuple[str, ...]:
    tensors = [
        label
        for label, kind in zip(program.step.params, program.kinds, strict=True)
        if kind != FLOAT
    ]
    return tuple(label for label, wanted in zip(tensors, param_grads, strict=True) if wanted)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    name, xs, states, params, scalars, _, final = inputs
    num_outputs, num_states = program(name).step.num_outputs, len(program(name).step.states)
    end = num_outputs + (num_states if final else 0)
    ctx.save_for_backward(*xs, *params, *output[end:])
    ctx.set_materialize_grads(False)
    ctx.name, ctx.scalars = name, scalars
    ctx.split = len(xs), len(params)
    ctx.num_outputs, ctx.num_states, ctx.final = num_outputs, num_states, final
    ctx.state_dtypes = [s.dtype for s in states]


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    num_inputs, num_params = ctx.split
    tensors = ctx.saved_tensors
    inputs, params = tensors[:num_inputs], tensors[num_inputs : num_inputs + num_params]
    saved = tensors[num_inputs + num_params :]
    grad_outputs = list(grads[: ctx.num_outputs])
    end = ctx.num_outputs + ctx.num_states
    grad_states = list(grads[ctx.num_outputs : end]) if ctx.final else []
    state_grads = bool(ctx.state_dtypes)
    param_grads = [p.requires_grad for p in params]
    # With create_graph, the op: it has the clear error about double backward.
    direct = _plain_eager(tensors) and not torch.is_grad_enabled()
    run = _scan_backward if direct else torch.ops.spikefuse.scan_backward
    results = run(
        ctx.name,
        list(inputs),
        list(params),
        ctx.scalars,
        list(saved),
        grad_outputs,
        grad_states,
        param_grads,
        state_grads,
    )
    results = list(results)
    grad_inputs = [results.pop(0) for _ in inputs]
    grad_starts = [results.pop(0).to(dtype) for dtype in ctx.state_dtypes]
    grad_params = [results.pop(0) if wanted else None for wanted in param_grads]
    return None, grad_inputs, grad_starts, grad_params, None, None, None


class _Scan(torch.autograd.Function):
    """The op's autograd without the dispatcher, which costs several times a small kernel."""

    @staticmethod
    def forward(ctx: Any, arguments: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        results = _scan(*arguments)
        _setup_context(ctx, arguments, results)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _, inputs, states, params, *_ = _backward(ctx, list(grads))
        return None, *inputs, *states, *params


def _plain_eager(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing watches or transforms operations, so that the dispatcher can be skipped."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
    ) and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)


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
