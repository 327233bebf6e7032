"""Networks in the code patterns of published repositories spike as before conversion, in float64.

Small versions of those in `published.py`, and those that SpikingJelly ships.
"""

from __future__ import annotations

import copy
import io
import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from benchmarks import convert, from_ann_steps, record, tables
from benchmarks.published import (
    SEWResNet,
    SpikeDrivenTransformer,
    lif,
    qkformer,
    spikes_of,
    spikformer,
)
from benchmarks.runner import NO_GRAPHS
from spikefuse.transforms.converters import over_time

REASON = "SpikingJelly is not installed: see CONTRIBUTING.md"
neuron = pytest.importorskip("spikingjelly.activation_based.neuron", reason=REASON)
layer = pytest.importorskip("spikingjelly.activation_based.layer", reason=REASON)
functional = pytest.importorskip("spikingjelly.activation_based.functional", reason=REASON)
models = {
    name: pytest.importorskip(f"spikingjelly.activation_based.model.{name}", reason=REASON)
    for name in ("spikformer", "qkformer", "spike_driven_transformer")
}

T, B = 3, 2


def of_spikingjelly(name: str) -> nn.Module:
    """The version that SpikingJelly 2.0.0 ships."""
    module = models[name]
    if name == "spikformer":
        return module.Spikformer(
            T=T, img_size_h=16, img_size_w=16, patch_size=4, in_channels=2, num_classes=10,
            embed_dims=16, num_heads=2, depths=1, spiking_neuron=of_node,
        )  # fmt: skip
    kind = module.QKFormer if name == "qkformer" else module.SpikeDrivenTransformer
    sizes = {"embed_dims": 16, "num_heads": 2, "depths": 1}
    if name == "qkformer":
        sizes = {"embed_dims": 16, "num_heads": (2, 2, 2), "depths": (1, 1, 1)}
    return kind(T=T, in_channels=2, num_classes=10, spiking_neuron=of_node, **sizes)


def of_node(v_threshold: float = 0.5, **options) -> nn.Module:
    options |= {"tau": 2.0, "detach_reset": True, "step_mode": "m"}
    return neuron.LIFNode(v_threshold=v_threshold / 2, **options)


