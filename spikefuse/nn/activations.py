"""Pointwise activations: layers of torch.nn, the functions and methods that do the same, and a
quantized one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spikefuse._torch import user_hooks
from spikefuse.neurons.checks import integer
from spikefuse.neurons.parameters import positive

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
    nn.Hardshrink: "hardshrink",
    nn.Softshrink: "softshrink",
    nn.Tanhshrink: "tanhshrink",
    nn.Threshold: "threshold",
    nn.LogSigmoid: "logsigmoid",
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


def refuse_hooks(where: str, activation: nn.Module) -> None:
    """Raise a ValueError if an activation that a neuron is to replace has hooks of the user.

    Args:
        where: names the activation in the error.
    """
    if user_hooks(activation):
        raise ValueError(
            f"{where} has hooks, which the neuron in its place would not have: remove them, and "
            "register them on the neuron"
        )


class QCFS(nn.Module):
    """Quantized ReLU, which a spiking neuron computes in `levels` steps of a constant input.

    Equation, with the learned `threshold`::

        y = threshold * clip(floor(levels * x / threshold + 0.5) / levels, 0, 1)

    Gradients pass the floor as if it were not there. `sf.from_ann` takes the learned threshold.

    Shapes: `x`, `y`: `[B, ...]`.

    Source: Bu et al., "Optimal ANN-SNN Conversion for High-accuracy and Ultra-low-latency Spiking
    Neural Networks", ICLR 2022 (quantization clip-floor-shift).

    Example::

        relu = sf.nn.QCFS(threshold=2.0, levels=4)
        y = relu(torch.tensor([0.3, 0.6, 5.0]))  # 0.5, 0.5, 2.0

    Args:
        threshold: the highest output at first.
        levels: number of levels above 0.

    Raises:
        ValueError: an argument is not positive.
    """

    def __init__(self, threshold: float = 1.0, levels: int = 4) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(float(positive("threshold", threshold))))
        self.levels = integer("levels", levels)

    def forward(self, x: Tensor) -> Tensor:
        y = (x / self.threshold).clamp(0, 1) * self.levels
        y = y + (torch.floor(y + 0.5) - y).detach()
        return y * (self.threshold / self.levels)

    def extra_repr(self) -> str:
        return f"levels={self.levels}"
