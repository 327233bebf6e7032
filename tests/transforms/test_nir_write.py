"""Networks as NIR graphs, which give the same spikes by their equations."""

from __future__ import annotations

import sys
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.nn import Block, EventLinear, Feedback
from spikefuse.transforms.converters.norse import SynapticLI
from spikefuse.transforms.nir_layers import Scale, Threshold
from tests.transforms.nir_simulation import simulate

nir = pytest.importorskip("nir", reason="nir is not installed: pip install 'spikefuse[nir]'")

DT = 1e-3


def sequence(*shape: int) -> Tensor:
    return torch.randn(12, 3, *shape, generator=torch.Generator().manual_seed(1)).double()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def assert_same(net: nn.Module, x: Tensor, spiking: bool = True) -> dict[str, str]:
    """Compare a network with its graph; return the kind of each node."""
    net = sf.Temporal(net.double())
    net.train()(x, impl="reference")  # statistics of batch norms
    net.eval()
    graph = sf.to_nir(net, x, dt=DT)
    y, simulated = net(x, impl="reference"), simulate(graph, x, DT)
    if spiking:
        assert 0.02 < y.mean() < 0.98
        assert torch.equal(simulated, y)
    else:
        torch.testing.assert_close(simulated, y)
    return {name: type(node).__name__ for name, node in graph.nodes.items()}


NEURONS = {
    "IF": (lambda: sf.IF(0.7, v_reset=-0.2), "IF"),
    "LIF": (lambda: sf.LIF(0.8, 0.6), "LIF"),
    "LIF per channel": (lambda: sf.LIF(torch.linspace(0.1, 0.9, 6), v_reset=0.1), "LIF"),
    "LIF without leak": (lambda: sf.LIF(1.0), "IF"),
    "LIF without memory": (lambda: sf.LIF(0.0, 0.3), "LIF"),
    "PLIF": (lambda: sf.PLIF(0.6, 0.2, channels=6, decay_input=True), "LIF"),
    "CubaLIF": (lambda: sf.CubaLIF(0.7, 0.8, 0.5, v_reset=-0.1), "CubaLIF"),
    "CubaLIF, scaled": (lambda: sf.CubaLIF(0.7, 0.6, 0.3, decay_input=True), "CubaLIF"),
    "DelayedResetLIF": (lambda: sf.DelayedResetLIF(0.8, 0.6, reset="hard"), "LIF"),
}


@pytest.mark.parametrize("name", NEURONS)
def test_neurons(name: str) -> None:
    make, kind = NEURONS[name]
    assert assert_same(make(), sequence(6, 2)) == {"input": "Input", "0": kind, "output": "Output"}


# Parameters for steps [4, 4, 4] and tokens [4, 4], whose dims a mistake may exchange, and others.
SHAPES = [
    *(((4, 4, 4), shape) for shape in ((1, 1, 4), (1, 4, 1), (4,), (4, 1, 1), (1,), (1, 1, 1))),
    *(((2, 3, 4), shape) for shape in ((1, 1, 4), (1, 3, 1), (1, 3, 4), (2, 3, 4), (2,))),
    *(((4, 4), shape) for shape in ((1, 4), (4,), (4, 1))),
    *(((3, 5), shape) for shape in ((1, 5), (3, 5))),
    *(((6,), shape) for shape in ((6,), (1,))),
    # With dims of time and of the batch, over which they are constant.
    *(((3, 5), (1, 1, 1, 5)), ((4, 4), (1, 1, 4, 1)), ((6,), (1, 1, 6))),
]


