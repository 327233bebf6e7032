"""The modules of SpikingJelly: `activation_based` (2.0.0) and `clock_driven` (0.0.0.0.12)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spikefuse._torch import gradients
from spikefuse.neurons import (
    CLIF,
    EIF,
    IF,
    KLIF,
    LI,
    LIF,
    QIF,
    CubaLIF,
    IntegerLIF,
    Izhikevich,
    TernaryLIF,
)
from spikefuse.neurons import surrogate as S
from spikefuse.neurons.definition import Neuron
from spikefuse.neurons.learnable import Learnable
from spikefuse.neurons.lif import decay_from_tau
from spikefuse.neurons.sliding_psn import SlidingPSN
from spikefuse.nn.call import active
from spikefuse.nn.checkpoint import refuse_recomputation
from spikefuse.nn.feedback import Feedback
from spikefuse.nn.neuron import refusal_of
from spikefuse.nn.over_time import PSN, StepScale
from spikefuse.nn.recurrent import Recurrent
from spikefuse.transforms.converters.common import (
    FOLDED,
    SEQUENCE,
    STATELESS,
    STEP,
    Library,
    Refusal,
    Rule,
    as_class,
    counted_from,
    rename,
)

SURROGATES: dict[str, Callable[[float], S.Surrogate]] = {
    "Sigmoid": S.Sigmoid,
    "ATan": S.Arctan,
    "SoftSign": lambda a: S.FastSigmoid(a, a / 2),
    "SuperSpike": lambda a: S.FastSigmoid(1.0, a),
    "PiecewiseQuadratic": S.PiecewiseQuadratic,
    "Erf": S.Erf,
    "Rect": lambda a: S.Rectangle(-0.5 / a, 0.5 / a, a),
    "DeterministicPass": lambda _: S.StraightThrough(),
}


class Differentiated(S.Surrogate):
    """A function `spikes = function(u, **values)` with the derivative that autograd computes."""

    def __init__(self, function: Callable[..., Tensor], **values: Any) -> None:
        super().__init__()
        self.function, self.values = function, tuple(values.items())

    def spike(self, u: Tensor) -> Tensor:
        return self.function(u, **dict(self.values))

    def derivative(self, u: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = u.detach().requires_grad_()
            (found,) = gradients(self.spike(leaf), [leaf], False)
        return torch.zeros_like(u) if found is None else found


def surrogate_of(function: Any) -> S.Surrogate:
    if isinstance(function, S.Surrogate):
        return function
    kind = type(function)
    is_theirs = kind.__module__.startswith("spikingjelly.") and "surrogate" in kind.__module__
    if not getattr(function, "spiking", True):
        raise Refusal("its surrogate emits no spikes: call set_spiking_mode(True) on it")
    if is_theirs and kind.__name__ in SURROGATES:
        return SURROGATES[kind.__name__](float(getattr(function, "alpha", 1.0)))
    spike: Any = getattr(kind, "spiking_function", None)
    name, values = kind.__name__, dict[str, Any]()
    if inspect.isroutine(function):  # also `apply` of a torch.autograd.Function
        owner, spike = getattr(function, "__self__", None), function
        name = f"{owner.__name__}.apply" if isinstance(owner, type) else function.__qualname__
    try:
        if spike is None:
            raise TypeError("it is no function, and has no static spiking_function")
        if spike is not function:
            names = list(inspect.signature(spike).parameters)[1:]
            values = {name: getattr(function, name) for name in names}
        made = Differentiated(spike, **values)
        reason = _refusal_of_backward(made) or refusal_of(IF(surrogate=made))
    except (AttributeError, TypeError, RuntimeError) as error:
        reason = str(error)
    if reason:
        raise Refusal(
            f"its surrogate {name} can't be compiled ({reason}): use one of "
            f"{', '.join(SURROGATES)}, or a spikefuse.surrogate.Custom as surrogate_function"
        )
    return made


def _refusal_of_backward(surrogate: Differentiated) -> str:
    """Why the backward of a function is not the product with a derivative; "" if it is."""
    found = []
    with torch.inference_mode(False), torch.enable_grad():
        for g in (1.0, -1e3):
            u = torch.linspace(-2, 2, 101, requires_grad=True)
            spikes = surrogate.spike(u)
            if not spikes.requires_grad:
                return "it has no derivative"
            found += [x / g for x in torch.autograd.grad(spikes, u, torch.full_like(spikes, g))]
    is_product = torch.allclose(found[0], found[1], rtol=1e-3, equal_nan=True)
    return "" if is_product else "its backward does not multiply the gradient by a function of u"


def refuse_options(m: Any) -> None:
    if getattr(m, "store_v_seq", False) or getattr(m, "store_state_seqs", False):
        raise Refusal(
            "it stores its potentials: turn store_v_seq off, and get them from the converted "
            'neuron by outputs=("spikes", "v")'
        )
    if getattr(m, "_neuron_precision", None) is not None:
        raise Refusal("its arithmetic has a reduced precision: ours is float32; set it to None")


def firing(m: Any) -> dict[str, Any]:
    """Return our options for their threshold, reset and surrogate; the reset is to 0."""
    refuse_options(m)
    return {
        "threshold": m.v_threshold - origin(m)[0],
        "reset": "soft" if m.v_reset is None else "hard",
        "detach_reset": m.detach_reset,
        "surrogate": surrogate_of(m.surrogate_function),
    }


def origin(m: Any) -> tuple[float, str]:
    """Return the potential at which theirs starts and rests, from which ours is counted."""
    v = m.v_reset or 0.0
    return v, counted_from("v_reset", v)


def refuse_v_reset(m: Any, reason: str) -> None:
    if m.v_reset:
        raise Refusal(f"its v_reset is {m.v_reset:g}, and {reason}: use v_reset=0.0 or None")


def leak(m: Any) -> dict[str, Any]:
    return {"decay": decay_from_tau(m.tau), "decay_input": getattr(m, "decay_input", True)}


class _Decay(Learnable):
    """A decay `1 - sigmoid(w)`."""

    def __init__(self, w: nn.Parameter) -> None:
        super().__init__()
        self.w = w

    def forward(self) -> Tensor:
        return torch.sigmoid(-self.w)


def integrate_and_fire(m: Any) -> tuple[Neuron, str]:
    return IF(**firing(m)), origin(m)[1]


def leaky(m: Any) -> tuple[Neuron, str]:
    return LIF(**leak(m), **firing(m)), origin(m)[1]


def simple(make: Callable[[Any], tuple[Neuron, str]]) -> Callable[[Any], tuple[Neuron, str]]:
    def made(m: Any) -> tuple[Neuron, str]:
        refuse_v_reset(m, "it starts at 0")
        return make(m)

    return made


def parametric(m: Any) -> tuple[Neuron, str]:
    decay_input = getattr(m, "decay_input", True)
    neuron = LIF(_Decay(m.w), decay_input=decay_input, **firing(m))
    rename(neuron, {"decay.w": "w"})
    return neuron, origin(m)[1]


def scaled(m: Any) -> tuple[Neuron, str]:
    refuse_v_reset(m, "its relu acts on potentials relative to 0")
    return KLIF(k=m.k, scale_reset=m.scale_reset, **leak(m), **firing(m)), ""


def ternary(m: Any) -> tuple[Neuron, str]:
    refuse_v_reset(m, "its two thresholds lie symmetrically to 0")
    rate = leak(m) if hasattr(m, "tau") else {"decay": 1.0}
    return TernaryLIF(**rate, **firing(m)), ""


def integer(m: Any) -> tuple[Neuron, str]:
    refuse_options(m)
    count = m.surrogate_function
    levels = count.max_spike_count
    if not count.spiking or (count.grad_min, count.grad_max) != (0.0, levels):
        raise Refusal(
            "its surrogate has another window or emits no spikes: use "
            f"MultiLevelSpikeCount({levels})"
        )
    made = IntegerLIF(decay_from_tau(m.tau), m.v_threshold, levels, detach_reset=m.detach_reset)
    return made, "rounds halves up; theirs rounds them to even numbers"


def current_based(m: Any) -> tuple[Neuron, str]:
    refuse_v_reset(m, "it starts there but leaks towards 0")
    return CubaLIF(m.c_decay, m.v_decay, **firing(m)), ""


def complementary(m: Any) -> tuple[Neuron, str]:
    refuse_options(m)
    surrogate = surrogate_of(m.surrogate_function)
    return CLIF(decay_from_tau(m.tau), m.v_threshold, surrogate=surrogate), ""


def quadratic(m: Any) -> tuple[Neuron, str]:
    v0, note = origin(m)
    return QIF(m.tau, m.v_rest - v0, m.v_c - v0, m.a0, **firing(m)), note


def exponential(m: Any) -> tuple[Neuron, str]:
    v0, note = origin(m)
    return EIF(m.tau, m.v_rest - v0, m.theta_rh - v0, m.delta_T, **firing(m)), note


def izhikevich(m: Any) -> tuple[Neuron, str]:
    v0, note = origin(m)
    if m.w_rest:
        raise Refusal(f"its recovery starts at w_rest = {m.w_rest:g}, ours at 0: use w_rest=0.0")
    values = m.tau, m.v_rest - v0, m.v_c - v0, m.a0, m.tau_w, m.a, m.b
    return Izhikevich(*values, **firing(m)), note


def integrator(m: Any) -> tuple[Neuron, str]:
    if m.decode is not None:
        raise Refusal(
            f"it decodes its potentials by {m.decode!r} over time: use decode=None, and decode the "
            "output [T, B, ...] of the network, such as y.max(0).values"
        )
    made = LI(decay_from_tau(m.tau), decay_input=True) if hasattr(m, "tau") else LI(1.0)
    return made, "returns a tensor instead of a list of steps"


class SequenceDropout(nn.Dropout):
    """Dropout of `[T*B, ...]` whose mask `[B, ...]` is the same at all steps of a call."""

    def mask_of(self, x: Tensor) -> Tensor:
        return F.dropout(torch.ones_like(x), self.p)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        refuse_recomputation(self)
        if active.call is None:  # [T, B, ...]
            return x * self.mask_of(x[0])
        steps = x.unflatten(0, (active.call.num_steps, -1))
        return (steps * self.mask_of(steps[0])).flatten(0, 1)


class SequenceDropout2d(SequenceDropout):
    """Dropout of channels whose mask is the same at all steps of a call."""

    def mask_of(self, x: Tensor) -> Tensor:
        return F.dropout2d(torch.ones_like(x), self.p)


class ScaledBatchNorm(StepScale, nn.BatchNorm1d):
    """Batch norm of `[T, B, C, ...]` with a learned scale for each step."""

    def over_time(self, x: Tensor) -> Tensor:  # type: ignore[override]
        rows = x.flatten(3) if x.ndim > 4 else x
        y = nn.BatchNorm1d.forward(self, rows.flatten(0, 1))
        return super().over_time(y.view(x.shape))


def dropout(kind: type[nn.Dropout]) -> Callable[[Any], tuple[nn.Module, str]]:
    return lambda m: (kind(m.p), "one mask for all steps of a call")


def stateless(kind: type[nn.Module], note: str = "") -> Callable[[Any], tuple[nn.Module, str]]:
    return lambda m: (as_class(kind, m), note)


def voting(m: Any) -> tuple[nn.Module, str]:
    return nn.AvgPool1d(m.voting_size), ""


def container(m: Any) -> tuple[nn.Module, str]:
    if not isinstance(m, nn.Sequential):
        raise Refusal("it is not an nn.Sequential: use SpikingJelly 0.0.0.0.12 or later")
    return as_class(nn.Sequential, m), ""


class LinearRecurrent(Recurrent):
    """SpikingJelly's `LinearRecurrentContainer`: `y[t] = sub_module(rc([x[t], y[t - 1]]))`.

    `sub_module` is a neuron, with or without linear layers before it. As they are linear, the
    spikes are fed back by one matrix.
    """

    def __init__(self, rc: nn.Linear, sub_module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.rc, self.sub_module = rc, sub_module
        self.features = rc.in_features - rc.out_features
        self.heads, self.self_connections, self.bias = 1, True, None

    @property
    def neuron(self) -> Neuron:  # type: ignore[override]
        return _chain(self.sub_module)[-1]  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return str(self.features)

    def forward(self, x: Tensor, **options: Any) -> Any:  # type: ignore[override]
        y = F.linear(x, self.rc.weight[:, : self.rc.out_features], self.rc.bias)
        for layer in _chain(self.sub_module)[:-1]:
            y = layer(y)
        return super().forward(y, **options)

    def effective_weight(self, inputs: tuple[Tensor, ...]) -> Tensor:
        weight = self.rc.weight[:, self.rc.out_features :]
        for layer in _chain(self.sub_module)[:-1]:
            weight = cast(Tensor, layer.weight) @ weight
        return weight.unsqueeze(0).to(inputs[0].dtype)


class ElementWiseRecurrent(Feedback):
    """SpikingJelly's `ElementWiseRecurrentContainer`: `y[t] = neuron(function(y[t - 1], x[t]))`."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], neuron: Neuron) -> None:
        super().__init__(nn.Identity(), neuron)
        self.function = function

    def receive(self, x: Tensor, spikes: Tensor) -> Tensor:
        return self.function(spikes, x)


