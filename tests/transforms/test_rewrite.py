"""Parts of models that can't be traced as a whole, and graphs in their places."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.transforms.rewrite import Rewritten

HINT = "torch.fx cannot trace it: "


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), sf.LIF(0.5, 0.3))


class Values(nn.Module):
    """Depends on values, around two parts that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([pair(), pair()])
        self.bn, self.lif = nn.BatchNorm1d(6), sf.LIF(0.5, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts[0](x) if x.sum() > 0 else self.parts[0](-x)
        return self.lif(self.bn(self.parts[1](y)))


def temporal(*layers: nn.Module) -> sf.Temporal:
    torch.manual_seed(0)
    for parameter in (p for layer in layers for p in layer.parameters() if p.ndim == 2):
        nn.init.normal_(parameter)
    return sf.Temporal(nn.Sequential(*layers))


def assert_same(fused: sf.Temporal, net: sf.Temporal) -> None:
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1))
    fused, net = copy.deepcopy(fused), copy.deepcopy(net)
    actual, expected = fused(x, impl="reference"), net(x, impl="reference")
    assert expected.any()
    assert torch.equal(actual, expected)
    assert [*fused.state_dict()] == [*net.state_dict()]
    torch.testing.assert_close(fused.state_dict(), net.state_dict())


def fused_norms(fused: nn.Module) -> list[str | None]:
    return [place.norm for place in fused.fusion.fused]


def left(fused: nn.Module) -> dict[str | None, str | None]:
    return {place.norm or place.neuron: place.reason for place in fused.fusion.left}


def test_around_what_cannot_be_traced() -> None:
    """All that surrounds it is one graph, and so is each part in it."""
    net = temporal(*pair(), Values(), pair())
    fused = sf.fuse(net)
    assert fused_norms(fused) == ["net.1", "net.3.parts.0.1", "net.3.parts.1.1", "net.4.1"]
    reason = left(fused)["net.3.bn"]
    assert reason == left(fused)["net.3.lif"]
    assert reason.startswith(f"'net.3' around it: {HINT}TraceError")
    assert isinstance(fused.net, Rewritten)
    assert type(fused.net.get_submodule("3")) is Values
    assert isinstance(fused.net.get_submodule("3").parts[0], Rewritten)
    assert_same(fused, net)
    # The original is as it was.
    assert not any(isinstance(m, Rewritten) for m in net.modules())


def test_a_model_that_cannot_be_traced() -> None:
    net = sf.Temporal(Values())
    fused = sf.fuse(net)
    assert type(fused.net) is Values
    assert fused.net is not net.net
    assert fused_norms(fused) == ["net.parts.0.1", "net.parts.1.1"]
    assert_same(fused, net)


class Stores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return 2 * x


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class Aliases(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = z = 2 * x
        y += 1
        return y + z


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Identity())
    module.register_forward_hook(lambda m, x, y: 2 * y)
    return module


@pytest.mark.parametrize("make", [Stores, Counts, Aliases, hooked])
def test_what_a_graph_would_not_do_is_done(make) -> None:
    net = temporal(make(), *pair())
    before = [{**vars(m), **m.state_dict()} for m in net.net[0].modules()]
    fused = sf.fuse(net)
    assert [{**vars(m), **m.state_dict()} for m in net.net[0].modules()] == before
    assert fused_norms(fused) == ["net.2"]
    assert isinstance(fused.net, Rewritten)
    assert_same(fused, net)
    fused(torch.randn(4, 3, 6))
    if make is Stores:
        assert net.net[0].seen.shape == (12, 6)
    if make is Counts:
        assert net.net[0].count == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Stores, "its forward sets Whole.seen"),
        (Counts, "its forward sets Whole.count"),
        (Aliases, "its forward changes a tensor in place and reads it by another name"),
    ],
)
def test_why_a_model_is_left(kind: type[nn.Module], reason: str) -> None:
    class Whole(kind):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.lif = nn.BatchNorm1d(6), sf.LIF(0.5, 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return self.lif(self.bn(super().forward(x)))

    net = temporal(nn.Linear(6, 6), Whole())
    with pytest.warns(UserWarning, match=f"nothing was fused: 'net.1' around it: {HINT}{reason}"):
        assert sf.fuse(net) is net


def test_hooks_around_a_pair_still_run() -> None:
    net = temporal(*pair(), pair())
    calls = []
    net.net[3].register_forward_pre_hook(lambda m, args: calls.append(args[0].shape))
    fused = sf.fuse(net)
    assert calls == []
    assert fused_norms(fused) == ["net.1"]
    assert left(fused)["net.3.1"] == "'net.3' around it: it has hooks"
    fused(torch.randn(4, 3, 6))
    assert calls == [(12, 6)]


def test_more_than_tensors_in_the_state_dict() -> None:
    class Extra(nn.Sequential):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            assert state == 3

    net = temporal(nn.Linear(6, 6), Extra(*pair()))
    fused = sf.fuse(net)
    assert fused_norms(fused) == ["net.1.1"]
    assert fused.state_dict()["net.1._extra_state"] == 3
    assert net.load_state_dict(fused.state_dict()) == ([], [])
    with pytest.warns(UserWarning, match="it defines get_extra_state"):
        sf.fuse(sf.Temporal(Extra(*pair())))


def test_attributes_go_along() -> None:
    net = temporal(*pair())
    net.net.num_classes = 6
    assert copy.deepcopy(sf.fuse(net)).net.num_classes == 6


def test_random_numbers_and_modes_are_left_alone() -> None:
    net = temporal(nn.Dropout(0.5), *pair())
    net.net[2].eval()
    modes, state = [m.training for m in net.modules()], torch.get_rng_state()
    fused = sf.fuse(net)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in fused.modules()] == [m.training for m in net.modules()] == modes
