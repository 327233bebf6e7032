"""One layer of neurons, forward and backward: its inputs, the contenders, and their verification.

The LIF neuron is from "Towards Scalable GPU-Accelerated SNN Training via Temporal Fusion".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks.record import l2_bytes
from benchmarks.runner import Contender, first_line
from spikefuse import reference
from spikefuse.testing import within_budget

Tensors = tuple[Tensor, ...]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DECAY, THRESHOLD, WIDTH = 0.2, 0.3, 4.0

OURS, LOOP = "spikefuse", "eager loop"
COMPILED = "torch.compile"
JELLY_NODE, JELLY_FUNCTION = "SpikingJelly node", "SpikingJelly function"
FLEX = "SpikingJelly FlexSN"

# The largest number of elements to verify; of larger inputs, the first and last neurons.
VERIFIED_ELEMENTS = {"cuda": 1 << 27, "cpu": 1 << 22}


def lif(threshold: float = THRESHOLD) -> sf.LIF:
    return sf.LIF(decay=DECAY, threshold=threshold, surrogate=sf.surrogate.Sigmoid(WIDTH))


class Gated(sf.Neuron):
    """A user-defined neuron with an adaptive threshold and a gate between hard and soft reset::

        h = decay * v + x,   theta = threshold + beta * a,   s = 1 if h >= theta else 0
        v = h - s * (g * h + (1 - g) * theta)   with   g = sigmoid(gate)
        a = rho * a + s

    The outputs are the spike and the potential before reset.
    """

    v, a = sf.State(), sf.State()

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.rho, self.beta, self.threshold = 0.9, 0.97, 0.18, 1.0
        self.surrogate = sf.surrogate.Sigmoid(WIDTH)

    def step(self, x, gate, v, a):
        h = self.decay * v + x
        theta = self.threshold + self.beta * a
        s = self.surrogate(h - theta)
        g = torch.sigmoid(gate)
        return (s, h), (h - s * (g * h + (1 - g) * theta), self.rho * a + s)


class Inputs:
    """Sets of (inputs, gradients of the outputs), `[T, B, ...]`, that runs use in turn.

    On a GPU there are so many sets that each has left the L2 cache before its next use. There are
    `ports` inputs, uniform in `[0, high)`, and as many outputs.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        ports: int = 1,
        high: float = 1.0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(shape[0])

        def draw() -> tuple[Tensors, Tensors]:
            options: dict[str, Any] = {"generator": generator, "device": device}
            xs = [torch.rand(shape, **options) * high for _ in range(ports)]
            grads = [torch.randn(shape, **options) for _ in range(ports)]
            return tuple(x.to(dtype).requires_grad_() for x in xs), tuple(
                g.to(dtype) for g in grads
            )

        self.sets = [draw()]
        count = min(max(1, -(-2 * l2_bytes(device) // self.num_bytes)), 32)
        self.sets += [draw() for _ in range(count - 1)]
        self.index = 0

    @property
    def like(self) -> Tensor:
        return self.sets[0][0][0]

    @property
    def num_bytes(self) -> int:
        """Bytes of one set."""
        return sum(t.nbytes for group in self.sets[0] for t in group)

    def bytes_to_move(self, training: bool = True) -> int:
        """Return the bytes that must be read and written.

        Forward reads the inputs and writes the outputs; backward reads the inputs and the
        gradients of the outputs, and writes the gradients of the inputs.
        """
        inputs, outputs = (len(group) for group in self.sets[0])
        forward, backward = inputs + outputs, 2 * inputs + outputs
        return (forward + (backward if training else 0)) * self.like.nbytes

    def next(self) -> tuple[Tensors, Tensors]:
        self.index = (self.index + 1) % len(self.sets)
        return self.sets[self.index]

    def prepare(self) -> None:
        """Make the next run use the first set, and fill free memory with NaN."""
        self.index = -1
        count = 1 + sum(len(group) for group in self.sets[0])
        poison = [torch.full_like(self.like, float("nan")) for _ in range(count)]
        del poison

    def in_layout(self, memory_format: torch.memory_format) -> Inputs:
        """Return the same values `[T, B, C, H, W]` with each step in `memory_format`."""

        def convert(t: Tensor) -> Tensor:
            steps = t.detach().flatten(0, 1).contiguous(memory_format=memory_format)
            return steps.unflatten(0, t.shape[:2])

        converted = object.__new__(Inputs)
        converted.index = 0
        converted.sets = [
            (tuple(convert(x).requires_grad_() for x in xs), tuple(convert(g) for g in grads))
            for xs, grads in self.sets
        ]
        return converted


@dataclass
class LayerResult:
    """Outputs, gradients of the inputs, and gradients of the learnable parameters."""

    outputs: Tensors
    grads: Tensors = ()
    params: Tensors = ()


# Contenders


def trained(
    name: str,
    layer: Callable[..., Tensor | Tensors],
    inputs: Inputs,
    params: Sequence[Tensor] = (),
) -> Contender:
    """Return forward and backward of `layer` for given gradients of its outputs."""

    def run() -> LayerResult:
        xs, grads = inputs.next()
        outputs = _tuple(layer(*xs))
        found = torch.autograd.grad(outputs, (*xs, *params), grads)
        outputs = tuple(y.detach() for y in outputs)
        return LayerResult(outputs, found[: len(xs)], found[len(xs) :])

    return Contender(name, run)


def inference(name: str, layer: Callable[..., Tensor | Tensors], inputs: Inputs) -> Contender:
    """Return forward of `layer` without gradients."""

    def run() -> LayerResult:
        with torch.no_grad():
            return LayerResult(_tuple(layer(*inputs.next()[0])))

    return Contender(name, run)


def ours(neuron: sf.Neuron, inputs: Inputs, name: str = OURS) -> Contender:
    return trained(name, neuron, inputs, tuple(neuron.parameters()))


def eager_loop(neuron: sf.Neuron, inputs: Inputs) -> Contender:
    def loop(*xs: Tensor) -> Any:
        return neuron(*xs, impl="reference")

    return trained(LOOP, loop, inputs, tuple(neuron.parameters()))


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


def hand_written(x: Tensor) -> Tensor:
    """Compute LIF spikes by a loop over time as users write it."""
    v, spikes = torch.zeros_like(x[0], dtype=torch.float32), []
    for current in x.unbind(0):
        h = DECAY * v + current
        s = Spike.apply(h - THRESHOLD)
        v = h * (1 - s)
        spikes.append(s.to(x.dtype))
    return torch.stack(spikes)


def compiled(inputs: Inputs) -> Contender:
    """Return torch.compile of the hand-written loop."""
    (x,), grads = inputs.sets[0]
    torch.compiler.reset()
    function = torch.compile(hand_written, fullgraph=True, dynamic=False)
    try:
        torch.autograd.grad(function(x), x, grads)
    except Exception as error:
        return Contender(COMPILED, unavailable=first_line(error))
    return trained(COMPILED, function, inputs)


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
    x = inputs.like
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


def flex(neuron: Gated, inputs: Inputs) -> Contender:
    """Return SpikingJelly's FlexSN of the same step, which generates Triton kernels on a GPU."""
    try:
        modules, surrogate = spikingjelly("neuron", "surrogate")
        fire = surrogate.Sigmoid.spiking_function
        decay, rho, beta, threshold = neuron.decay, neuron.rho, neuron.beta, neuron.threshold

        def core(x: Tensor, gate: Tensor, v: Tensor, a: Tensor) -> Tensors:
            h = decay * v + x
            theta = threshold + beta * a
            s = fire(h - theta, WIDTH)
            g = torch.sigmoid(gate)
            return s, h, h - s * (g * h + (1 - g) * theta), rho * a + s

        node = modules.FlexSN(core, num_states=2)
    except Exception as error:
        return Contender(FLEX, unavailable=first_line(error))

    def layer(x: Tensor, gate: Tensor) -> Tensors:
        outputs: Tensors = node(x, gate)
        node.reset()
        return outputs

    return trained(FLEX, layer, inputs)


def _tuple(found: Tensor | Tensors) -> Tensors:
    return (found,) if isinstance(found, Tensor) else found


# Verification


def ends(x: Tensor, dim: int) -> list[tuple[slice, ...]]:
    """Return the indices that are verified: everything, or the first and last part of `dim`."""
    size = x.shape[dim]
    half = max(1, VERIFIED_ELEMENTS[x.device.type] * size // x.numel() // 2)
    chosen = [slice(None)] if 2 * half >= size else [slice(half), slice(size - half, size)]
    return [(slice(None),) * dim + (end,) for end in chosen]


class LayerTruth:
    """Results of the reference for the first set of inputs, in the inputs' dtype and in float64.

    Neurons that spike differently in float64 are excluded from the loss: their gradients in the
    first set are set to 0, so that both results are of the same function.

    Args:
        exact: whether spikefuse must equal the reference's outputs bit for bit.
        training: whether gradients are compared.
    """

    def __init__(
        self, neuron: sf.Neuron, inputs: Inputs, exact: bool = True, training: bool = True
    ) -> None:
        self.exact, like = exact, inputs.like
        self.dim = 1 if like.shape[1] > 1 else like.ndim - 1
        self.ends = ends(like, self.dim)
        xs, grads = (tuple(self.select(t) for t in group) for group in inputs.sets[0])
        grads = grads if training else ()
        params, runs = tuple(neuron.parameters()), []
        with torch.set_grad_enabled(training):
            for dtype in (like.dtype, torch.float64):
                leaves = tuple(x.detach().to(dtype).requires_grad_() for x in xs)
                runs.append((leaves, reference.scan(neuron, leaves)[0]))
        same = _alike(runs[0][1], runs[1][1])
        self.rounded = ~same
        for g, original in zip(grads, inputs.sets[0][1], strict=False):
            g.mul_(same)
            sizes = [original[end].shape[self.dim] for end in self.ends]
            for end, part in zip(self.ends, g.split(sizes, self.dim), strict=True):
                original[end] = part
        results = []
        for leaves, outputs in runs:
            found: Tensors = ()
            if grads:
                weights = [g.to(y.dtype) for g, y in zip(grads, outputs, strict=True)]
                found = torch.autograd.grad(outputs, (*leaves, *params), weights)
            outputs = tuple(y.detach() for y in outputs)
            results.append(LayerResult(outputs, found[: len(xs)], found[len(xs) :]))
        self.expected, self.true = results

    def select(self, x: Tensor) -> Tensor:
        """Return a copy of the verified neurons."""
        return torch.cat([x.detach()[end] for end in self.ends], self.dim)

    def verify(self, contender: Contender, result: LayerResult) -> None:
        """Check a result. The reference's own error against float64 sets the tolerance.

        For an exact neuron, the outputs of spikefuse and of the eager loop must equal the
        reference's bit for bit. Other contenders may round differently, which flips spikes at the
        threshold: allowed are twice as many neurons as the reference flips, and 8. Gradients, and
        outputs that are not spikes, are compared where the spikes agree. Gradients of parameters
        are sums over all neurons, and compared only if all neurons are verified.

        Raises:
            AssertionError: the result is wrong.
        """
        outputs = self._checked(result.outputs, self.expected.outputs, "outputs")
        grads = self._checked(result.grads, self.expected.grads, "gradients")
        if self.exact and contender.name.partition(",")[0] in (OURS, LOOP):
            for y, wanted in zip(outputs, self.expected.outputs, strict=True):
                assert torch.equal(y, wanted), "spikes differ from the reference's"
        diverged = ~_alike(outputs, self.true.outputs)
        found, allowed = int(diverged.sum()), 2 * int(self.rounded.sum()) + 8
        assert found <= allowed, f"spikes differ in {found} neurons, allowed are {allowed}"
        compared = ~(diverged | self.rounded)
        share = 2.0 if self.exact else 8.0  # as in spikefuse.testing
        for name, actual, expected, true in (
            *_series("output", outputs, self.expected.outputs, self.true.outputs),
            *_series("gradient of input", grads, self.expected.grads, self.true.grads),
        ):
            a, e, t = (torch.where(compared, x, 0) for x in (actual, expected, true))
            within_budget(name, (a, e, t), share)
        if len(self.ends) > 1:
            return
        # The terms of these sums cancel, and are about as large as the gradients of the inputs.
        scale = self.true.grads[0].norm().item() if result.params else 0.0
        for name, a, e, t in _series(
            "gradient of parameter", result.params, self.expected.params, self.true.params
        ):
            within_budget(name, (a, e, t), share, scale)

    def _checked(self, found: Tensors, expected: Tensors, what: str) -> Tensors:
        assert len(found) == len(expected), f"{len(found)} {what}, not {len(expected)}"
        for x, wanted in zip(found, expected, strict=True):
            assert x.dtype == wanted.dtype, f"{what} are {x.dtype}"
            assert x.isfinite().all() or not wanted.isfinite().all(), f"{what} are not finite"
        parts = tuple(self.select(x) for x in found)
        for x, wanted in zip(parts, expected, strict=True):
            assert x.shape == wanted.shape, f"{what} have shape {list(x.shape)}"
        return parts


def _alike(outputs: Tensors, others: Tensors) -> Tensor:
    """Return the neurons `[1, B, ...]` whose outputs never differ by half a spike or more."""
    pairs = zip(outputs, others, strict=True)
    return torch.stack([((a - b).abs() < 0.5).all(0, keepdim=True) for a, b in pairs]).all(0)


def _series(what: str, *series: Tensors) -> list[tuple[Any, ...]]:
    return [(f"{what} {i}", *row) for i, row in enumerate(zip(*series, strict=True))]
