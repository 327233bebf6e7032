"""`record` and `report` on a GPU."""

import torch
from torch import nn

import spikefuse as sf
from spikefuse import reference


def test_values_and_gradients():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), sf.LIF(), nn.Linear(30, 5))
    net, x = sf.fuse(sf.Temporal(layers)).cuda(), torch.rand(8, 4, 20, device="cuda")
    y = net(x)
    with sf.record(net, states=("spikes", "v"), layers="net.1", grad=True) as record:
        torch.testing.assert_close(net(x), y)
    assert len(net.fusion.fused) == 1
    u, found = record["net.1"]["output"], record["net.2"]
    (spikes,), _ = reference.scan(sf.LIF(), (u.detach(),), None)
    # The block normalizes in its own kernel, so that rounding may decide at the threshold.
    assert (found["spikes"] != spikes).float().mean() < 0.01
    assert found["spikes"].any()
    found["v"].square().mean().backward()
    assert layers[0].weight.grad.any()


def test_operations_are_those_of_the_recorded_spikes():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), sf.LIF(threshold=0.2), nn.Conv2d(4, 6, 1), sf.LI()
    )
    net, x = sf.Temporal(layers).cuda(), torch.rand(8, 4, 1, 9, 9, device="cuda")
    found = {row.name: row for row in sf.report(net, [x]).layers}
    with sf.record(net) as record, torch.no_grad():
        net(x)
    assert found["net.0"].multiplies == 8 * 81 * 4 * 9
    assert found["net.2"].accumulates == record["net.1"]["spikes"].sum().item() * 6 / 4 > 0
