"""Feedback through any module, against loops written by hand and recurrent layers."""

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse import reference
from spikefuse.scan.state_passing import StatePassing
from tests.grid import on_grid
from tests.nn.recurrent_layers import Scaled, layer


def test_a_convolution(device):
    torch.manual_seed(0)
    body = nn.Conv2d(2, 2, 3, padding=1, bias=False)
    with torch.no_grad():
        body.weight.copy_(on_grid(body.weight.shape))
    net = sf.Temporal(nn.Sequential(sf.nn.Feedback(body, sf.LIF(0.75)), nn.Flatten())).to(device)
    x = on_grid((5, 3, 2, 4, 4), device).requires_grad_()
    y, state = net(x, return_state=True)
    v = s = torch.zeros_like(x[0])
    for t in range(5):
        (s,), (v,) = reference.scan(sf.LIF(0.75), ((x[t] + body(s))[None],), (v,))
        s = s[0]
        assert torch.equal(s.flatten(1), y[t])
    assert torch.equal(v, state["net.0.neuron"][0])
    first, state = net(x[:2], return_state=True)
    assert torch.equal(torch.cat([first, net(x[2:], state=state)]), y)
    y.sum().backward()
    assert x.grad[0].any()
    assert body.weight.grad.any()


def test_a_matrix_equals_recurrent(device):
    made = layer(sf.LIF(0.75), 12, device)
    body = nn.Linear(12, 12, bias=False).to(device)
    body.load_state_dict({"weight": made.weight})
    feedback = sf.nn.Feedback(body, sf.LIF(0.75))
    x = on_grid((6, 4, 12), device)
    assert torch.equal(feedback(x), made(x))
    for impl in ("reference", "auto"):
        feedback(x, impl=impl).sum().backward()
    made(x).sum().backward()
    assert torch.allclose(body.weight.grad, 2 * made.weight.grad, rtol=1e-4, atol=1e-5)


def test_checkpoint_recomputes_it(device):
    torch.manual_seed(0)
    feedback = sf.nn.Feedback(nn.Linear(8, 8), sf.LIF(0.75)).to(device)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.feedback = feedback

        def forward(self, x):
            return sf.checkpoint(self.feedback, x)

    x, grads = torch.randn(5, 3, 8, device=device), []
    for net in (feedback, Checkpointed()):
        leaf = x.clone().requires_grad_()
        sf.Temporal(net)(leaf).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_outputs(device):
    made = layer(sf.LIF(0.75), 12, device)
    body = nn.Linear(12, 12, bias=False).to(device)
    body.load_state_dict({"weight": made.weight})
    x = on_grid((6, 4, 12), device)
    found = sf.nn.Feedback(body, sf.LIF(0.75))(x, outputs=("v", "spikes"))
    for a, b in zip(found, made(x, outputs=("v", "spikes")), strict=True):
        assert torch.equal(a, b)


def test_errors():
    with pytest.raises(ValueError, match="contains a neuron"):
        sf.nn.Feedback(nn.Sequential(sf.LIF()), sf.LIF())
    with pytest.raises(ValueError, match=r"a layer of several time steps.*use sf\.Loop"):
        sf.nn.Feedback(nn.Sequential(sf.Delay(4, 3)), sf.LIF())
    with pytest.raises(TypeError, match=r"neuron is the class LIF: .* as in sf.LIF\(\)"):
        sf.nn.Feedback(nn.Identity(), sf.LIF)
    with pytest.raises(TypeError, match="has 2 outputs: expected one"):
        sf.nn.Feedback(nn.Identity(), Scaled(float))(torch.rand(2, 1, 4))
    with pytest.raises(TypeError, match=r"returned a tuple: expected a tensor"):
        sf.nn.Feedback(nn.LSTM(4, 4), sf.LIF())(torch.rand(2, 1, 4))
    with pytest.raises(ValueError, match="expected the same shape"):
        sf.nn.Feedback(nn.Linear(4, 3), sf.LIF())(torch.rand(2, 1, 4))


def test_explain_says_that_it_is_a_loop(device):
    net = nn.Sequential(sf.nn.Feedback(nn.Linear(8, 8), sf.LIF()), nn.Flatten()).to(device)
    report = str(sf.explain(sf.Temporal(net), torch.randn(3, 2, 8, device=device)))
    assert "net.0: Feedback, a Python loop over time: each step calls Linear" in report
    assert "not called" not in report


def test_time_is_not_sharded():
    for made in (sf.Recurrent(sf.LIF(), 8), sf.nn.Feedback(nn.Linear(8, 8), sf.LIF())):
        net = sf.Temporal(made)
        net.passing = NoPassing()
        with pytest.raises(ValueError, match="can't be sharded"):
            net(torch.rand(3, 2, 8))


class NoPassing(StatePassing):
    def begin(self, x, call, has_state):
        pass
