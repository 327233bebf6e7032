"""Groups of parameters for optimizers."""

from __future__ import annotations

from typing import Any

from torch import nn

from spikefuse.neurons.definition import Neuron
from spikefuse.nn.delay import DelayedLinear
from spikefuse.nn.neuron import check_module
from spikefuse.nn.over_time import PSN


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return groups for an optimizer, which exempt neurons, delays, norms and biases from weight
    decay.

    Weight decay pulls a threshold, or the logit of a decay, towards 0, which has no meaning. Exempt
    are the parameters of neurons and their surrogates, of `PSN`, `nn.LayerNorm` and `nn.RMSNorm`,
    delays, and all others with fewer than two dims::

        optimizer = torch.optim.AdamW(sf.nn.parameter_groups(net, 0.01), lr=1e-3)

    Args:
        net: any module.
        weight_decay: of the other parameters.

    Returns:
        Two groups: the parameters with weight decay, and those without.

    Raises:
        TypeError: `net` is not a module.
        ValueError: `weight_decay` is negative.
    """
    check_module("net", net)
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay is {weight_decay!r}: expected a number of at least 0")
    exempt = {
        id(parameter)
        for module in net.modules()
        if isinstance(module, Neuron | PSN | nn.LayerNorm | nn.RMSNorm)
        for parameter in module.parameters()
    }
    exempt |= {id(module.delay) for module in net.modules() if isinstance(module, DelayedLinear)}
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for parameter in net.parameters():
        groups[parameter.ndim < 2 or id(parameter) in exempt].append(parameter)
    return [
        {"params": groups[0], "weight_decay": weight_decay},
        {"params": groups[1], "weight_decay": 0.0},
    ]