def _chain(module: nn.Module) -> list[nn.Module]:
    return [*module] if isinstance(module, nn.Sequential) else [module]


def linear_recurrent(m: Any) -> tuple[nn.Module, str]:
    *layers, neuron = _chain(m.sub_module) or [m.sub_module]
    if not isinstance(neuron, Neuron) or not all(type(v) is nn.Linear for v in layers):
        raise Refusal(
            "its sub_module is not a neuron, alone or after linear layers in nn.Sequential: move "
            "other layers out of the container"
        )
    return LinearRecurrent(m.rc, m.sub_module), "spikes are fed back by one matrix"


def element_wise_recurrent(m: Any) -> tuple[nn.Module, str]:
    if not isinstance(m.sub_module, Neuron):
        raise Refusal("its sub_module is not a neuron: move other layers out of the container")
    made = ElementWiseRecurrent(m.element_wise_function, m.sub_module)
    rename(made, {f"neuron.{key}": f"sub_module.{key}" for key in m.sub_module.state_dict()})
    return made, "a loop over time in Python"


def parallel(m: Any) -> tuple[nn.Module, str]:
    order = getattr(m, "k", None)
    if order is not None and float(m.lambda_) != 1.0:
        raise Refusal(f"its lambda_ is {float(m.lambda_):g}, and a mask has no part: set it to 1")
    made = PSN(m.T, order, surrogate_of(m.surrogate_function))
    made.weight, made.bias = m.weight, m.bias
    rename(made, {}, {k: v.clone() for k, v in m.state_dict().items() if not hasattr(made, k)})
    return made, ""


