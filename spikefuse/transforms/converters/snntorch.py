"""The neurons of snnTorch, and what else one of its networks may hold.

Theirs reset one step late by default and lose an input in some resets, so that only `Leaky` has an
equivalent among the models of `spikefuse.neurons`. The others are defined here, with the names of
their parameters and states, after the code of snnTorch 1.0.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from spikefuse.neurons import DelayedResetLIF
from spikefuse.neurons import surrogate as S
from spikefuse.neurons.definition import Neuron, State, States
from spikefuse.neurons.firing import Reset
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.recurrent import Recurrent
from spikefuse.transforms.converters.common import (
    STEP,
    Above,
    Clamped,
    Library,
    Refusal,
    Rule,
    rename,
)

SURROGATES: dict[str, Callable[..., S.Surrogate]] = {
    "atan": lambda alpha: S.Arctan(float(alpha)),
    "fast_sigmoid": lambda slope: S.FastSigmoid(float(slope)),
    "sigmoid": lambda slope: S.Sigmoid(float(slope)),
    "SFS": lambda slope, B: S.FastSigmoid(float(slope), cutoff=float(B)),
    "straight_through_estimator": S.StraightThrough,
    "heaviside": lambda: S.StraightThrough(cutoff=0.0),
}

RESETS = ("subtract", "zero", "none")


def floating(value: Tensor) -> Tensor:
    return value if value.is_floating_point() else value.float()


def surrogate_of(m: Any) -> S.Surrogate:
    if m.surrogate_disable:
        raise Refusal("it has no surrogate: set surrogate_disable=False")
    function = m.spike_grad
    if isinstance(function, S.Surrogate):
        return function
    name = getattr(function, "__qualname__", type(function).__name__)
    name = name.removesuffix(".<locals>.inner").split(".")[-1]
    if getattr(function, "__module__", "") != "snntorch.surrogate" or name not in SURROGATES:
        raise Refusal(
            f"its spike_grad {name} has no equivalent: use one of {', '.join(SURROGATES)}, or a "
            "spikefuse.surrogate.Custom, which snnTorch takes too"
        )
    values = inspect.getclosurevars(function).nonlocals
    # Theirs fires above the threshold, not at it.
    return Above(SURROGATES[name](**values))


def is_graded(m: Any) -> bool:
    """Whether the spikes have values other than 1."""
    factor = m.graded_spikes_factor
    return isinstance(factor, nn.Parameter) or bool((factor != 1).any())


class _Reset(Neuron):
    """A neuron that resets as snnTorch's do; subclasses define the states and the step.

    `reset_mechanism` is "subtract", "zero" or "none". The reset acts one step after the spike, and
    with `reset_delay=False` in its step. `returns_state` adds the states to the outputs.
    """

    decays: tuple[str, ...] = ()  # parameters that snnTorch clamps to [0, 1]

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.surrogate = surrogate_of(m)
        self.threshold = floating(m.threshold)
        self.reset_mechanism = RESETS[int(m.reset_mechanism_val)]
        self.reset_delay = getattr(m, "reset_delay", True)
        self.returns_state = m.output
        self.graded_spikes_factor = None
        constants = {"reset_mechanism_val": m.reset_mechanism_val}
        if is_graded(m):
            self.graded_spikes_factor = m.graded_spikes_factor
        else:
            constants["graded_spikes_factor"] = m.graded_spikes_factor
        for name in self.decays:
            setattr(self, name, Clamped(floating(getattr(m, name))))
        names = {f"{name}.value": name for name in self.decays}
        rename(self, names, constants | self.constants(m))

    def constants(self, m: Any) -> dict[str, Tensor]:
        return {}

    def fired(self, mem: Tensor) -> Tensor:
        """Return the spike of a previous potential, through which no gradient flows."""
        return self.surrogate(mem - self.threshold).detach()

    def after_reset(self, mem: Tensor, reset: Tensor) -> Tensor:
        """Return the potential after a reset, which to zero loses all that it holds."""
        if self.reset_mechanism == "subtract":
            return mem - reset * self.threshold
        return mem - reset * mem if self.reset_mechanism == "zero" else mem

    def fire(self, mem: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the potential after a reset that acts at once."""
        s = self.surrogate(mem - self.threshold)
        if not self.reset_delay:
            mem = self.after_reset(mem, s - reset)
        return (s if self.graded_spikes_factor is None else s * self.graded_spikes_factor), mem

    def result(self, s: Tensor, *states: Tensor) -> tuple[Any, States]:
        return ((s, *states) if self.returns_state else s), states


