"""Round weights and states to few bits while a network trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from spikefuse._torch import children_of
from spikefuse.kernels.norm import BatchNorm
from spikefuse.neurons.checks import is_integer
from spikefuse.neurons.definition import Neuron
from spikefuse.neurons.description import owners
from spikefuse.neurons.fixed_point import fixed_point
from spikefuse.neurons.learnable import Learnable
from spikefuse.neurons.surrogate import Surrogate
from spikefuse.nn.call import Observer, Scan, observing
from spikefuse.nn.recurrent import Recurrent
from spikefuse.nn.temporal import Temporal
from spikefuse.transforms.ann_graph import fold_norms, traced
from spikefuse.transforms.copies import copied

#: Layers whose weights are quantized; dim 0 is that of their outputs.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Recurrent)


@torch.no_grad()
def quantize(net: Temporal, x: Tensor, weights: int | None = 8, states: int | None = 8) -> Temporal:
    """Return a copy of a trained network whose weights and states are numbers of few bits.

    Train the copy for some more epochs (quantization-aware training). It computes in float32 with
    rounded values, through whose rounding gradients pass, except where a value saturates.

    - Weights are integers from -m to m, m = 2^(weights - 1) - 1, times a step for each output of
      the layer, of at least 1/256 of its largest one: with 2 bits, they are ternary. Biases have 24
      bits, of 2^(weights - 8) times that step, or of a larger one that holds them. Batch norms are
      folded into the layer in front of them.
    - States are rounded at the end of each time step to signed integers, which saturate, times one
      step for each state of a neuron.
    - Parameters of neurons are rounded to 8 significant bits, and no longer learned. A decay above
      0.998 becomes 1.

    Steps are powers of two: those with the least square error of the weights, and of the states
    that `x` causes, the largest one of all calls of a neuron. `sf.to_integers` returns the
    integers.

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", CVPR 2018; Venkatesh et al., "SQUAT: Stateful
    Quantization-Aware Training in Recurrent Spiking Neural Networks", NICE 2024 (states).

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(64, 32), sf.LIF(0.9), nn.Linear(32, 10)))
        quantized = sf.quantize(net, torch.rand(8, 100, 64), weights=4, states=8)

    Args:
        net: a trained network. It remains as it is.
        x: examples `[T, B, ...]`.
        weights: bits of weights, from 2 to 8; None to leave them and the norms as they are.
        states: bits of states, from 2 to 16; None to leave neurons as they are.

    Raises:
        TypeError: `net` is not a `Temporal`.
        ValueError: bits are out of range, a neuron is not called, torch.fx cannot trace a network
            with norms, a layer with parameters cannot be quantized, or is quantized already, or a
            neuron whose states are quantized has parametrizations.
    """
    if not isinstance(net, Temporal):
        raise TypeError(f"net is {net!r}: expected a spikefuse.Temporal")
    for name, bits, most in (("weights", weights, 8), ("states", states, 16)):
        if bits is not None and not (is_integer(bits, 2) and bits <= most):
            raise ValueError(f"{name} is {bits!r}: expected bits from 2 to {most}, or None")
    modes = {name: module.training for name, module in net.named_modules()}
    result: Any = copied(net).eval()
    if weights is not None:
        if any(isinstance(module, BatchNorm) for module in result.modules()):
            _fold(result, x)
        _quantize_weights(result, weights)
    if states is not None:
        _quantize_states(result, x, states)
    for name, module in result.named_modules():
        module.training = modes.get(name, net.training)
    return result


class FixedPoint(nn.Module):
    """Round a parameter to multiples of a step for each row, a parametrization."""

    def __init__(self, step: Tensor, bits: int) -> None:
        super().__init__()
        self.step, self.most = nn.Buffer(step), 2 ** (bits - 1) - 1

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)  # half precision would overflow
        step = _by_row(self.step.to(dtype), x)
        return fixed_point(x.to(dtype), step, -self.most, self.most).to(x.dtype)


class Int8(nn.Module):
    """Multiply integers by a step for each row, a parametrization; DequantizeLinear in ONNX."""

    def __init__(self, step: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.step, self.dtype = nn.Buffer(step), dtype

    def forward(self, x: Tensor) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            options: dict[str, Any] = {"attrs": {"axis": 0}, "shape": x.shape}
            options["dtype"] = self.step.dtype
            y = torch.onnx.ops.symbolic("DequantizeLinear", (x, self.step), **options)
        else:
            y = x * _by_row(self.step, x)
        return y.to(self.dtype)


@torch.no_grad()
def store_integers(net: nn.Module) -> None:
    """Store quantized weights as int8, and quantized biases as plain numbers, in place."""
    layers: list[Any] = [layer for layer in net.modules() if is_parametrized(layer)]
    for layer in layers:
        for name, chain in layer.parametrizations.items():
            if not isinstance(chain[0], FixedPoint):
                continue
            value, step = getattr(layer, name), chain[0].step
            chain[0] = nn.Identity()
            if name == "weight":
                chain[0] = Int8(step, value.dtype)
                value = (value / _by_row(step, value)).to(torch.int8)
            chain.original = nn.Parameter(value, requires_grad=False)


def _by_row(step: Tensor, x: Tensor) -> Tensor:
    """Return the steps of the rows of `x`, which broadcast."""
    return step.view(-1, *[1] * (x.ndim - 1))


def _fold(net: Temporal, x: Tensor) -> None:
    """Fold the batch norms of a network into the layers in front of them."""
    dims: dict[nn.Module, int] = {}
    linear = [module for module in net.modules() if isinstance(module, nn.Linear)]
    hooks = [m.register_forward_hook(lambda m, _, y: dims.update({m: y.ndim})) for m in linear]
    net(x[:1], impl="reference")
    for hook in hooks:
        hook.remove()
    graph = traced(net.net)
    calls = {n: str(n.target) for n in graph.graph.find_nodes(op="call_module")}
    called = {graph.get_submodule(target): target for target in calls.values()}
    fold_norms(graph, {n: dims.get(graph.get_submodule(calls[n]), 0) for n in calls})
    remaining = {n.target for n in graph.graph.find_nodes(op="call_module")}
    for name, module in [*net.net.named_modules(remove_duplicate=False)]:  # all names of a module
        target = called.get(module)
        if isinstance(module, LAYERS) and target in remaining:
            net.net.set_submodule(name, graph.get_submodule(str(target)))
        elif isinstance(module, BatchNorm) and target is not None and target not in remaining:
            net.net.set_submodule(name, nn.Identity())


def _quantize_weights(net: Temporal, bits: int) -> None:
    neurons = {part for neuron in _neurons(net).values() for part in neuron.modules()}
    for name, layer in [*net.named_modules()]:
        if isinstance(layer, LAYERS):
            own = dict(layer.named_parameters(recurse=False))
            if is_parametrized(layer) or "weight" not in own:  # hooks compute it
                raise ValueError(
                    f"'{name}' has parametrizations, from sf.quantize or such as weight_norm: "
                    "expected a network whose weights are parameters"
                )
            step = best_step(layer.weight.flatten(1).float(), bits)
            # The steps of outputs with tiny weights would demand sums of many bits.
            step = _or(2.0 ** (1 - bits), step.maximum(step.amax() / 256))
            register_parametrization(layer, "weight", FixedPoint(step, bits))
            if layer.bias is not None:
                step = step if step.shape == layer.bias.shape else step.amin().expand_as(layer.bias)
                least = _power_of_two(layer.bias.abs().float() / (2**23 - 1))
                step = torch.maximum(step * 2.0 ** (bits - 8), least)
                register_parametrization(layer, "bias", FixedPoint(step, 24))
        elif layer in neurons or isinstance(layer, Surrogate | Learnable):
            continue
        elif isinstance(layer, BatchNorm) or [*layer.parameters(recurse=False)]:
            raise ValueError(
                f"'{name}' is a {type(layer).__name__}, which cannot be quantized: expected "
                f"{', '.join(kind.__name__ for kind in LAYERS)}, a batch norm right behind one, "
                "both without hooks, or a neuron"
            )


def _neurons(net: nn.Module) -> dict[str, Neuron]:
    return {name: m for name, m in net.named_modules() if isinstance(m, Neuron)}


class _StateSteps(Observer):
    """Chooses the steps of the states of each neuron that runs: the largest of its calls."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.steps: dict[nn.Module, list[Tensor]] = {}

    def scan(self, neuron: Any, scan: Scan, arguments: Any, wanted: Any) -> Any:
        if names := tuple(neuron.states):
            # In a scan of its own, since that of the call would have to name all outputs, too, and
            # how many a step returns is not known before.
            states = scan(arguments, wanted._replace(outputs=names)).outputs
            steps = [best_step(state.float().reshape(1, -1), self.bits)[0] for state in states]
            self.steps[neuron] = [*map(torch.maximum, steps, self.steps.get(neuron, steps))]
        return super().scan(neuron, scan, arguments, wanted)


