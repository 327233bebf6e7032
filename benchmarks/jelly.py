"""SpikingJelly at its best documented ways: its nodes, functions and compiler of neurons.

Its kernels are chosen and tuned in the first calls, which are not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.layers import DECAY, THRESHOLD, WIDTH, Inputs, Tensors, trained
from benchmarks.runner import Contender, first_line

NODE, FUNCTION = "SpikingJelly node", "SpikingJelly function"
PRECISION, FLEXSN = "SpikingJelly, explicit precision", "FlexSN"
# Allowed differences from the reference, by what is stored in bfloat16: states for backward, as
# which surrogates find them, or all states, which flips spikes.
ROUNDED, CARRIED = 0.05, 0.5


def spikingjelly(*names: str) -> tuple[Any, ...]:
    """Import modules of SpikingJelly.

    Raises:
        Exception: of any type, because its own dependencies may be missing.
    """
    return tuple(importlib.import_module(f"spikingjelly.activation_based.{n}") for n in names)


class Jelly:
    """SpikingJelly's LIF neurons, as a module and as a function; its decay is 1 - 1/tau.

    Attributes:
        note: the implementation that SpikingJelly chooses.
    """

    def __init__(
        self,
        device: torch.device,
        decay: float = DECAY,
        threshold: float = THRESHOLD,
        sigmoid: bool = True,
    ) -> None:
        self.device = device
        self.functional, self.neurons, surrogates = spikingjelly(
            "functional", "neuron", "surrogate"
        )
        surrogate = surrogates.Sigmoid(alpha=WIDTH)
        if not sigmoid:  # the cheapest surrogate of its kernels
            surrogate = surrogates.PiecewiseQuadratic(alpha=1.0)
        self.constants = {
            "tau": 1 / (1 - decay),
            "decay_input": False,
            "v_threshold": threshold,
            "v_reset": 0.0,
            "surrogate_function": surrogate,
            "detach_reset": False,
        }
        try:
            used = self.functional.neuron_implementation("lif", device)["implementation"]
        except Exception:  # on a CPU there is only one
            used = "torch"
        self.note = f"its implementation: {used}"

    def node(self, dtype: torch.dtype) -> nn.Module:
        """Return a module whose states are stored in `dtype`; on a GPU, it computes in float32."""
        node = self.neurons.LIFNode(**self.constants, step_mode="m")
        if self.device.type == "cuda":
            prepare_nodes(node, self.device, dtype)
        return node

    def function(self, x: Tensor, rest: Tensor) -> Tensor:
        """Return the spikes for a state `rest`, which stays float32 for a bfloat16 input."""
        return self.functional.lif_multi_step(x, rest, **self.constants)[0]

    def precision(self, x: Tensor, rest: Tensor) -> Tensor:
        """Return the spikes of kernels that compute in float32, and store states as `x` is."""
        return self.functional.lif_multi_step(
            x, rest, **self.constants, neuron_storage=x.dtype, neuron_fwd="fp32", neuron_bwd="fp32"
        )[0]


def prepare_nodes(net: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Let nodes of SpikingJelly store states in `dtype` and compute in float32."""
    (precision,) = spikingjelly("precision")
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    precision.prepare_model_for_precision(net, device, {"mode": name, "neuron_storage": name})


