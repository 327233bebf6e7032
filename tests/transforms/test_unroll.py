"""Binary spikes over virtual time steps give the outputs of integer spikes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf


class Residual(nn.Module):
    """A convolutional network with batch norms, a residual, pooling, and two numbers of levels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.spikes, self.pool = sf.IntegerLIF(0.5, 0.6, levels=3), nn.MaxPool2d(2)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.more, self.head = sf.IntegerLIF(0.5, 0.3, levels=2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.spikes(self.first(x)))
        x = self.more(self.conv(x) + x)
        y: Tensor = self.head(x.mean((2, 3)))
        return y


def test_outputs_are_equal_and_spikes_binary() -> None:
    torch.manual_seed(0)
    net = sf.Temporal(Residual())
    with torch.no_grad():
        net(torch.randn(4, 8, 2, 6, 6), impl="reference")  # running statistics of batch norms
    net.eval()
    x = torch.randn(3, 2, 2, 6, 6)
    binary = sf.unroll_integer_spikes(net, x)
    inputs: dict[str, list[Tensor]] = {"conv": [], "head": []}
    for made in (net, binary.net):
        for name, seen in inputs.items():
            layer = made.net.get_submodule(name)
            layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
    expected = net(x, impl="reference")
    torch.testing.assert_close(binary(x, impl="reference"), expected)
    integers, bits = inputs["conv"]
    assert integers.unique().tolist() == [0, 1, 2, 3]
    assert bits.unique().tolist() == [0, 1]
    assert torch.equal(bits.unflatten(0, (3, 3, 2)).sum(1).flatten(0, 1), integers)
    assert net.net.first[1].bias is not binary.net.net.first[1].bias


def test_what_is_recorded_and_reported_is_binary() -> None:
    torch.manual_seed(0)
    layers = (
        nn.Linear(6, 8),
        sf.IntegerLIF(levels=3),
        nn.Linear(8, 4),
        sf.IntegerLIF(0.5, 0.2, levels=3),
    )
    net, x = sf.Temporal(nn.Sequential(*layers)).eval(), 4 * torch.rand(5, 2, 6)
    binary = sf.unroll_integer_spikes(net, x)
    with sf.record(net, states=("spikes", "v")) as before:
        net(x)
    with sf.record(binary, states=("spikes", "v")) as after:
        binary(x)
    report, rates = sf.report(binary, [x]), {}
    for name in ("net.1", "net.3"):
        integers, v = before[name]["spikes"], before[name]["v"]
        found = after[f"net.{name}.neuron"]
        assert integers.max() > 1
        steps = [integers > i for i in range(3)]
        assert torch.equal(found["spikes"], torch.stack(steps, 1).flatten(0, 1).float())
        torch.testing.assert_close(found["v"], v.repeat_interleave(3, 0))
        rates[f"net.{name}.neuron"] = pytest.approx(found["spikes"].mean().item())
    assert report.rates == after.rates == rates
    rows = {row.name: row for row in report.layers}
    spikes = before["net.1"]["spikes"].sum().item() / 2
    assert rows["net.net.1.neuron"].accesses.spike_writes == spikes
    assert rows["net.net.2"].accesses.spike_reads == spikes
    assert sf.explain(binary, x, time=False).saved is not None


def test_other_networks_are_refused() -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 4)
    with pytest.raises(TypeError, match=r"'net.1' is a LIF: expected IntegerLIF only"):
        sf.unroll_integer_spikes(sf.Temporal(nn.Sequential(nn.Linear(4, 4), sf.LIF())), x)
    with pytest.raises(TypeError, match="net has no IntegerLIF"):
        sf.unroll_integer_spikes(sf.Temporal(nn.Linear(4, 4)), x)
    with pytest.raises(TypeError, match="expected a Temporal"):
        sf.unroll_integer_spikes(nn.Sequential(sf.IntegerLIF()), x)  # type: ignore[arg-type]
    for layer in (nn.ReLU(), nn.LayerNorm(4)):
        layers = nn.Linear(4, 4), layer, sf.IntegerLIF(), nn.Linear(4, 4)
        with pytest.raises(ValueError, match=r"differ by .* must be linear"):
            sf.unroll_integer_spikes(sf.Temporal(nn.Sequential(*layers)), 4 * x)
