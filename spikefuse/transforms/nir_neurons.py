"""Neurons as nodes of the Neuromorphic Intermediate Representation (NIR)."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.neurons import IF, LI, LIF, PLIF, CubaLIF, DelayedResetLIF
from spikefuse.neurons.definition import Neuron, channel_view
from spikefuse.neurons.surrogate import Surrogate
from spikefuse.transforms.converters.common import Above, Refusal
from spikefuse.transforms.converters.norse import SynapticLI


def neuron_node(nir: ModuleType, neuron: Neuron, dt: float, shape: list[int]) -> Any:
    """Return the node of a neuron for steps of `shape`."""
    kind = type(neuron)
    if kind not in (*_FIRING, LI, SynapticLI):
        raise Refusal(
            "NIR has no such neuron: use sf.LIF, sf.PLIF, sf.IF, sf.CubaLIF or sf.LI, and train it"
        )
    if neuron.state_bits:
        raise Refusal("its states are rounded, and NIR's are not: quantize with states=None")
    values = {name: per_neuron(name, value, shape) for name, value in neuron.values().items()}
    firing = {}
    if isinstance(neuron, _FIRING):
        if neuron.reset != "hard":
            raise Refusal(
                "its reset is soft, and NIR's neurons are set to v_reset: train with reset='hard'"
            )
        firing = {
            "v_threshold": fired_above(values["threshold"], neuron.surrogate),
            "v_reset": values["v_reset"],
        }
    decay = values.get("decay", np.ones(shape))
    scales_input = kind is SynapticLI or getattr(neuron, "decay_input", False)
    if "current_decay" not in values and (decay == 1).all() and not scales_input:
        r = np.full(shape, 1 / dt)
        return nir.IF(r, **firing) if firing else nir.I(r)
    tau = _time_constant("decay", decay, dt)
    r = np.ones(shape) if scales_input else tau / dt
    rest = np.zeros(shape)
    if "current_decay" not in values:
        return nir.LIF(tau, r, rest, **firing) if firing else nir.LI(tau, r, rest)
    synapse = _time_constant("current_decay", values["current_decay"], dt)
    common = {"tau_syn": synapse, "tau_mem": tau, "r": r, "v_leak": rest, "w_in": synapse / dt}
    return nir.CubaLIF(**common, **firing) if firing else nir.CubaLI(**common)


# The hard reset of DelayedResetLIF gives the spikes of LIF.
_FIRING = (IF, LIF, PLIF, CubaLIF, DelayedResetLIF)


def per_neuron(name: str, value: float | Tensor, shape: list[int]) -> np.ndarray:
    """Return a value per neuron, given a parameter of any shape that a neuron takes."""
    if not isinstance(value, Tensor):
        return np.full(shape, value, np.float64)
    if has_time(value, shape):
        if len(value) > 1:
            raise Refusal(
                f"its {name} has shape {list(value.shape)}, a value per step, and values in NIR "
                f"are constant over time: use one value, one per channel, or one per neuron, "
                f"{shape}"
            )
        value = value[0, 0]
    is_one = value.numel() == 1
    view = value.reshape(()) if is_one else channel_view(name, value, torch.Size([1, *shape]))
    return np.broadcast_to(view.detach().double().cpu().numpy(), shape).copy()


def has_time(value: float | Tensor, shape: Sequence[int]) -> bool:
    """Whether a parameter has the dims of an input `[T, B, ...]` with steps of `shape`. It then has
    a value per step, or dim 0 is 1."""
    return isinstance(value, Tensor) and value.ndim == len(shape) + 2


def _time_constant(name: str, decay: np.ndarray, dt: float) -> np.ndarray:
    if not ((decay >= 0) & (decay < 1)).all():
        raise Refusal(
            f"its {name} is {decay.max():g}: expected values in [0, 1), as NIR divides by a time "
            "constant dt / (1 - decay); without a leak use sf.IF"
        )
    return dt / (1 - decay)


def fired_above(threshold: np.ndarray, surrogate: Surrogate) -> np.ndarray:
    """Return the threshold that a potential exceeds when it fires."""
    if isinstance(surrogate, Above):
        return threshold
    if type(surrogate).spike is not Surrogate.spike:
        raise Refusal(f"its surrogate {type(surrogate).__name__} has a forward pass of its own")
    return np.nextafter(threshold.astype(np.float32), np.float32(-np.inf)).astype(np.float64)