def sliding(m: Any) -> tuple[Neuron, str]:
    made = SlidingPSN(m.k, surrogate_of(m.surrogate_function))
    with torch.no_grad():
        for i, value in enumerate(m.weight.flip(0)):
            getattr(made, f"w{i}").copy_(value)
        made.bias.copy_(m.bias)
    made.register_state_dict_post_hook(_join_weights)
    made.register_load_state_dict_pre_hook(_split_weights)
    return made, "its weights are the parameters w0, w1, ... of the steps before"


def _join_weights(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    names = [f"{prefix}w{i}" for i in reversed(range(getattr(module, "order")))]  # noqa: B009
    state[f"{prefix}weight"] = torch.stack([state.pop(name) for name in names])


def _split_weights(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for i, value in enumerate(state.pop(f"{prefix}weight", torch.empty(0)).flip(0)):
        state[f"{prefix}w{i}"] = value


NEURONS = {
    "SlidingPSN": sliding,
    "IFNode": integrate_and_fire,
    "LIFNode": leaky,
    "SimpleIFNode": simple(integrate_and_fire),
    "SimpleLIFNode": simple(leaky),
    "ParametricLIFNode": parametric,
    "QIFNode": quadratic,
    "EIFNode": exponential,
    "KLIFNode": scaled,
    "TernaryIFNode": ternary,
    "TernaryLIFNode": ternary,
    "ILIFNode": integer,
    "CUBALIFNode": current_based,
    "ComplementaryLIFNode": complementary,
    "IzhikevichNode": izhikevich,
    "NonSpikingIFNode": integrator,
    "NonSpikingLIFNode": integrator,
}
# 0.0.0.0.12 has neurons of sequences as classes of their own.
MULTI_STEP = ("IFNode", "LIFNode", "ParametricLIFNode", "EIFNode")

_SCALED_WEIGHT = "its weight already holds alpha * v_th"
RULES = {
    **{name: Rule(make, is_stateful=True) for name, make in NEURONS.items()},
    **{f"MultiStep{name}": Rule(NEURONS[name], is_stateful=True) for name in MULTI_STEP},
    **{name: Rule(stateless(getattr(nn, name))) for name in STATELESS},
    **{
        f"ThresholdDependentBatchNorm{n}d": Rule(stateless(kind, _SCALED_WEIGHT))
        for n, kind in enumerate((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), 1)
    },
    **{name: Rule(parallel) for name in ("PSN", "MaskedPSN")},
    **{f"TemporalEffectiveBatchNorm{n}d": Rule(stateless(ScaledBatchNorm)) for n in (1, 2, 3)},
    "Dropout": Rule(dropout(SequenceDropout)),
    "Dropout2d": Rule(dropout(SequenceDropout2d)),
    "MultiStepDropout": Rule(dropout(SequenceDropout)),
    "MultiStepDropout2d": Rule(dropout(SequenceDropout2d)),
    "VotingLayer": Rule(voting),
    "SeqToANNContainer": Rule(container, inside=FOLDED),
    "MultiStepContainer": Rule(container, inside=STEP),
    "StepModeContainer": Rule(container, inside=STEP),
    "LinearRecurrentContainer": Rule(linear_recurrent, inside=STEP, is_stateful=True),
    "ElementWiseRecurrentContainer": Rule(element_wise_recurrent, inside=STEP, is_stateful=True),
}

_PER_STEP = "it has separate weights for each step, which a network for one step cannot have"
REFUSED = {
    "GatedLIFNode": (
        "it has a conductance for each time step, spikefuse.GatedLIF a single one: use that, and "
        "train it from new weights"
    ),
    "LIAFNode": (
        "it emits a function of its potential: write it as a neuron of your own, see "
        "docs/write-a-neuron.md"
    ),
    "NeuNorm": "it remembers a sum over channels, and a neuron cannot mix channels",
    **{f"BatchNormThroughTime{n}d": _PER_STEP for n in (1, 2, 3)},
    "SynapseFilter": "write it as a neuron of your own, see docs/write-a-neuron.md",
    **dict.fromkeys(
        ("MemoryModule", "BaseNode", "SimpleBaseNode"),
        "it is a neuron or layer with a state of its own, written for SpikingJelly: write it for "
        "spikefuse, see docs/write-a-neuron.md",
    ),
    "Delay": "use sf.Delay(1, max_delay), see docs/how-to/delays.md",
    **dict.fromkeys(
        ("TLastMultiStepContainer", "TLastSeqToANNContainer"),
        "its time runs along the last dim: use the container with time first",
    ),
}


def mode(module: Any) -> str:
    name = LIBRARY.name_of(module)
    if name in ("SeqToANNContainer", "MultiStepContainer") or name.startswith("NonSpiking"):
        return SEQUENCE
    if name == "Linear":
        return ""
    if hasattr(module, "step_mode"):
        return SEQUENCE if module.step_mode == "m" else STEP
    return SEQUENCE if name.startswith("MultiStep") else STEP


LIBRARY = Library(
    "spikingjelly",
    RULES,
    REFUSED,
    mode,
    networks=("model", "examples", "attention"),
    mixins=("StepModule", "SingleStepModule", "MultiStepModule"),
)