def _quantize_states(net: Temporal, x: Tensor, bits: int) -> None:
    neurons = {name: neuron for name, neuron in _neurons(net).items() if neuron.states}
    for name, neuron in neurons.items():
        if any(map(is_parametrized, neuron.modules())):
            raise ValueError(
                f"'{name}' has parametrizations, whose values cannot be rounded: call "
                "torch.nn.utils.parametrize.remove_parametrizations, or pass states=None"
            )
        _round_parameters(neuron)
        neuron.state_bits = 0
    observer = _StateSteps(bits)
    with observing(observer):
        net(x, impl="reference")  # compiles nothing
    for name, neuron in neurons.items():
        if neuron not in observer.steps:
            raise ValueError(
                f"'{name}' is not called, or by an EventLinear, so that the range of its states is "
                "unknown: remove it, or pass states=None and set state_bits and v_step yourself"
            )
        for state, step in zip(neuron.states, observer.steps[neuron], strict=True):
            setattr(neuron, f"{state}_step", _or(1.0, step))
        neuron.state_bits = bits


def _round_parameters(neuron: Neuron) -> None:
    """Round the parameters of a neuron, except for those of its surrogate."""
    for part in [part for _, part in owners(neuron) if not isinstance(part, Surrogate)]:
        for name, value in [*children_of(part).items(), *vars(part).items()]:
            if isinstance(value, Learnable):
                setattr(part, name, nn.Parameter(value().clone()))
            elif isinstance(value, float):
                setattr(part, name, _rounded(torch.tensor(value)).item())
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            tensor.requires_grad_(False).copy_(_rounded(tensor.float()))


def _rounded(value: Tensor) -> Tensor:
    """Round to 8 significant bits, except for infinity."""
    unit = _power_of_two(value.abs()) / 256
    return torch.where(unit > 0, (value / unit).round() * unit, value)


def _power_of_two(value: Tensor) -> Tensor:
    """The least power of two above a positive value, exactly; 0 for 0."""
    return torch.where(value > 0, value / torch.frexp(value).mantissa, 0.0)


def _or(default: float, step: Tensor) -> Tensor:
    """A step, or a default where all values were 0."""
    return torch.where(step > 0, step, default)


def best_step(rows: Tensor, bits: int) -> Tensor:
    """Return for each row `[R, N]` the power of two whose multiples, by integers of `bits` bits,
    are closest to the values by their square error; 0 for a row of zeros."""
    most = 2 ** (bits - 1) - 1
    best = step = _power_of_two(rows.abs().amax(1) / most)
    least = torch.full_like(best, torch.inf)
    for _ in range(8):
        unit = _or(1.0, step).unsqueeze(1)
        error = ((rows / unit).round().clamp(-most, most) * unit - rows).square().sum(1)
        best, least = torch.where(error < least, step, best), torch.minimum(error, least)
        step = step / 2
    return best