class Leaky(_Reset):
    """snnTorch's `Leaky`: its resets at once, its graded spikes, and its "none"."""

    mem = State()
    beta: Any
    decays = ("beta",)

    def step(self, x: Tensor, mem: Tensor) -> tuple[Any, States]:
        reset = self.fired(mem)
        if self.reset_mechanism == "zero":
            mem = (1 - reset) * mem
        mem = self.beta * mem + x
        if self.reset_mechanism == "subtract":
            mem = mem - reset * self.threshold
        s, mem = self.fire(mem, reset)
        return self.result(s, mem)


class Synaptic(_Reset):
    """snnTorch's `Synaptic`; its reset to zero one step late loses the current of that step."""

    syn, mem = State(), State()
    alpha: Any
    beta: Any
    decays = ("alpha", "beta")

    def step(self, x: Tensor, syn: Tensor, mem: Tensor) -> tuple[Any, States]:
        reset = self.fired(mem)
        syn = self.alpha * syn + x
        mem = self.after_reset(self.beta * mem + syn, reset)
        s, mem = self.fire(mem, reset)
        return self.result(s, syn, mem)


class Alpha(_Reset):
    """snnTorch's `Alpha`; its resets act one step late and lose the input of that step."""

    syn_exc, syn_inh, mem = State(), State(), State()
    alpha: Any
    beta: Any
    decays = ("alpha", "beta")

    def step(self, x: Tensor, syn_exc: Tensor, syn_inh: Tensor, mem: Tensor) -> tuple[Any, States]:
        reset = self.fired(mem)
        previous, rise = syn_inh, torch.log(self.alpha)
        syn_exc = self.alpha * syn_exc + x
        syn_inh = self.beta * syn_inh - x
        mem = (rise / (torch.log(self.beta) - rise) + 1) * (syn_exc + syn_inh)
        if self.reset_mechanism == "subtract":
            syn_exc = syn_exc - self.threshold * reset
            syn_inh = syn_inh - syn_inh * reset
            mem = mem + previous * reset
        elif self.reset_mechanism == "zero":
            syn_exc, syn_inh = syn_exc - syn_exc * reset, syn_inh - syn_inh * reset
            mem = mem - mem * reset
        s, mem = self.fire(mem, reset)
        return self.result(s, syn_exc, syn_inh, mem)


class Lapicque(_Reset):
    """snnTorch's `Lapicque`; its reset to zero one step late loses the input of that step."""

    mem = State()

    def __init__(self, m: Any) -> None:
        super().__init__(m)
        resistance, capacitance, duration = (
            float(v) for v in (m.R.double(), m.C.double(), m.time_step.double())
        )
        rate = 1 / (resistance * capacitance)
        self.gain, self.decay = resistance * rate * duration, 1 - duration * rate

    def constants(self, m: Any) -> dict[str, Tensor]:
        return {name: getattr(m, name).detach() for name in ("beta", "R", "C", "time_step")}

    def step(self, x: Tensor, mem: Tensor) -> tuple[Any, States]:
        reset = self.fired(mem)
        mem = self.after_reset(self.gain * x + self.decay * mem, reset)
        s, mem = self.fire(mem, reset)
        return self.result(s, mem)


class RecurrentLeaky(Leaky):
    """snnTorch's `RLeaky` without its weights; its reset to zero loses the input of that step."""

    def step(self, x: Tensor, mem: Tensor) -> tuple[Any, States]:
        reset = self.fired(mem)
        mem = self.after_reset(self.beta * mem + x, reset)
        s, mem = self.fire(mem, reset)
        return self.result(s, mem)


class OneToOneLeaky(RecurrentLeaky):
    """`RLeaky` whose neurons receive their own spikes, times `V`."""

    spk = State()

    def __init__(self, m: Any) -> None:
        super().__init__(m)
        self.V = floating(m.V)

    def step(self, x: Tensor, mem: Tensor, spk: Tensor) -> tuple[Any, States]:  # type: ignore[override]
        output, states = super().step(x + self.V * spk, mem)
        return output, (*states, output[0] if self.returns_state else output)


class OneToOneSynaptic(Synaptic):
    """`RSynaptic` whose neurons receive their own spikes, times `V`."""

    spk = State()

    def __init__(self, m: Any) -> None:
        super().__init__(m)
        self.V = floating(m.V)

    def step(  # type: ignore[override]
        self, x: Tensor, syn: Tensor, mem: Tensor, spk: Tensor
    ) -> tuple[Any, States]:
        output, states = super().step(x + self.V * spk, syn, mem)
        return output, (*states, output[0] if self.returns_state else output)


