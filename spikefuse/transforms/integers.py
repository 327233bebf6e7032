"""The integers of a quantized network, for devices that compute with integers only."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from spikefuse._torch import user_hooks
from spikefuse.graph.nodes import name_of
from spikefuse.neurons.checks import integer
from spikefuse.neurons.if_ import IF
from spikefuse.neurons.lif import LIF
from spikefuse.nn.temporal import Temporal
from spikefuse.transforms.ann_graph import traced
from spikefuse.transforms.quantize import FixedPoint

#: The kind of a layer, its attributes and integers.
Layer = dict[str, Any]
#: What a layer returns: integers times a step, and their largest value.
Values = tuple[float, float]
LAYERS = (nn.Linear, nn.Conv2d, nn.AvgPool2d, nn.MaxPool2d, nn.Flatten, LIF, IF)
SKIPPED = (nn.Dropout, nn.Identity)


@torch.no_grad()
def to_integers(net: Temporal, step: float = 1.0, bits: int = 8) -> list[Layer]:
    """Return the layers of a network from `sf.quantize` as integers.

    Integer arithmetic with them gives each spike of the network as a CPU simulates it: steps are
    powers of two, and sums of float32 are exact below 2^24 units, which is checked for the largest
    inputs. A layer is a dict with its `name`, its `kind`, the `step` that is one unit of its
    output y, attributes of the layer of `torch.nn`, such as `stride`, and by kind:

    - "Linear", "Conv2d": `y = gain * product + bias`, with the product of `weight` (int8) and the
      input; `gain` and `bias` have a value for each channel;
    - "AvgPool2d": y is the sum over a window; "MaxPool2d", "Flatten": as in `torch.nn`;
    - "LIF", "IF", with a single decay, threshold and v_reset, none per channel or neuron: y is the
      spike s, from the input x and a state v, which is 0 at first::

          h = decay * v + gain * x
          s = 1 if h >= threshold else 0
          h = h - threshold * s if soft else (reset if s else h)
          v = clip((h + half) >> shift, low, high)

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(64, 32), sf.LIF(0.9), nn.Linear(32, 10)))
        x = torch.randint(256, (8, 100, 64)) / 256
        layers = sf.to_integers(sf.quantize(net, x), step=1 / 256)  # three dicts

    Args:
        net: a chain of these layers and `nn.Dropout`, averages over 2, 4, 8, ... values.
        step: inputs are integers times `step`, a power of two.
        bits: of these integers at most, without the sign.

    Raises:
        TypeError: `net` is not a `Temporal`.
        ValueError: `step` is not a power of two, torch.fx cannot trace the network, or a layer is
            none of these, has hooks, is not quantized, has a parameter of several values, or may
            have sums of 2^24 units. The error names it.
    """
    if not isinstance(net, Temporal):
        raise TypeError(f"net is {net!r}: expected a spikefuse.Temporal")
    if not (step > 0 and math.frexp(step)[0] == 0.5):
        raise ValueError(f"step is {step!r}: expected a power of two, such as 1 / 256")
    bits = integer("bits", bits)
    for name, part in net.named_modules():
        if user_hooks(part):
            where = f"'{name}' ({type(part).__name__})" if name else "the network"
            raise ValueError(f"{where} has hooks, which integer layers cannot express: remove them")
    graph, values = traced(net.net), (step, 2.0**bits)
    layers, before = list[Layer](), None
    for node in graph.graph.nodes:
        is_module = node.op == "call_module"
        name = f"net.{node.target if is_module else node.name}"
        if before is not None and node.all_input_nodes != [before]:
            raise ValueError(f"'{name}' does not read the layer before it only: expected a chain")
        module: Any = graph.get_submodule(str(node.target)) if is_module else None
        if not is_module and name_of(node) == "flatten":
            dims = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
            module = nn.Flatten(dims.get("start_dim", 0), dims.get("end_dim", -1))
        if node.op.startswith("call") and not isinstance(module, SKIPPED):
            try:
                layer, values = _layer(module, values)
            except ValueError as error:
                raise ValueError(f"'{name}' ({type(module).__name__}): {error}") from None
            layers.append({"name": name, **layer, "step": values[0]})
        before = node
    return layers


def _layer(module: Any, x: Values) -> tuple[Layer, Values]:
    """The integers of a layer."""
    kind = next((kind for kind in LAYERS if isinstance(module, kind)), None)
    is_other = kind in (LIF, IF) and type(module) is not kind
    if kind is None or is_other or type(module).forward is not kind.forward:
        raise ValueError(f"expected {', '.join(kind.__name__ for kind in LAYERS)}")
    layer = {name: getattr(module, name) for name in getattr(module, "__constants__", ())}
    layer["kind"], (step, largest) = kind.__name__, x
    if kind in (nn.Linear, nn.Conv2d):
        numbers, x = _product(module, step, largest)
        layer |= numbers
    elif kind in (LIF, IF):
        layer |= _neuron(module, step, largest)
        x = (1.0, 1.0)
    elif kind is nn.AvgPool2d:
        area = math.prod(torch.broadcast_to(torch.tensor(module.kernel_size), (2,)).tolist())
        is_padded = module.padding not in (0, (0, 0)) and not module.count_include_pad
        if area & (area - 1) or module.divisor_override or module.ceil_mode or is_padded:
            raise ValueError("expected averages that divide by a power of two")
        x = _exact(step / area, largest * area)
    return layer, x


def _product(layer: Any, step: float, largest: float) -> tuple[Layer, Values]:
    """The integers of a linear layer or convolution, and its sums."""
    steps = []
    for name in ("weight",) if layer.bias is None else ("weight", "bias"):
        quantizer = layer.parametrizations[name][-1] if is_parametrized(layer, name) else None
        if not isinstance(quantizer, FixedPoint):
            raise ValueError("it is not quantized: call sf.quantize(net, x) first")
        steps.append(quantizer.step.double())
    unit = min(step * steps[0].min().item(), steps[-1].min().item())
    shape = (-1, *[1] * (layer.weight.ndim - 2))
    weight, gain = layer.weight / steps[0].view(*shape, 1), step * steps[0] / unit
    bias = torch.zeros_like(gain) if layer.bias is None else layer.bias / unit
    sums = weight.abs().flatten(1).sum(1) * gain * largest + bias.abs()
    tensors = {"weight": weight.to(torch.int8), "gain": gain.long().view(shape)}
    tensors["bias"] = bias.long().view(shape)
    numbers = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    return numbers, _exact(unit, sums.max().item())


def _neuron(neuron: Any, step: float, largest: float) -> Layer:
    """The integers of a LIF or IF neuron."""
    tensors = {name: torch.as_tensor(value) for name, value in neuron.values().items()}
    for name, tensor in tensors.items():
        if tensor.numel() > 1:
            mean = tensor.mean().item()
            raise ValueError(
                f"its {name} has {tensor.numel()} values, expected a single one: construct it "
                f"with one, such as {type(neuron).__name__}({name}={mean:.3g}), train, and call "
                "sf.quantize(net, x)"
            )
    if not neuron.state_bits:
        raise ValueError("its states are not quantized: expected states of sf.quantize(net, x)")
    value = {"decay": 1.0, **{name: tensor.item() for name, tensor in tensors.items()}}
    v_step, decay, threshold = value["v_step"], value["decay"], value["threshold"]
    if math.frexp(v_step)[0] != 0.5:
        raise ValueError(f"v_step is {v_step}: expected a power of two")
    factor = 1 - decay if getattr(neuron, "decay_input", False) else 1.0
    soft, limit = neuron.reset == "soft", 2 ** (neuron.state_bits - 1)
    unit = min(step * _last_bit(factor), _last_bit(v_step) * _last_bit(decay))
    unit = min(unit, _last_bit(threshold)) if soft else unit
    shift, gain = int(v_step / unit), int(factor * step / unit)
    # 1/2 is added before rounding.
    _exact(unit, decay * shift * limit + gain * largest + shift)
    return {
        "decay": int(decay * shift),
        "gain": gain,
        "threshold": math.ceil(threshold / unit),
        "soft": soft,
        "reset": min(max(math.floor(value["v_reset"] / v_step + 0.5), -limit), limit - 1) * shift,
        "half": shift // 2,
        "shift": shift.bit_length() - 1,
        "low": -limit,
        "high": limit - 1,
    }


def _exact(step: float, largest: float) -> Values:
    """Return the values, after a check that float32 holds their sums exactly."""
    if largest >= 2**24:
        raise ValueError(
            f"its sums of up to {largest:.0f} units may be rounded in float32: expected fewer "
            "inputs, or fewer bits of inputs, weights or states"
        )
    return step, largest


def _last_bit(value: float) -> float:
    """The largest power of two of which a value is a multiple, at most 1."""
    return 1 / value.as_integer_ratio()[1]