def spread(low: float, high: float, shape: tuple[int, ...]) -> Tensor:
    return torch.linspace(low, high, torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize(("step", "shape"), SHAPES, ids=str)
def test_shapes_of_parameters(step: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Each neuron has the values that it has here, and after a round trip."""
    values = [spread(*ends, shape) for ends in ((0.2, 0.9), (0.9, 0.3), (0.1, 0.6), (-0.3, 0.2))]
    decay, current, threshold, v_reset = values
    neurons = [
        *(sf.LIF(decay, threshold, v_reset=v_reset), sf.IF(threshold, v_reset=v_reset)),
        sf.CubaLIF(decay, current, threshold, v_reset=v_reset, decay_input=True),
        sf.PLIF(0.5, threshold, v_reset=v_reset),
    ]
    x = sequence(*step)
    for neuron in neurons:
        assert_same(neuron, x)
        graph, x_float = sf.to_nir(neuron.float(), x.float(), dt=DT), x.float()
        same = sf.Temporal(sf.from_nir(graph, dt=DT))
        assert torch.equal(same(x_float), neuron(x_float))
    assert_same(sf.LI(decay), x, spiking=False)
    assert_same(SynapticLI(decay, current), x, spiking=False)


def test_a_value_per_column() -> None:
    values = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), sf.LIF(0.5, values))
    node = sf.to_nir(sf.Temporal(net), torch.rand(3, 2, 1, 4, 4), dt=DT).nodes["1"]
    expected = np.broadcast_to(values.numpy(), (4, 4, 4))
    np.testing.assert_allclose(node.v_threshold, expected, rtol=1e-6)


def test_a_value_per_neuron_with_feedback() -> None:
    body = nn.Conv1d(2, 2, 3, padding=1)
    neuron = sf.LIF(spread(0.3, 0.9, (2, 4)), spread(0.2, 0.8, (1, 4)))
    net, x = sf.Temporal(Feedback(body, neuron)), sequence(2, 4).float()
    same = sf.Temporal(sf.from_nir(sf.to_nir(net, x, dt=DT), dt=DT))
    assert 0.02 < net(x).mean() < 0.98
    assert torch.equal(same(x), net(x))


def test_values_per_step_are_refused() -> None:
    """By the names of all neurons that have some, whatever the length of the sample."""
    per_step = torch.rand(6, 1, 1) + 0.2
    layers = sf.LIF(0.9, per_step), nn.Linear(4, 4), sf.LI(per_step / 2), sf.LIF(reset="soft")
    for x in (torch.rand(6, 2, 4), torch.rand(1, 2, 4)):
        with pytest.raises(ValueError, match="has no equivalent in NIR") as error:
            sf.to_nir(nn.Sequential(*layers), x, dt=DT)
        lines = str(error.value).splitlines()[1:]
        assert "'0' (LIF): its threshold has shape [6, 1, 1], a value per step" in lines[0]
        assert "one per neuron, [4]" in lines[0]
        assert "'2' (LI): its decay has shape [6, 1, 1], a value per step" in lines[1]
        assert "'3' (LIF): its reset is soft" in lines[2]


@pytest.mark.parametrize(
    ("neuron", "kind"),
    [
        (sf.LI(0.8, decay_input=True), "LI"),
        (sf.LI(1.0), "I"),
        (SynapticLI(0.6, 0.8), "CubaLI"),
    ],
)
def test_integrators(neuron: sf.Neuron, kind: str) -> None:
    assert kind in assert_same(neuron, sequence(6), spiking=False).values()


def test_at_the_threshold() -> None:
    """NIR fires above it, and here a potential that reaches it exactly fires."""
    x = torch.tensor([0.5, 0.5, 0.25, 0.75, 0.5]).view(-1, 1, 1)
    graph = sf.to_nir(sf.IF(), x, dt=DT)
    assert simulate(graph, x, DT).flatten().tolist() == [0, 1, 0, 1, 0]
    assert graph.nodes["0"].v_threshold.item() == np.nextafter(np.float32(1), np.float32(0))


def test_delays() -> None:
    """Those of each channel, rounded to steps."""
    delay = sf.Delay(4, max_delay=3)
    with torch.no_grad():
        delay.delay.copy_(torch.tensor([0.0, 2.6, 1.2, 5.0]))
    net = nn.Sequential(delay, nn.Conv2d(4, 4, 2), sf.LIF(0.5, 0.3), sf.Delay(1, 2))
    kinds = assert_same(net, sequence(4, 3, 3))
    assert [*kinds.values()].count("Delay") == 2
    node = sf.to_nir(net, sequence(4, 3, 3), dt=DT).nodes["0"]
    assert node.delay[:, 0, 0].tolist() == pytest.approx([0, 3e-3, 1e-3, 3e-3])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, (3, 1), padding=(1, 0)), nn.BatchNorm2d(4)
        self.short = nn.Conv2d(2, 4, 1)
        self.lif1, self.lif2 = sf.LIF(0.5, 0.5), sf.LIF(0.8, 0.7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lif1(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y)) + self.short(x)
        return torch.flatten(self.lif2(y.add(self.short(x))), 1)


def test_residuals_and_batch_norms() -> None:
    kinds = assert_same(Residual(), sequence(2, 4, 4))
    assert "conv2" in kinds
    assert "norm2" not in kinds
    assert kinds["short_1"] == "Conv2d"  # called twice


def test_quantized_weights() -> None:
    """The graph has the rounded weights, and the network remains quantized."""
    conv, x = nn.Conv2d(2, 4, 3), 4 * sequence(2, 4, 4).float()
    norm, recurrent = nn.BatchNorm2d(4), sf.Recurrent(sf.LIF(0.8, 0.7), 5, bias=True)
    layers = conv, norm, sf.LIF(0.8, 0.6), nn.Flatten(), nn.Linear(16, 5), recurrent
    net = sf.quantize(sf.Temporal(nn.Sequential(*layers)).eval(), x, 3, None)
    graph = sf.to_nir(net, x, dt=DT)
    assert np.array_equal(graph.nodes["0"].weight, net.net[0].weight.detach())
    y = net(x, impl="reference")
    assert 0.02 < y.mean() < 0.98
    assert torch.equal(sf.Temporal(sf.from_nir(graph, dt=DT))(x, impl="reference"), y)


class SkipBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.block = nn.Linear(6, 6), Block(nn.BatchNorm1d(6), sf.LIF(0.6, 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.linear(x), x)


def test_fused_networks_and_blocks() -> None:
    block = Block(nn.BatchNorm1d(6), sf.LIF(0.6, 0.5))
    net = nn.Sequential(
        *(nn.Linear(4, 6), nn.BatchNorm1d(6), sf.LIF(0.5, 0.3)),
        *(nn.Linear(6, 6), block, SkipBlock()),
    )
    assert "BatchNorm1d" not in assert_same(sf.fuse(sf.Temporal(net)).net, sequence(4)).values()


def test_other_layers() -> None:
    net = nn.Sequential(
        nn.AvgPool2d(3, 1, padding=1),
        nn.Dropout(0.5),
        nn.Conv2d(4, 6, 3, padding="same", groups=2),
        Scale(torch.linspace(-2, 3, 6).view(-1, 1, 1)),
        Threshold(torch.tensor(0.1), sf.surrogate.Sigmoid()),
        nn.AvgPool2d(2, ceil_mode=True, divisor_override=1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(1, 2),
        nn.Conv1d(12, 5, 2, dilation=1),
        sf.LIF(0.5, 0.2),
        nn.Flatten(-2),
        nn.Linear(5, 7),
        sf.IF(0.8),
    )
    kinds = list(assert_same(net, sequence(4, 8, 8)).values())
    assert kinds.count("AvgPool2d") == 2
    assert {"SumPool2d", "Scale", "Threshold", "Flatten", "Conv1d"} <= {*kinds}


def test_feedback_becomes_a_cycle() -> None:
    layer = sf.Recurrent(sf.LIF(0.8, 0.6), 6, bias=True, heads=2, self_connections=False)
    body = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 1, 3, padding=1))
    net = nn.Sequential(nn.Linear(4, 6), layer, nn.Unflatten(1, (1, 6)))
    with pytest.raises(ValueError, match=r"'2' \(Unflatten\)"):
        sf.to_nir(net, sequence(4).float(), dt=DT)
    kinds = assert_same(net[:2], sequence(4))
    assert {"1.lif": "LIF", "1.w_rec": "Affine"}.items() <= kinds.items()
    kinds = assert_same(
        nn.Sequential(nn.Conv1d(2, 1, 1), Feedback(body, sf.IF(0.05))), sequence(2, 6)
    )
    assert {"1.lif": "IF", "1.0": "Conv1d", "1.1": "Conv1d"}.items() <= kinds.items()
    assert_same(Feedback(nn.Identity(), sf.LIF(0.5, 0.8)), sequence(6))


def of_few_bits() -> sf.LIF:
    neuron = sf.LIF()
    neuron.state_bits, neuron.v_step = 8, 1 / 64
    return neuron


REFUSED = {
    "'0' (LIF): its states are rounded": of_few_bits,
    "'0' (LIF): its reset is soft": lambda: sf.LIF(reset="soft"),
    "'0' (ALIF): NIR has no such neuron: use sf.LIF": sf.ALIF,
    "'0' (DelayedResetLIF): its reset is soft": sf.DelayedResetLIF,
    "'0' (LIF): its decay is 1: expected": lambda: sf.LIF(1.0, decay_input=True),
    "'0' (MaxPool2d): NIR has no max pooling: train with nn.AvgPool2d": lambda: nn.MaxPool2d(2),
    "'0' (AvgPool2d): its ceil_mode": lambda: nn.AvgPool2d(3, ceil_mode=True),
    "'0' (AvgPool2d): it does not count": lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    "'0' (AvgPool2d): its divisor_override is 2": lambda: nn.AvgPool2d(3, divisor_override=2),
    "'0' (AdaptiveAvgPool2d): its windows overlap": lambda: nn.AdaptiveAvgPool2d(3),
    "'0' (BatchNorm2d): only a batch norm that alone reads": lambda: nn.BatchNorm2d(4),
    "'1' (BatchNorm2d): it has no running statistics": lambda: nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)
    ),
    "'0' (Linear): its input of one step has shape [4, 4, 4]": lambda: nn.Linear(4, 4),
    "'0' (Conv2d): its padding_mode is 'reflect'": lambda: nn.Conv2d(
        4, 4, 3, padding=1, padding_mode="reflect"
    ),
    "'0' (GroupNorm): NIR has no equivalent of it": lambda: nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    with pytest.raises(ValueError, match="has no equivalent in NIR") as error:
        sf.to_nir(REFUSED[message](), torch.rand(2, 1, 4, 4, 4), dt=DT)
    assert f"\n- {message}" in str(error.value)


class Code(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.lif, self.pool = function, sf.LIF(), nn.AdaptiveAvgPool1d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda net, x: net.lif(x * 2), "'mul' (mul): expected calls of modules"),
        (lambda net, x: net.lif(x + x), "'lif' (LIF): a tensor is added to itself"),
        (lambda net, x: x.add(x), "the output: a tensor is added to itself"),
        (lambda net, x: torch.add(x, net.lif(x), alpha=2), "'add' (add): it adds with a factor"),
        (lambda net, x: x + torch.flatten(net.pool(net.lif(x)), 1), "shapes [4] and [1]"),
        (lambda net, x: net.lif(x).add_(x) + x.add_(net.lif(x)), "it changes a tensor that others"),
        (lambda net, x: net.lif(net.lif(x)), "'lif' (LIF): it is called twice"),
        (lambda net, x: net.lif(x, outputs=("v",)), "'lif' (LIF): it is called with options"),
        (lambda net, x: (net.lif(x), x), "the output: expected a single tensor"),
        (lambda net, x: x if x.sum() > 0 else net.lif(x), "can't be traced by torch.fx"),
    ],
)
def test_refused_code(function, message: str) -> None:
    with pytest.raises(ValueError, match=r"NIR|torch\.fx") as error:
        sf.to_nir(Code(function), torch.rand(2, 1, 4), dt=DT)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["", "net", "net.0", "net.1", "net.2.neuron"])
def test_hooks_are_refused(name: str) -> None:
    layers = nn.Linear(4, 4), sf.LIF(), sf.Recurrent(sf.LIF(), 4)
    net = sf.Temporal(nn.Sequential(*layers))
    handle = net.get_submodule(name).register_forward_hook(lambda module, x, y: 2 * y)
    with pytest.raises(ValueError, match="has hooks, which a graph does not hold: remove them"):
        sf.to_nir(net, torch.rand(2, 1, 4), dt=DT)
    handle.remove()
    sf.to_nir(net, torch.rand(2, 1, 4), dt=DT)


def test_containers_inside_are_refused() -> None:
    net = nn.Sequential(nn.Identity(), sf.Temporal(sf.LIF()))
    with pytest.raises(ValueError, match="'1' is a Temporal inside the network: pass that alone"):
        sf.to_nir(net, torch.rand(2, 1, 4), dt=DT)


def test_event_layers_are_refused() -> None:
    net = nn.Sequential(EventLinear(4, 5, sf.LIF(surrogate=sf.surrogate.Sigmoid(cutoff=-0.5))))
    with pytest.raises(ValueError, match=r"'0' is an EventLinear.*: use nn\.Linear"):
        sf.to_nir(net, torch.rand(2, 1, 4), dt=DT)


def test_all_refusals_are_listed_and_the_network_is_unchanged() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), sf.LIF(reset="soft"), nn.Linear(4, 4), sf.ALIF())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=r"\(BatchNorm1d\)(?s:.*)\(LIF\)(?s:.*)\(ALIF\)"):
        sf.to_nir(net, torch.rand(2, 3, 4), dt=DT)
    assert net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize("dt", [0.0, -1e-3, float("inf"), "1 ms", True])
def test_dt_is_checked(dt) -> None:
    with pytest.raises((TypeError, ValueError), match=r"dt is .*: expected"):
        sf.to_nir(sf.LIF(), torch.rand(2, 1, 4), dt=dt)


def test_batch_first() -> None:
    net = sf.Temporal(nn.Sequential(nn.Linear(4, 6), sf.LIF()), batch_first=True)
    graph = sf.to_nir(net, torch.rand(3, 12, 4), dt=DT)
    assert graph.nodes["1"].tau.shape == (6,)


def test_without_the_package() -> None:
    with (
        mock.patch.dict(sys.modules, {"nir": None}),
        pytest.raises(ModuleNotFoundError, match=r'pip install "spikefuse\[nir\]"'),
    ):
        sf.to_nir(sf.LIF(), torch.rand(2, 1, 4), dt=DT)