def _save_twice(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}recurrent.V"] = state[f"{prefix}V"]


def _load_once(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    state.pop(f"{prefix}recurrent.V", None)


def check(m: Any) -> str:
    """Refuse options that no neuron of ours has; return a note on the others."""
    for name, reason in {
        "inhibition": "lets one neuron of a layer fire, and a neuron of ours knows no other",
        "state_quant": "quantizes its states, and ours are float32",
    }.items():
        if getattr(m, name):
            raise Refusal(f"{name} {reason}: set {name}=False")
    values = [m.threshold, m.beta, getattr(m, "alpha", m.beta), m.graded_spikes_factor]
    if any(v.ndim > 1 for v in values):
        raise Refusal("its parameters have several dims: use one value, or one per feature")
    notes = []
    if any(v.ndim == 1 and v.numel() > 1 for v in values):
        notes.append("one value per feature: for inputs [T, B, features] only")
    if not (m.init_hidden or m.output):
        notes.append("returns its spikes alone; output=True adds its states")
    return "; ".join(notes)


def leaky(m: Any) -> tuple[Neuron, str]:
    note = check(m)
    is_plain = m.reset_delay and RESETS[int(m.reset_mechanism_val)] != "none"
    if m.output or is_graded(m) or not is_plain:
        return Leaky(m), note
    reset: Reset = "soft" if int(m.reset_mechanism_val) == 0 else "hard"
    neuron = DelayedResetLIF(
        Clamped(floating(m.beta)), floating(m.threshold), reset=reset, surrogate=surrogate_of(m)
    )
    constants = {name: getattr(m, name) for name in ("reset_mechanism_val", "graded_spikes_factor")}
    rename(neuron, {"decay.value": "beta"}, constants)
    return neuron, note


def defined(kind: type[_Reset]) -> Callable[[Any], tuple[Neuron, str]]:
    return lambda m: (kind(m), check(m))


def recurrent(m: Any) -> tuple[nn.Module, str]:
    is_leaky = not hasattr(m, "alpha")
    note = check(m)
    if not (is_leaky or m.reset_delay):
        raise Refusal("its reset_delay=False has no effect in snnTorch 1.0.0: use True")
    if not m.all_to_all:
        if torch.as_tensor(m.V).ndim > 1:
            raise Refusal("its V has several dims: use one value, or one per feature")
        neuron = (OneToOneLeaky if is_leaky else OneToOneSynaptic)(m)
        if "recurrent.V" in m.state_dict():
            neuron.register_state_dict_post_hook(_save_twice)
            neuron.register_load_state_dict_pre_hook(_load_once)
        return neuron, note
    inner = RecurrentLeaky(m) if is_leaky else Synaptic(m)
    layer, names = m.recurrent, {f"neuron.{key}": key for key in inner.state_dict()}
    made: Recurrent | Feedback
    if isinstance(layer, nn.Linear):
        made = Recurrent(inner, layer.in_features, bias=True, device="meta")
        made.weight, made.bias = cast(nn.Parameter, layer.weight), layer.bias
        names |= {"weight": "recurrent.weight", "bias": "recurrent.bias"}
    elif m.output:
        raise Refusal("output=True adds its states, and spikefuse.nn.Feedback returns spikes alone")
    else:
        made = Feedback(layer, inner)
        names |= {f"body.{key}": f"recurrent.{key}" for key in layer.state_dict()}
    rename(made, names)
    return made, note


def returns_state(module: Any) -> bool:
    # Those with `output` still return their states when they are converted.
    return not (module.init_hidden or module.output)


_LSTM = "it is a recurrent layer with gates, and no pointwise neuron: no equivalent"

LIBRARY = Library(
    "snntorch",
    {
        "Leaky": Rule(leaky, is_stateful=True),
        "Synaptic": Rule(defined(Synaptic), is_stateful=True),
        "Alpha": Rule(defined(Alpha), is_stateful=True),
        "Lapicque": Rule(defined(Lapicque), is_stateful=True),
        "RLeaky": Rule(recurrent, is_stateful=True),
        "RSynaptic": Rule(recurrent, is_stateful=True),
    },
    dict.fromkeys(("SLSTM", "SConv2dLSTM"), _LSTM),
    lambda module: STEP,
    returns_state,
)
