"""What a scan needs to know of its tensors, and what it refuses."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from spikefuse._torch import is_traced, num_dispatch_modes
from spikefuse.compiler.adjoint import has_gradient
from spikefuse.kernels.triton_runtime import interpreted
from spikefuse.neurons.checks import PLAIN, is_plain
from spikefuse.neurons.definition import Neuron, channel_view
from spikefuse.neurons.surrogate import no_gradient
from spikefuse.scan.records import Tensors

T = TypeVar("T")

#: Kernels are compiled in this process, and an exported program would not find them in another.
NO_EXPORT = (
    "torch.export, ONNX and TorchScript can't contain fused kernels: pass spikefuse.exportable(net)"
    " to torch.export.export, torch.onnx.export(..., dynamo=True) or torch.jit.trace"
)

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def refuse_export() -> None:
    """Raise NotImplementedError inside torch.export and torch.jit.trace, except where TorchDynamo
    reads this code: it calls `fake`, and in torch 2.11 knows no exports from other graphs."""
    is_exported = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    if is_exported or torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(NO_EXPORT)


def check_backend(backend: str, x: Tensor) -> None:
    """Check that kernels of a backend can run on `x`, outside exports.

    Raises:
        NotImplementedError: inside torch.export or torch.jit.trace.
        ImportError: Triton is not installed.
        ValueError: the input is on another device.
    """
    refuse_export()
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


def are_transformed(tensors: Tensors) -> bool:
    """Whether tensors are inside a transform of torch.func or a vectorized Jacobian, or have
    tangents."""
    if is_plain(tensors) or is_traced() or num_dispatch_modes():
        return False
    return all(type(t) in PLAIN for t in tensors)


def refuse_transforms(tensors: Tensors) -> None:
    """Raise NotImplementedError for tensors inside a transform of torch.func or a vectorized
    Jacobian, or in forward-mode differentiation."""
    if are_transformed(tensors):
        raise NotImplementedError(
            "kernels take no part in the transforms of torch.func (grad, jvp, vmap), vectorized "
            'Jacobians and forward-mode differentiation: pass impl="reference" to Temporal or the '
            "neuron, whose loop does, or use backward()"
        )


def call_untraced(function: Callable[..., T], *args: Any) -> T:
    """Call a function that torch.compile must not trace."""
    if is_traced():
        return torch.compiler.disable(function)(*args)
    return function(*args)
