"""Networks of integers in NumPy give each spike of the simulated ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor, nn

import spikefuse as sf

Array = np.ndarray


def windows(x: Array, size: Any, stride: Any, padding: Any, value: int = 0) -> Array:
    (rows, columns), (down, right) = np.broadcast_to(padding, 2), np.broadcast_to(stride, 2)
    edges = ((0, 0), (0, 0), (rows, rows), (columns, columns))
    x = np.pad(x, edges, constant_values=value)
    size = tuple(np.broadcast_to(size, 2))
    return sliding_window_view(x, size, (2, 3))[:, :, ::down, ::right]


def run(layers: list[dict[str, Any]], x: Array, states: dict[str, Array]) -> dict[str, Array]:
    """One time step: the output of each layer by name, in integers only."""
    outputs = {}
    for layer in layers:
        assert np.issubdtype(x.dtype, np.integer)
        name, kind = layer["name"], layer["kind"]
        if kind == "Linear":
            x = layer["gain"] * (x @ layer["weight"].T.astype(int)) + layer["bias"]
        elif kind == "Conv2d":
            weight = layer["weight"].astype(int)
            seen = windows(x, weight.shape[2:], layer["stride"], layer["padding"])
            y = np.einsum("bchwij,ocij->bohw", seen, weight, optimize=True)
            x = layer["gain"] * y + layer["bias"]
        elif kind in ("AvgPool2d", "MaxPool2d"):
            is_sum = kind == "AvgPool2d"
            least = 0 if is_sum else np.iinfo(int).min
            seen = windows(x, layer["kernel_size"], layer["stride"], layer["padding"], least)
            x = seen.sum((4, 5)) if is_sum else seen.max((4, 5))
        elif kind == "Flatten":
            x = x.reshape(len(x), -1)
        else:
            h = layer["decay"] * states.get(name, 0) + layer["gain"] * x
            x = (h >= layer["threshold"]).astype(int)
            h = h - layer["threshold"] * x if layer["soft"] else np.where(x, layer["reset"], h)
            v = (h + layer["half"]) >> layer["shift"]
            states[name] = np.clip(v, layer["low"], layer["high"])
        outputs[name] = x
    return outputs


class Net(nn.Module):
    """Convolutions, poolings and neurons with all options that become integers."""

    def __init__(self, reset: Any) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.lif, self.pool = sf.LIF(0.9, 0.3, reset=reset, v_reset=-0.05), nn.AvgPool2d(2)
        self.conv, self.max = nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.MaxPool2d(2, 1, 1)
        self.second, self.drop = sf.IF(0.2, reset=reset), nn.Dropout(0.1)
        self.hidden, self.norm = nn.Linear(72, 16), nn.BatchNorm1d(16)
        self.third = sf.LIF(0.5, 0.1, decay_input=True, reset=reset)
        self.out = nn.Linear(16, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.lif(self.first(x)))
        x = self.drop(self.second(self.max(self.conv(x))))
        y: Tensor = self.out(self.third(self.norm(self.hidden(x.flatten(1)))))
        return y


@torch.no_grad()
@pytest.mark.parametrize(
    ("reset", "weights", "states", "impl"),
    [("hard", 8, 8, "auto"), ("soft", 4, 6, "reference"), ("soft", 2, 10, "reference")],
)
def test_every_spike(reset: str, weights: int, states: int, impl: str) -> None:
    torch.manual_seed(0)
    images = sf.data.load("digits")[0].pixels[:1000]
    net, x = sf.Temporal(Net(reset)), sf.nn.encode.direct(images / 256, 4)
    net(x, impl="reference")  # running statistics
    quantized = sf.quantize(net.eval(), x[:, :200], weights, states)
    layers = sf.to_integers(quantized, step=1 / 256)
    held: dict[str, Array] = {}
    steps = [run(layers, images.long().numpy(), held) for _ in range(4)]
    with sf.record(quantized) as record:
        y = quantized(x, impl=impl)
    for name in ("net.lif", "net.second", "net.third"):
        spikes = np.stack([step[name] for step in steps])
        assert 0.01 < spikes.mean() < 0.9
        assert np.array_equal(spikes, record[name]["spikes"].numpy())
    logits = np.stack([step["net.out"] for step in steps]) * layers[-1]["step"]
    assert np.array_equal(logits, y.numpy())


def test_numbers_by_hand() -> None:
    layer, neuron = nn.Linear(1, 1), sf.LIF(0.75, 1.25, v_reset=0.5)
    with torch.no_grad():
        layer.weight.fill_(127 / 64)
        layer.bias.fill_(3 / 64)
    net: Any = sf.quantize(sf.Temporal(nn.Sequential(layer, neuron)), torch.ones(1, 1, 1))
    net.net[1].v_step = torch.tensor(0.125)
    first, second = sf.to_integers(net, step=0.5)
    assert first["weight"].tolist() == [[127]]
    assert first["weight"].dtype == np.int8
    assert (first["gain"].tolist(), first["bias"].tolist(), first["step"]) == ([1], [6], 1 / 128)
    # The unit is 1/128: the decay is 3/4 of a step of 16 units.
    numbers = {"decay": 12, "gain": 1, "threshold": 160, "soft": False, "reset": 64, "half": 8}
    limits = {"shift": 4, "low": -128, "high": 127, "step": 1}
    assert second == {"name": "net.1", "kind": "LIF", **numbers, **limits}
    net.net[1].v_step = torch.tensor(0.1875)
    with pytest.raises(ValueError, match=r"'net.1' \(LIF\): v_step is 0.1875: expected a power of"):
        sf.to_integers(net, step=0.5)
    net.net[1].v_step = torch.tensor(0.5**24)
    with pytest.raises(ValueError, match=r"'net.1' \(LIF\): its sums of up to"):
        sf.to_integers(net, step=0.5)


def test_refusals() -> None:
    def refused(*layers: nn.Module, match: str, bits: int = 8) -> None:
        net = sf.Temporal(nn.Sequential(*layers))
        x = torch.rand(2, 3, 2, 8, 8) if isinstance(layers[0], nn.Conv2d) else torch.rand(2, 3, 4)
        net = sf.quantize(net, x)
        with pytest.raises(ValueError, match=match):
            sf.to_integers(net, 1 / 256, bits)

    conv = nn.Conv2d(2, 2, 3)
    refused(nn.Linear(4, 4), sf.ALIF(), match=r"'net.1' \(ALIF\): expected Linear")
    refused(nn.Linear(4, 4), nn.ReLU(), match=r"'net.1' \(ReLU\): expected")
    refused(Centered(4, 4), match=r"'net.0' \(ParametrizedCentered\): expected")
    refused(conv, nn.AvgPool2d(3), match=r"'net.1' \(AvgPool2d\): .*divide by a power of two")
    refused(nn.Linear(4, 4), match=r"'net.0' \(ParametrizedLinear\): its sums of up to", bits=16)
    for several in (torch.full((4,), 0.75), nn.Parameter(torch.full((4,), 0.75))):
        for name in ("decay", "threshold"):
            neuron: Any = sf.LIF(**{name: several})
            what = rf"its {name} has 4 values, .* such as LIF\({name}=0.75\), train"
            refused(nn.Linear(4, 4), neuron, match=rf"'net.1' \(LIF\): {what}")

    net: Any = sf.Temporal(nn.Sequential(nn.Linear(4, 4), sf.LIF()))
    with pytest.raises(
        ValueError, match=r"'net.0' \(Linear\): it is not quantized: call sf.quantize"
    ):
        sf.to_integers(net)
    with pytest.raises(ValueError, match=r"'net.1' \(LIF\): .*states of sf.quantize"):
        sf.to_integers(sf.quantize(net, torch.rand(2, 3, 4), states=None))
    hooked = sf.quantize(net, torch.rand(2, 3, 4))
    handle = hooked.register_forward_hook(lambda module, x, y: 2 * y)
    with pytest.raises(ValueError, match="the network has hooks, which integer layers cannot"):
        sf.to_integers(hooked, 1 / 256)
    handle.remove()
    hooked.net[0].register_forward_hook(lambda module, x, y: 2 * y)
    with pytest.raises(ValueError, match=r"'net.0' \(ParametrizedLinear\) has hooks, which"):
        sf.to_integers(hooked, 1 / 256)
    with pytest.raises(ValueError, match=r"step is 0\.3: expected a power of two"):
        sf.to_integers(net, step=0.3)
    with pytest.raises(ValueError, match="bits is 0: expected an integer of at least 1"):
        sf.to_integers(net, bits=0)
    with pytest.raises(TypeError, match=r"expected a spikefuse\.Temporal"):
        sf.to_integers(net.net)
    with pytest.raises(ValueError, match="expected a chain"):
        sf.to_integers(sf.Temporal(Sum()))


@pytest.mark.parametrize(
    ("flatten", "expected"),
    [
        (lambda x: x.flatten(2), (2, -1)),
        (lambda x: torch.flatten(x, start_dim=1, end_dim=2), (1, 2)),
        (lambda x: torch.flatten(x, 1), (1, -1)),
    ],
)
def test_dims_of_flatten(flatten: Any, expected: tuple[int, int]) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)

        def forward(self, x: Tensor) -> Any:
            return flatten(self.conv(x))

    net = sf.quantize(sf.Temporal(Flat()), torch.rand(2, 3, 1, 4, 4))
    layer = sf.to_integers(net, 1 / 16, 4)[1]
    assert (layer["start_dim"], layer["end_dim"]) == expected


class Centered(nn.Linear):
    """Computes with other weights than it has."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight - self.weight.mean(), self.bias)


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.flatten(1)
