"""The scales of norms with running statistics, which one operation computes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.block.functional import Norm
from spikefuse.graph import checkpoint, fuse_norms, operations, scales


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
    "other eps": (other_eps, [3, 3, 3, 3]),
}


@pytest.mark.parametrize("name", CASES)
def test_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, compute = list[int](), operations.with_scales

    def counted(norms: list[Norm]) -> list[Norm]:
        counts.append(len(norms))
        return compute(norms)

    monkeypatch.setattr(operations, "with_scales", counted)
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


@torch.no_grad()
def test_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are converted before they are computed with, together as each alone."""
    torch.manual_seed(0)
    net, x = sf.Temporal(Deep(chain)).bfloat16(), torch.randn(4, 8, 3).bfloat16()
    together = sf.fuse(copy.deepcopy(net))(x)
    monkeypatch.setattr(scales, "MIN_NORMS", 9)
    assert torch.equal(together, sf.fuse(copy.deepcopy(net))(x))
    norm = net.net.parts[1][1]
    plain = sf.Temporal(nn.Sequential(norm, sf.LI(0.5)))
    x = torch.randn(4, 50, 6).bfloat16()
    truth = sf.Temporal(copy.deepcopy(plain.net).double())(x.double(), impl="reference")
    actual, expected = (float((y(x) - truth).abs().mean()) for y in (sf.fuse(plain), plain))
    assert actual < expected


def test_segments_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward recomputes segments in evaluation, too; no scales are read across them."""
    made, make = list[int](), checkpoint.Segment.__init__
    monkeypatch.setattr(checkpoint.Segment, "__init__", lambda *args: made.append(1) or make(*args))
    monkeypatch.setattr(fuse_norms, "MIN_VALUES", 0)
    layers = [
        layer
        for _ in range(6)
        for layer in (nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), sf.LIF(threshold=0.2))
    ]
    net = sf.Temporal(nn.Sequential(*layers), memory=sf.memory.Checkpoint(3)).eval()
    sf.fuse(net)(torch.rand(4, 64, 64)).sum().backward()
    assert len(made) > 1
