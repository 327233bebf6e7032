"""The modules of Norse 1.1.0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.neurons import IF, LI, LIF, CubaLIF
from spikefuse.neurons import surrogate as S
from spikefuse.neurons.definition import Neuron, State, States
from spikefuse.neurons.firing import Reset
from spikefuse.nn.recurrent import Recurrent
from spikefuse.transforms.converters.common import (
    SEQUENCE,
    STEP,
    Above,
    Library,
    Refusal,
    Rule,
    as_class,
    counted_from,
    rename,
)


class Tanh(S.Surrogate):
    """Derivative of a hyperbolic tangent without its factor: `1 - tanh(a u)^2`, `a = width`."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.width = width

    def derivative(self, u: Tensor) -> Tensor:
        s = torch.sigmoid(2 * self.width * u)
        return 4 * s * (1 - s)


SURROGATES: dict[str, Callable[[float], S.Surrogate]] = {
    "super": lambda a: S.FastSigmoid(1.0),  # theirs ignores alpha
    "triangle": lambda a: S.Triangle(1.0, a),
    "tanh": Tanh,
    "heavi_erfc": lambda a: S.Gaussian(1 / (math.sqrt(2) * a), 2 / a),
}


def value(p: Any, name: str) -> float:
    tensor = torch.as_tensor(getattr(p, name))
    # A run of theirs makes the v_reset of IAFParameters, a state, require gradients.
    is_state = name == "v_reset" and type(p).__name__ == "IAFParameters"
    if isinstance(tensor, nn.Parameter) or (tensor.requires_grad and not is_state):
        raise Refusal(
            f"its {name} is learned, but is not a parameter of the network: build the neuron in "
            "spikefuse, with a Learnable"
        )
    if tensor.numel() != 1:
        raise Refusal(f"its {name} has {tensor.numel()} values: use one for the layer")
    return float(tensor.detach())


def rate(m: Any, name: str) -> float:
    """Return the share of a state that is lost in one step, in the precision of `p`."""
    value(m.p, name)
    return float(m.dt * torch.as_tensor(getattr(m.p, name)))


def firing(p: Any, rest: float) -> dict[str, Any]:
    """Return our options for potentials counted from `rest`."""
    if p.method not in SURROGATES:
        raise Refusal(
            f"its method {p.method!r} has no equivalent: use one of {', '.join(SURROGATES)}"
        )
    surrogate = Above(SURROGATES[p.method](float(torch.as_tensor(p.alpha))))
    return {
        "threshold": value(p, "v_th") - rest,
        "v_reset": value(p, "v_reset") - rest,
        "surrogate": surrogate,
    }


def leak(m: Any) -> dict[str, Any]:
    return {"decay": 1 - rate(m, "tau_mem_inv"), "decay_input": True}


def origin(m: Any, name: str = "v_leak") -> tuple[float, str]:
    """Return the potential at which theirs starts and rests, from which ours is counted."""
    v = value(m.p, name)
    return v, counted_from(name, v)


def options(m: Any) -> None:
    if getattr(m, "record_states", False):
        raise Refusal(
            "it records its states: set record_states=False, and get them from the converted "
            'neuron by outputs=("spikes", "v")'
        )


def integrate_and_fire(m: Any) -> tuple[Neuron, str]:
    v0, note = origin(m, "v_reset")  # where theirs starts
    return IF(**firing(m.p, v0)), note


def current_based(m: Any) -> tuple[Neuron, str]:
    options(m)
    v0, note = origin(m)
    return CubaLIF(1 - rate(m, "tau_syn_inv"), **leak(m), **firing(m.p, v0)), note


def without_synapse(m: Any) -> tuple[Neuron, str]:
    v0, note = origin(m)
    resets: dict[str, Reset] = {"reset_value": "hard", "reset_subtract": "soft"}
    reset = resets.get(getattr(m.p.reset_method, "__name__", ""))
    if reset is None:
        raise Refusal("its reset_method has no equivalent: use reset_value or reset_subtract")
    if reset == "soft" and v0:
        raise Refusal(
            f"its v_leak is {v0:g}, and its reset subtracts a threshold that is not counted from "
            "there: use v_leak=0"
        )
    return LIF(reset=reset, **leak(m), **firing(m.p, v0)), note


