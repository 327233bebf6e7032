"""Symbolic traces of networks, and PyTorch's quantization, which makes some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import spikefuse as sf

# Which moves to torchao.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
X = torch.rand(5, 4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Each kind of layer with neurons, one with options."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lif = nn.Linear(6, 8), sf.LIF(threshold=0.3)
        self.recurrent = sf.Recurrent(sf.LIF(threshold=0.3), 8)
        self.block = sf.nn.Block(nn.BatchNorm1d(8), sf.LIF(threshold=0.3))
        self.feedback = sf.nn.Feedback(nn.Linear(8, 8), sf.LIF(threshold=0.3))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        spikes, v = self.lif(self.first(x), outputs=("spikes", "v"))
        return self.last(self.feedback(self.block(self.recurrent(spikes + 0.1 * v))))


def test_symbolic_traces() -> None:
    torch.manual_seed(0)
    net = Net().eval()
    traced = fx.symbolic_trace(net)
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == ["first", "lif", "recurrent", "block", "feedback", "last"]
    assert torch.equal(sf.Temporal(traced)(X), sf.Temporal(net)(X))
    # A container in a network is one, too.
    outer = nn.Sequential(sf.Temporal(net), nn.Linear(3, 2))
    assert torch.equal(fx.symbolic_trace(outer)(X), outer(X))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), sf.LIF(threshold=0.3), nn.Linear(8, 3))


def test_prepare_fx() -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    mapping = quantization.QConfigMapping()
    mapping.set_object_type(nn.Linear, quantization.get_default_qconfig("x86"))
    prepared: Any = quantize_fx.prepare_fx(network().eval(), mapping, (X[0],))
    expected = sf.Temporal(network())(X)
    torch.testing.assert_close(sf.Temporal(prepared)(X), expected)
    assert "activation_post_process_0" in prepared.code
    quantized = sf.Temporal(quantize_fx.convert_fx(prepared))
    # A few spikes differ.
    assert (quantized(X) - expected).abs().median() < 0.02


def test_prepare_qat() -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    net = sf.Temporal(network()).train()
    net.qconfig = quantization.get_default_qat_qconfig("x86")
    quantization.prepare_qat(net, inplace=True)
    net(X).sum().backward()
    assert net.net[0].weight.grad.any()
