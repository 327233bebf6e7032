"""Pointwise activations: layers of torch.nn, and the functions and methods that do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_NAMES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.PReLU: "prelu",
    nn.RReLU: "rrelu",
    nn.ELU: "elu",
    nn.CELU: "celu",
    nn.SELU: "selu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.Softplus: "softplus",
    nn.Softsign: "softsign",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
    nn.Hardtanh: "hardtanh",
    nn.Hardsigmoid: "hardsigmoid",
    nn.Hardswish: "hardswish",
}
ACTIVATIONS: tuple[type[nn.Module], ...] = tuple(_NAMES)

#: Activation classes by function, functions that work in place included.
FUNCTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    getattr(namespace, name): kind
    for kind, base in _NAMES.items()
    for name in (base, f"{base}_")
    for namespace in (F, torch)
    if hasattr(namespace, name)
}
#: Activation classes by the name of a tensor method.
METHODS: dict[str, type[nn.Module]] = {
    name: kind
    for kind, base in _NAMES.items()
    for name in (base, f"{base}_")
    if hasattr(torch.Tensor, name)
}
