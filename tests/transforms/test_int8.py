"""PyTorch's own quantization of weights leaves neurons as they are."""

from __future__ import annotations

import warnings

import torch
from torch import nn

import spikefuse as sf


def test_dynamic_quantization_of_linear_layers():
    torch.manual_seed(0)
    first, last = nn.Linear(20, 32), nn.Linear(32, 10)
    with torch.no_grad():  # weights that int8 holds exactly, so that spikes are equal
        for layer in (first, last):
            layer.weight.copy_(torch.randint(-127, 128, layer.weight.shape) / 127)
            layer.weight[0, :2] = torch.tensor([-1.0, 1.0])
    net = sf.Temporal(nn.Sequential(first, sf.LIF(threshold=0.3), last)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated for torchao
        quantized = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
        x = torch.randint(0, 2, (5, 2, 20)).float()
        with torch.no_grad():
            found, expected = quantized(x), net(x)
    assert type(quantized.net[0]).__module__.startswith("torch.ao.nn.quantized.dynamic")
    assert isinstance(quantized.net[1], sf.LIF)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.1)
