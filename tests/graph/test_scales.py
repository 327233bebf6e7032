"""The scales of norms with running statistics, which kernels on a GPU compute without gradients."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.block import functional
from spikefuse.block.program import traits
from spikefuse.graph import checkpoint, fuse_norms
from tests.conftest import Backends


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


CASES = {
    "chain": chain,
    "frozen start": frozen_start,
    "changed": changed,
    "other eps": other_eps,
}


@pytest.mark.parametrize("name", CASES)
def test_results(name: str, backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    found, run = list[bool](), functional.run_block

    def noted(program: str, *args: Any) -> Any:
        found.append(traits(program)[1])
        return run(program, *args)

    monkeypatch.setattr(functional, "run_block", noted)
    torch.manual_seed(0)
    net = sf.Temporal(Deep(CASES[name])).to(backends.device)
    fused, x = sf.fuse(copy.deepcopy(net), "eager"), torch.randn(4, 8, 3, device=backends.device)
    impl = backends.impls[-1]
    for with_gradients in (False, True):
        for call in range(2):
            with torch.no_grad():
                for m in (net, fused):  # a change between calls is seen
                    m.net.parts[1][1].running_var.add_(call)
            found.clear()
            with torch.set_grad_enabled(with_gradients):
                expected, actual = net(x, impl=impl), fused(x, impl=impl)
            assert torch.equal(actual, expected)
            assert found == [impl == "triton" and not with_gradients] * 4
    expected.sum().backward()
    actual.sum().backward()
    for a, b in zip(fused.parameters(), net.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_half_precision(backends: Backends) -> None:
    """Vectors are converted before they are computed with."""
    torch.manual_seed(0)
    # Triton's interpreter does not round to the nearest value in half precision.
    norm, impl = Deep(chain).parts[1][1].to(backends.device).bfloat16(), backends.impls[0]
    plain = sf.Temporal(nn.Sequential(norm, sf.LI(0.5)))
    x = torch.randn(4, 50, 6, device=backends.device).bfloat16()
    truth = sf.Temporal(copy.deepcopy(plain.net).double())(x.double(), impl="reference")
    results = sf.fuse(plain, "eager")(x, impl=impl), plain(x, impl=impl)
    actual, expected = (float((y - truth).abs().mean()) for y in results)
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