class SynapticLI(Neuron):
    """Leaky integrator with a synapse: the charge of `CubaLIF`, whose output is its potential."""

    current, v = State(), State()

    def __init__(self, current_decay: float, decay: float) -> None:
        super().__init__()
        self.current_decay, self.decay = current_decay, decay

    def step(self, x: Tensor, current: Tensor, v: Tensor) -> tuple[Tensor, States]:
        current = self.current_decay * current + x
        v = self.decay * v + (1 - self.decay) * current
        return v, (current, v)


def require_rest(m: Any) -> None:
    if value(m.p, "v_leak"):
        raise Refusal("its v_leak is not 0, and its output is a potential: use v_leak=0")


def integrator(m: Any) -> tuple[Neuron, str]:
    options(m)
    require_rest(m)
    return SynapticLI(1 - rate(m, "tau_syn_inv"), leak(m)["decay"]), ""


def integrator_without_synapse(m: Any) -> tuple[Neuron, str]:
    require_rest(m)
    return LI(**leak(m)), ""


class RecurrentLayer(nn.Sequential):
    """The weights of the input, and neurons with weights between them."""


def recurrent(m: Any) -> tuple[nn.Module, str]:
    weights = {name: getattr(m, name) for name in ("input_weights", "recurrent_weights")}
    for name, weight in weights.items():
        if not isinstance(weight, nn.Parameter):
            raise Refusal(f"its {name} are not a parameter of the network: use an nn.Parameter")
    if not m.autapses and bool(m.recurrent_weights.diagonal().any()):
        raise Refusal("it has autapses=False and weights on the diagonal: set these to 0")
    neuron, note = current_based(m)
    neuron.detach_reset = True
    features, inputs = m.input_weights.shape
    linear = nn.Linear(inputs, features, bias=False, device="meta")
    feedback = Recurrent(neuron, features, self_connections=m.autapses, device="meta")
    linear.weight, feedback.weight = weights.values()
    made = RecurrentLayer(linear, feedback)
    rename(made, {"0.weight": "input_weights", "1.weight": "recurrent_weights"})
    return made, note


def sequential(m: Any) -> tuple[nn.Module, str]:
    if m.return_hidden:
        raise Refusal(
            "it returns the outputs of all layers: set return_hidden=False, and read them by hooks"
        )
    return as_class(nn.Sequential, m), "returns its output without states"


def lift(m: Any) -> tuple[nn.Module, str]:
    return as_class(nn.Sequential, m), ""


def mode(module: Any) -> str:
    name = LIBRARY.name_of(module)
    if name == "SequentialState":
        return ""
    return STEP if name.endswith("Cell") else SEQUENCE


def returns_state(module: Any) -> bool:
    return LIBRARY.name_of(module) != "Lift"


_SYNAPSE = "it has a synapse, and its equivalent has none: write it as a neuron of your own"
_LATE = "its recovery follows the potential one step later: use spikefuse.Izhikevich"
_RECURRENT = "its spikes are inputs of its next step: build it with spikefuse.Recurrent"
_WITH_RECURRENCE = (
    *("LIFEx", "LIFRefrac", "LIFAdEx", "LIFAdExRefrac", "LIFMC", "LIFMCRefrac"),
    *("LSNN", "Izhikevich", "SNN"),
)

LIBRARY = Library(
    "norse",
    {
        **{n: Rule(integrate_and_fire, is_stateful=True) for n in ("IAF", "IAFCell")},
        **{n: Rule(current_based, is_stateful=True) for n in ("LIF", "LIFCell")},
        "LIFBoxCell": Rule(without_synapse, is_stateful=True),
        **{n: Rule(integrator, is_stateful=True) for n in ("LI", "LICell")},
        "LIBoxCell": Rule(integrator_without_synapse, is_stateful=True),
        **{n: Rule(recurrent, is_stateful=True) for n in ("LIFRecurrent", "LIFRecurrentCell")},
        "SequentialState": Rule(sequential, inside="same"),
        "Lift": Rule(lift, inside=STEP),
    },
    {
        **dict.fromkeys(("LIFRefracCell", "LIFEx", "LIFExCell", "LSNN", "LSNNCell"), _SYNAPSE),
        **dict.fromkeys(("Izhikevich", "IzhikevichCell"), _LATE),
        "RecurrentSequential": _RECURRENT,
        **{
            f"{n}{kind}": _RECURRENT
            for n in _WITH_RECURRENCE
            for kind in ("Recurrent", "RecurrentCell")
        },
    },
    mode,
    returns_state,
    networks=("task", "benchmark"),
)
