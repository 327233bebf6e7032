"""The scales of norms with running statistics, which one operation computes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.graph import operations


class Deep(nn.Module):
    """Four norms with other statistics, weights and sizes, in evaluation."""

    def __init__(self, forward: Callable[[Deep, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, sizes = forward, (3, 6, 6, 2, 5)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), sf.LIF(0.5, 0.3))
            for a, b in itertools.pairwise(sizes)
        )
        for part in self.parts:
            part[1].running_mean.normal_()
            part[1].running_var.uniform_(0.5, 2)
            nn.init.uniform_(part[1].weight, 0.5, 2)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def chain(net: Deep, x: Tensor) -> Tensor:
    for part in net.parts:
        x = part(x)
    return x


def frozen_start(net: Deep, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = net.parts[0](x)
    for part in net.parts[1:]:
        x = part(x)
    return x


def changed(net: Deep, x: Tensor) -> Tensor:
    x = net.parts[0](x)
    with torch.no_grad():
        net.parts[2][1].weight.mul_(1.25)
    for part in net.parts[1:]:
        x = part(x)
    return x


def other_eps(net: Deep, x: Tensor) -> Tensor:
    net.parts[1][1].eps = 0.1
    return chain(net, x)


# How many scales each call computes together: two without gradients, then two with them, whose
# graphs have modes if they switch them.
CASES = {
    "chain": (chain, [4, 4, 4, 4]),
    "frozen start": (frozen_start, [4, 4]),
    "changed": (changed, [3, 3]),
    "other eps": (other_eps, []),
}


@pytest.mark.parametrize("name", CASES)
def test_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, compute = list[int](), operations.scales

    def counted(variances: list[Tensor], *given: object) -> object:
        counts.append(len(variances))
        return compute(variances, *given)

    monkeypatch.setattr(operations, "scales", counted)
    torch.manual_seed(0)
    forward, together = CASES[name]
    net = sf.Temporal(Deep(forward))
    fused, x = sf.fuse(copy.deepcopy(net)), torch.randn(4, 8, 3)
    for with_gradients in (False, True):
        for call in range(2):
            with torch.set_grad_enabled(with_gradients), torch.no_grad():
                for m in (net, fused):  # a change between calls is seen
                    m.net.parts[1][1].running_var.add_(call)
            with torch.set_grad_enabled(with_gradients):
                expected, actual = net(x), fused(x)
            assert torch.equal(actual, expected)
    expected.sum().backward()
    actual.sum().backward()
    for a, b in zip(fused.parameters(), net.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    assert counts == together
    assert len(fused.fusion.fused) == 4