NETWORKS = {
    "sew_resnet add": SEWResNet,
    "sew_resnet iand": lambda: SEWResNet(cnf="IAND"),
    "spikformer": spikformer,
    "qkformer": qkformer,
    "spike_driven_transformer": SpikeDrivenTransformer,
    "spike_driven_transformer tet": lambda: SpikeDrivenTransformer(tet=True),
    **{f"{n} of spikingjelly": (lambda n=n: of_spikingjelly(n)) for n in models},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_equal_spikes_and_gradients(name):
    """In training, with batch statistics; all weights are shared."""
    torch.manual_seed(0)
    net = NETWORKS[name]().double()
    size = 32 if "of spikingjelly" in name and "spikformer" not in name else 16
    x = 2 * torch.rand(B, 2, size, size, dtype=torch.float64)
    ours = sf.convert(net)
    assert list(ours.state_dict()) == list(net.state_dict())
    wanted_spikes, spikes = spikes_of(net, neuron.BaseNode), spikes_of(ours, sf.Neuron)
    expected, found = net(x), ours(x)
    if isinstance(expected, tuple):
        expected, found = expected[0], found[0]
    assert [*spikes] == [*wanted_spikes]
    rates = [y.mean().item() for y in wanted_spikes.values()]
    assert sum(0.02 < rate < 0.98 for rate in rates) > 0.7 * len(rates), rates
    for key, y in wanted_spikes.items():
        assert torch.equal(spikes[key], y), key
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    parameters = [*net.parameters()]
    wanted = torch.autograd.grad((expected * weights).sum(), parameters, allow_unused=True)
    gradients = torch.autograd.grad((found * weights).sum(), parameters, allow_unused=True)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


class Layers(nn.Module):
    """SpikingJelly's layers for sequences, in code that counts dims of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(2, 4, 3, padding=1)
        self.norm = layer.TemporalEffectiveBatchNorm2d(T, 4)
        self.lif1, self.pool, self.drop = lif(), layer.MaxPool2d(2), layer.Dropout(0.3)
        self.conv2, self.norm2, self.lif2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), lif()
        self.steps = layer.MultiStepContainer(nn.Flatten(), nn.Linear(144, 20), neuron.IFNode(0.1))
        self.fc, self.lif3, self.vote = layer.Linear(20, 20), lif(0.2), layer.VotingLayer(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.pool(self.lif1(self.norm(self.conv(x)))))
        x = functional.seq_to_ann_forward(x, [self.conv2, self.norm2])
        if self.conv.step_mode == "s":
            raise AssertionError("code for single steps")
        x = self.steps(self.lif2(x))
        return self.vote(self.lif3(self.fc(x))).mean(0)


def test_layers_over_time(monkeypatch):
    torch.manual_seed(0)
    # A container of steps runs its layers by Temporal, here in float64.
    monkeypatch.setattr(
        over_time, "Temporal", lambda net: partial(sf.Temporal(net), impl="reference")
    )
    net = Layers()
    for module in (net.conv, net.norm, net.pool, net.drop, net.fc, net.vote):
        module.step_mode = "m"
    net.double().norm.scale.data.uniform_(0.5, 2.0)
    x = 2 * torch.rand(T, B, 2, 16, 16, dtype=torch.float64)
    ours = sf.convert(net)
    assert list(ours.state_dict()) == list(net.state_dict())
    wanted, found = spikes_of(net, neuron.BaseNode), spikes_of(ours, sf.Neuron)
    torch.manual_seed(1)
    expected = net(x)
    torch.manual_seed(1)
    assert torch.equal(ours(x), expected)
    assert expected.std() > 0.1
    for name in ("lif1", "lif2", "lif3"):
        assert torch.equal(found[name], wanted[name])
    with pytest.raises(ValueError, match="received 2 time steps: expected 3"):
        ours(x[:2])


def test_a_network_over_time_says_how_it_is_called():
    ours = sf.convert(spikformer())
    table = str(ours.conversion)
    assert "call it as the original, without Temporal: Spikformer.forward, line" in table
    assert "repeat(self.T, 1, 1, 1, 1)` counts dims of [T, B, ...]" in table
    with pytest.raises(ValueError, match="the code of Spikformer is written for"):
        sf.Temporal(ours)(torch.rand(T, B, 2, 16, 16))


def test_a_network_over_time_is_compiled_copied_and_saved():
    torch.manual_seed(0)
    net = SEWResNet()
    ours, x = sf.convert(net), 2 * torch.rand(B, 2, 16, 16)
    expected = ours(x)
    functional.reset_net(net)
    torch.testing.assert_close(expected, net(x), rtol=1e-3, atol=1e-3)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), expected)


def test_the_benchmark_measures_all_networks(tmp_path):
    """On a CPU, without graphs."""
    options = ["--quick", "--device", "cpu", "--steps", "training"]
    path = convert.main([*options, "--rounds", "1", "--out", str(tmp_path)])
    result = record.read(path)
    assert not result["left_out"]
    assert [row["network"] for row in result["rows"]] == list(convert.NETWORKS)
    for row in result["rows"]:
        original, converted, *graphs = row["contenders"]
        assert original["status"] == converted["status"] == "ok", row
        assert all(c["reason"] == NO_GRAPHS for c in graphs)
        assert min(row["float64"]["rates"]) > 0
        assert row["logits_difference, converted"] < 0.1
        counted = re.match(r"(\d+) of (\d+) batch norms fused", row["fusion"])
        assert counted is not None, row["fusion"]
        assert int(counted[1]) >= 0.75 * int(counted[2]) > 0, row["fusion"]


def test_conversions_of_a_relu_network_spike_equally(tmp_path):
    """`sf.from_ann` and SpikingJelly's conversion, in the benchmark of their inference."""
    options = ["--quick", "--device", "cpu", "--dtype", "float32", "--T", "2", "--rounds", "1"]
    result = record.read(from_ann_steps.main([*options, "--out", str(tmp_path)]))
    assert not result["left_out"]
    (row,) = result["rows"]
    assert [c["status"] for c in row["contenders"]] == ["ok", "ok", *["unavailable"] * 2]
    assert row["logits_difference"] < 0.1
    shown = tables.REGIONS["from-ann-steps"][1]([(tmp_path, result)], tmp_path)
    assert f"all {row['float64']['outputs']:,} outputs of neurons" in shown