class Function(nn.Module):
    """A function of (sequence `[T, M]`, state) on a view of the folded tensor `[T*B, ...]`."""

    def __init__(self, T: int, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.T, self.function = T, function
        self.rest: dict[int, Tensor] = {}  # made once, not timed

    def forward(self, x: Tensor) -> Tensor:
        channels_last = not x.is_contiguous()
        rows = x.movedim(1, -1) if channels_last else x
        flat = rows.view(self.T, -1)
        size = flat.shape[1]
        if size not in self.rest:
            self.rest[size] = torch.zeros(size, device=x.device)
        spikes = self.function(flat, self.rest[size]).view(rows.shape)
        return spikes.movedim(-1, 1) if channels_last else spikes


def lif(inputs: Inputs) -> list[Contender]:
    """Return SpikingJelly's LIF neuron in each of its ways.

    Its function takes a float32 state, or an explicit precision. A node without one has a bfloat16
    state for a bfloat16 input, for which it has only a loop of its own.
    """
    (x,) = inputs.xs
    try:
        jelly = Jelly(x.device)
        node = jelly.node(x.dtype)
    except Exception as error:
        reason = first_line(error)
        return [Contender(name, unavailable=reason) for name in (NODE, FUNCTION, PRECISION)]
    rest = torch.zeros(x.shape[1:], device=x.device)  # made once, not timed

    def layer(x: Tensor) -> Tensor:
        y = node(x)
        jelly.functional.reset_net(node)
        return y

    return [
        trained(NODE, layer, inputs, allowed=_if_bfloat16(x, ROUNDED)),
        trained(FUNCTION, lambda x: jelly.function(x, rest), inputs),
        trained(
            PRECISION, lambda x: jelly.precision(x, rest), inputs, allowed=_if_bfloat16(x, ROUNDED)
        ),
    ]


# FlexSN, its compiler of neurons. A core must not refer to a surrogate object.


def sigmoid_spike(u: Tensor) -> Tensor:
    (surrogates,) = spikingjelly("surrogate")
    return surrogates.sigmoid.apply(u, WIDTH)


def _lif(x: Tensor, v: Tensor) -> Tensors:
    h = DECAY * v + x
    s = sigmoid_spike(h - THRESHOLD)
    return s, h * (1.0 - s)


def _plif(x: Tensor, v: Tensor, decay: Tensor) -> Tensors:
    h = decay * v + x
    s = sigmoid_spike(h - 1.0)
    return s, h * (1.0 - s)


def _alif(x: Tensor, v: Tensor, a: Tensor) -> Tensors:
    h = 0.5 * v + x
    s = sigmoid_spike(h - (1.0 + 0.18 * a))
    return s, h * (1.0 - s), 0.97 * a + s


def _cuba(x: Tensor, v: Tensor, current: Tensor) -> Tensors:
    current = 0.5 * current + x
    h = 0.9 * v + current
    s = sigmoid_spike(h - 1.0)
    return s, h * (1.0 - s), current


def _gated(x: Tensor, gate: Tensor, v: Tensor, a: Tensor) -> Tensors:
    h = 0.9 * v + x
    theta = 1.0 + 0.18 * a
    s = sigmoid_spike(h - theta)
    g = torch.sigmoid(gate)
    return s, h, h - s * (g * h + (1.0 - g) * theta), 0.97 * a + s


# By the name of a model of `benchmarks.neurons`: a step and its number of states.
CORES: dict[str, tuple[Callable[..., Tensors], int]] = {
    "LIF": (_lif, 1),
    "PLIF per channel": (_plif, 1),
    "ALIF": (_alif, 2),
    "CubaLIF": (_cuba, 2),
    "two inputs, two outputs": (_gated, 2),
}


def flexsn(model: str, neuron: nn.Module, inputs: Inputs) -> Contender:
    """Compile a model of `benchmarks.neurons` by FlexSN; it shares the parameters of `neuron`."""
    core, num_states = CORES[model]
    params, x = tuple(neuron.parameters()), inputs.xs[0]
    given = torch.zeros(x.shape[1:], dtype=x.dtype, device=x.device)
    try:
        (neurons,) = spikingjelly("neuron.flexsn")
        flex = neurons.FlexSN(core, num_states, static_inputs=(given,) * len(params))
    except Exception as error:
        return Contender(FLEXSN, unavailable=first_line(error))

    def layer(*xs: Tensor) -> Tensors:
        states = tuple(torch.zeros_like(x[0]) for _ in range(num_states))
        # A decay per channel is given to each neuron.
        decays = tuple(p.sigmoid().to(x.dtype).view(-1, 1, 1).expand(x.shape[1:]) for p in params)
        outputs, _ = flex.multi_step_functional_forward(xs, states, static_inputs=decays)
        return tuple(outputs)

    return trained(FLEXSN, layer, inputs, params, _if_bfloat16(x, CARRIED))


def _if_bfloat16(x: Tensor, allowed: float) -> float | None:
    return allowed if x.dtype == torch.bfloat16 else None
