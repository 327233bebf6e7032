"""Pointwise activations: layers of torch.nn, and the functions and methods that do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Softplus,
    nn.Softsign,
    nn.Sigmoid,
    nn.Tanh,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
)

_NAMES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.ReLU: ("relu", "relu_"),
    nn.ReLU6: ("relu6",),
    nn.LeakyReLU: ("leaky_relu", "leaky_relu_"),
    nn.PReLU: ("prelu",),
    nn.RReLU: ("rrelu", "rrelu_"),
    nn.ELU: ("elu", "elu_"),
    nn.CELU: ("celu", "celu_"),
    nn.SELU: ("selu", "selu_"),
    nn.GELU: ("gelu",),
    nn.SiLU: ("silu",),
    nn.Mish: ("mish",),
    nn.Softplus: ("softplus",),
    nn.Softsign: ("softsign",),
    nn.Sigmoid: ("sigmoid", "sigmoid_"),
    nn.Tanh: ("tanh", "tanh_"),
    nn.Hardtanh: ("hardtanh", "hardtanh_"),
    nn.Hardsigmoid: ("hardsigmoid",),
    nn.Hardswish: ("hardswish",),
}


def _functions() -> dict[Callable[..., Any], type[nn.Module]]:
    found = {}
    for kind, names in _NAMES.items():
        for name in names:
            for module in (F, torch):
                if hasattr(module, name):
                    found[getattr(module, name)] = kind
    return found


FUNCTIONS = _functions()
METHODS: dict[str, type[nn.Module]] = {
    name: kind for kind, names in _NAMES.items() for name in names if hasattr(torch.Tensor, name)
}
