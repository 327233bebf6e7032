"""One layer, forward and backward: its input, the contenders, and the reference's results.

The LIF neuron is from "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spikefuse as sf
from benchmarks.runner import Contender, difference, first_line
from spikefuse import reference

Tensors = tuple[Tensor, ...]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DECAY, THRESHOLD, WIDTH = 0.2, 0.3, 4.0

OURS, LOOP = "spikefuse", "eager loop"
COMPILED = "torch.compile"
JELLY_NODE, JELLY_FUNCTION = "SpikingJelly node", "SpikingJelly function"

# The largest number of elements to verify; of larger inputs, the first and last neurons.
VERIFIED_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 22}
# Allowed relative difference from the reference; of spikes, the root of the share that differs.
# Another order of operations flips one in a million, a state in bfloat16 one in ten thousand.
ALLOWED = 0.005


def lif(threshold: float = THRESHOLD) -> sf.LIF:
    return sf.LIF(decay=DECAY, threshold=threshold, surrogate=sf.surrogate.Sigmoid(WIDTH))


@dataclass
class Inputs:
    """Inputs `[T, B, ...]` of a layer, and as many gradients of its outputs."""

    xs: Tensors
    grads: Tensors

    @classmethod
    def draw(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        ports: int = 1,
        high: float = 1.0,
    ) -> Inputs:
        """Draw `ports` inputs, uniform in `[0, high)`, and normal gradients."""
        options: dict[str, Any] = {"device": device}
        options["generator"] = torch.Generator(device).manual_seed(shape[0])
        xs = [torch.rand(shape, **options) * high for _ in range(ports)]
        grads = [torch.randn(shape, **options) for _ in range(ports)]
        return cls(
            tuple(x.to(dtype).requires_grad_() for x in xs), tuple(g.to(dtype) for g in grads)
        )

    def in_layout(self, memory_format: torch.memory_format) -> Inputs:
        """Return the same values `[T, B, C, H, W]` with each step in `memory_format`."""

        def convert(t: Tensor) -> Tensor:
            steps = t.detach().flatten(0, 1).contiguous(memory_format=memory_format)
            return steps.unflatten(0, t.shape[:2])

        xs = tuple(convert(x).requires_grad_() for x in self.xs)
        return Inputs(xs, tuple(convert(g) for g in self.grads))

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.xs, *self.grads))

    def bytes_to_move(self, training: bool = True) -> int:
        """Return the bytes that must be read and written.

        Forward reads the inputs and writes the outputs; backward reads the inputs and the
        gradients of the outputs, and writes the gradients of the inputs.
        """
        inputs, outputs = len(self.xs), len(self.grads)
        forward, backward = inputs + outputs, 2 * inputs + outputs
        return (forward + (backward if training else 0)) * self.xs[0].nbytes


@dataclass
class LayerResult:
    """Outputs, gradients of the inputs, and gradients of the learnable parameters."""

    outputs: Tensors
    grads: Tensors = ()
    params: Tensors = ()


# Contenders


def train(
    layer: Callable[..., Tensor | Tensors], inputs: Inputs, params: Sequence[Tensor] = ()
) -> LayerResult:
    """Run forward and backward of `layer` for given gradients of its outputs."""
    outputs = _tuple(layer(*inputs.xs))
    found = torch.autograd.grad(outputs, (*inputs.xs, *params), inputs.grads)
    num = len(inputs.xs)
    return LayerResult(tuple(y.detach() for y in outputs), found[:num], found[num:])


def infer(layer: Callable[..., Tensor | Tensors], inputs: Inputs) -> LayerResult:
    """Run forward of `layer` without gradients."""
    with torch.no_grad():
        return LayerResult(_tuple(layer(*inputs.xs)))


def trained(
    name: str,
    layer: Callable[..., Tensor | Tensors],
    inputs: Inputs,
    params: Sequence[Tensor] = (),
) -> Contender:
    return Contender(name, partial(train, layer, inputs, params))


def ours(neuron: sf.Neuron, inputs: Inputs, name: str = OURS) -> Contender:
    return trained(name, neuron, inputs, tuple(neuron.parameters()))


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u >= 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        s = torch.sigmoid(WIDTH * u)
        return grad * (WIDTH * s * (1 - s))


def hand_written(
    x: Tensor, weight: Tensor | None = None, decay: float = DECAY, threshold: float = THRESHOLD
) -> Tensor:
    """Compute LIF spikes, recurrent with a `weight`, by a loop over time as users write it."""
    v = torch.zeros_like(x[0], dtype=torch.float32)
    s, spikes = torch.zeros_like(x[0]), []
    for current in x.unbind(0):
        if weight is not None:
            current = current + F.linear(s, weight)
        h = decay * v + current
        fired = Spike.apply(h - threshold)
        v = h * (1 - fired)
        s = fired.to(x.dtype)
        spikes.append(s)
    return torch.stack(spikes)


def compiled(inputs: Inputs) -> Contender:
    """Return torch.compile of the hand-written loop."""
    torch.compiler.reset()
    function = torch.compile(hand_written, fullgraph=True, dynamic=False)
    try:
        train(function, inputs)
    except Exception as error:
        return Contender(COMPILED, unavailable=first_line(error))
    return trained(COMPILED, function, inputs)


# SpikingJelly


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

    def node(self) -> nn.Module:
        return self.neurons.LIFNode(**self.constants, step_mode="m")

    def function(self, x: Tensor, rest: Tensor) -> Tensor:
        """Return the spikes for a state `rest`, which stays float32 for a bfloat16 input."""
        return self.functional.lif_multi_step(x, rest, **self.constants)[0]


class JellyFunction(nn.Module):
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


def jelly_lif(inputs: Inputs) -> list[Contender]:
    """Return SpikingJelly's LIF module, and its function with a float32 state.

    The module's state has the dtype of the input. For a bfloat16 input, the fused kernels need a
    float32 state, which only the function accepts.
    """
    (x,) = inputs.xs
    try:
        jelly = Jelly(x.device)
    except Exception as error:
        reason = first_line(error)
        return [Contender(name, unavailable=reason) for name in (JELLY_NODE, JELLY_FUNCTION)]
    node = jelly.node()
    rest = torch.zeros(x.shape[1:], device=x.device)  # made once, not timed

    def layer(x: Tensor) -> Tensor:
        y = node(x)
        jelly.functional.reset_net(node)
        return y

    function = trained(JELLY_FUNCTION, lambda x: jelly.function(x, rest), inputs)
    return [trained(JELLY_NODE, layer, inputs), function]


def _tuple(found: Tensor | Tensors) -> Tensors:
    return (found,) if isinstance(found, Tensor) else found


# Verification


def compare(found: LayerResult, expected: LayerResult, allowed: float = ALLOWED) -> None:
    """Check that each tensor differs from the expected one by at most `allowed` of its norm.

    Raises:
        AssertionError: a tensor differs, is missing, or has NaN, another shape or dtype.
    """
    for what, name in (("outputs", "output"), ("grads", "gradient of input"),
                       ("params", "gradient of parameter")):  # fmt: skip
        values, wanted = getattr(found, what), getattr(expected, what)
        assert len(values) == len(wanted), f"{len(values)} {what}, not {len(wanted)}"
        for i, (a, b) in enumerate(zip(values, wanted, strict=True)):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{name} {i} is {a.dtype}{[*a.shape]}"
            assert a.isfinite().all() or not b.isfinite().all(), f"{name} {i} is not finite"
            error = difference([a], [b])
            assert error <= allowed, f"{name} {i} differs by {error:.3g} of its norm"


class LayerTruth:
    """The results of the reference for a neuron.

    Of a large input, only the first and last neurons are verified, without gradients of
    parameters, which are sums over all neurons.

    Args:
        exact: whether spikefuse must equal the reference's outputs bit for bit.
        training: whether gradients are compared.
    """

    def __init__(
        self, neuron: sf.Neuron, inputs: Inputs, exact: bool = True, training: bool = True
    ) -> None:
        self.exact, x = exact, inputs.xs[0]
        self.dim = 1 if x.shape[1] > 1 else x.ndim - 1
        size = x.shape[self.dim]
        half = max(1, VERIFIED_ELEMENTS[x.device.type] * size // x.numel() // 2)
        self.ends = [(0, half), (size - half, half)] if 2 * half < size else [(0, size)]
        verified = Inputs(
            tuple(self.select(x).requires_grad_() for x in inputs.xs),
            tuple(map(self.select, inputs.grads)),
        )

        def loop(*xs: Tensor) -> Tensors:
            return reference.scan(neuron, xs)[0]

        params = tuple(neuron.parameters()) if len(self.ends) == 1 else ()
        self.expected = train(loop, verified, params) if training else infer(loop, verified)

    def select(self, x: Tensor) -> Tensor:
        """Return a copy of the verified neurons."""
        return torch.cat([x.detach().narrow(self.dim, *end) for end in self.ends], self.dim)

    def verify(self, contender: Contender, result: LayerResult) -> None:
        """Compare with the reference; spikefuse and the eager loop must have its very spikes.

        Raises:
            AssertionError: the result is wrong.
        """
        outputs, grads = (tuple(map(self.select, ts)) for ts in (result.outputs, result.grads))
        params = result.params if len(self.ends) == 1 else ()
        compare(LayerResult(outputs, grads, params), self.expected)
        if self.exact and contender.name.partition(",")[0] in (OURS, LOOP):
            for y, wanted in zip(outputs, self.expected.outputs, strict=True):
                assert torch.equal(y, wanted), "spikes differ from the reference's"
