"""Networks of a norm and a neuron that read each other in many ways, plain and fused."""

from __future__ import annotations

import copy
import random

import torch
from torch import Tensor, nn

import spikefuse as sf


def lif() -> sf.Neuron:
    return sf.LIF(0.5, 0.3)


FLAG = [True]


class Net(nn.Module):
    """Layers, and how they are put together."""

    def __init__(self, forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = forward
        self.first, self.bn, self.other = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.conv, self.conv2 = (nn.Conv1d(6, 6, 3, padding=1) for _ in range(2))
        self.lif, self.lif2, self.same = lif(), sf.LIF(0.5, 0.2), nn.Identity()
        self.scale = nn.Parameter(torch.rand(6))
        self.full = nn.Parameter(torch.rand(12, 6))
        self.steps = sf.StepScale(4)
        with torch.no_grad():
            self.steps.scale.copy_(torch.linspace(0.5, 1.5, 4).view_as(self.steps.scale))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def results(net: nn.Module, x: Tensor) -> dict[str, object]:
    """Output, gradients, buffers and the state of the generators after two calls in training, and
    the output of one in evaluation."""
    found: dict[str, object] = {}
    torch.manual_seed(5)
    random.seed(5)
    FLAG[0] = True
    net.train()
    for call in ("first", "second"):
        given = x.detach().clone().requires_grad_()
        y = net(given)
        found[f"{call} output"] = y.detach().clone()
        if y.requires_grad:
            (y * torch.arange(float(y.numel())).view(y.shape).cos()).sum().backward()
        found[f"{call} gradient"] = given.grad
    for name, parameter in net.named_parameters():
        found[f"gradient of {name}"] = parameter.grad
    found |= {name: buffer.clone() for name, buffer in net.named_buffers()}
    with torch.no_grad():
        found["evaluated"] = net.eval()(x)
    return found | {"torch": torch.get_rng_state(), "python": random.getstate()}


def compare(net: sf.Temporal, x: Tensor) -> sf.Temporal:
    """Check that the fused copy of a network computes the same, and give it."""
    fused = sf.fuse(copy.deepcopy(net))
    actual, expected = results(fused, x), results(net, x)
    assert [*actual] == [*expected]
    assert actual.pop("python") == expected.pop("python")
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
        else:
            torch.testing.assert_close(actual[name], value, rtol=2e-4, atol=2e-4, msg=name)
    return fused


def augmented(n: Net, x: Tensor) -> Tensor:
    y = n.bn(n.first(x))
    y += x
    return n.lif(y)


def statement(n: Net, x: Tensor) -> Tensor:
    y = n.bn(n.first(x))
    y.add_(x)
    return n.lif(y)


def potential(n: Net, x: Tensor) -> Tensor:
    spikes, v = n.lif(n.bn(n.first(x)) + x, outputs=("spikes", "v"))
    return spikes + v.sigmoid()


FUSED = {
    "plain": (lambda n, x: n.lif(n.bn(n.first(x))), False),
    "identities": (lambda n, x: n.lif(n.same(n.same(n.bn(n.first(x))))), False),
    "residual": (lambda n, x: n.lif(n.bn(n.first(x)) + x), True),
    "residual first": (lambda n, x: n.lif(x + n.bn(n.first(x))), True),
    "what the norm reads": (lambda n, x: n.lif(n.bn(y := n.first(x)) + y), True),
    "torch.add": (lambda n, x: n.lif(torch.add(n.first(x), n.bn(x), alpha=1)), True),
    "method": (lambda n, x: n.lif(n.bn(n.first(x)).add(x.sin())), True),
    "in place": (lambda n, x: n.lif(n.bn(n.first(x)).add_(x)), True),
    "augmented": (augmented, True),
    "statement": (statement, True),
    "parameter": (lambda n, x: n.lif(n.bn(n.first(x)) + n.full), True),
    "block as a residual": (lambda n, x: n.lif(n.bn(x) + n.lif2(n.other(n.first(x)))), True),
    "shape first": (lambda n, x: n.lif((y := n.bn(n.first(x))) + x.view(y.shape)), True),
    "read again": (lambda n, x: n.lif(y := n.bn(n.first(x))) + y.sigmoid(), False),
    "sum read again": (lambda n, x: n.lif(y := n.bn(n.first(x)) + x) + y.sigmoid(), True),
    "potential": (potential, True),
    "two neurons": (lambda n, x: n.lif(y := n.bn(n.first(x))) + n.lif2(y), False),
    "scale per step": (lambda n, x: n.lif(n.steps(n.bn(n.first(x)))), False),
    "scale per step and residual": (lambda n, x: n.lif(n.steps(n.bn(n.first(x))) + x), True),
    "scaled sum read again": (
        lambda n, x: n.lif(y := x + n.steps(n.bn(n.first(x)))) + y.sigmoid(),
        True,
    ),
    "two norms, one scaled": (lambda n, x: n.lif(n.other(x) + n.steps(n.bn(n.first(x)))), True),
    "scale per channel": (lambda n, x: n.lif(n.scale * n.bn(n.first(x))), False),
    "learned scale": (lambda n, x: n.lif(torch.mul(n.bn(n.first(x)), n.scale[0])), False),
}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def residual(n: Net, x: Tensor) -> Tensor:
    return n.lif(n.bn(n.first(x)) + x)


def network() -> sf.Temporal:
    return sf.Temporal(Net(residual))
