"""`explain` on a GPU: times and Triton kernels."""

import torch
from torch import nn

import spikefuse as sf


def test_times_of_a_network():
    net = sf.Temporal(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), sf.LIF())).cuda()
    x = torch.rand(32, 16, 8, 64, 64, device="cuda")
    found = sf.explain(net, x, time=False)
    (layer,) = found.layers
    assert layer.implementation == "triton"
    assert layer.program.startswith("LIF-triton-")
    inputs = 32 * 16 * 8 * 62 * 62
    row = found.saved[-1]
    assert row.name == layer.name
    assert row.now == 4 * (inputs + inputs // 32 * (31 // layer.chunk))
    assert found.bandwidth is None
    # Other processes may use the GPU during a measurement.
    assert any(are_plausible(net, x) for _ in range(5))


def are_plausible(net, x):
    """Measure a layer with and without gradients. A copy reaches more than 50 GB/s, and except for
    caches, no kernel is faster than memory."""
    found = sf.explain(net, x)
    layer = found.layers[0]
    assert layer.least == layer.moved / found.bandwidth
    with torch.no_grad():
        evaluated = sf.explain(net, x).layers[0]
    is_bounded = found.bandwidth > 5e10 and 0 < layer.fraction < 1.5
    return is_bounded and evaluated.achieved < layer.achieved


def test_the_reference_on_a_gpu():
    x = torch.rand(8, 4, 100, device="cuda", requires_grad=True)
    found = sf.explain(sf.LIF(), x, impl="reference")
    (layer,), (row,) = found.layers, found.saved
    assert layer.implementation == "reference"
    assert row.now == row.eager > 0
    assert layer.achieved > 0
