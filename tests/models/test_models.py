"""Each architecture: parameter count, shapes, a neuron wherever one belongs, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.models import MODELS, conv, mlp, resnet18


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def neurons(net: nn.Module) -> int:
    return sum(isinstance(m, sf.Neuron) for m in net.modules())


def test_resnet18_is_the_published_one() -> None:
    net = resnet18(sf.LIF, 3, 1000, (224, 224))
    assert parameters(net) == 11_689_512
    assert neurons(net) == 17
    assert sum(isinstance(m, nn.Conv2d) for m in net.modules()) == 20


def test_resnet18_halves_the_size_as_published() -> None:
    net = resnet18(sf.LIF, 1, 10, (64, 64))
    sizes = []
    for module in net:
        if not isinstance(module, nn.Flatten | nn.Linear):
            module.register_forward_hook(lambda m, x, y: sizes.append(tuple(y.shape[1:3])))
    sf.Temporal(net)(torch.rand(1, 1, 1, 64, 64))
    assert sizes == [
        *[(64, 32)] * 3,
        *[(64, 16)] * 3,
        *[(128, 8)] * 2,
        *[(256, 4)] * 2,
        *[(512, 2)] * 2,
        (512, 1),
    ]


def test_conv() -> None:
    net = conv(sf.LIF, 1, 10, (28, 28))
    norms = 2 * (32 + 64)
    assert parameters(net) == 9 * 32 + 9 * 32 * 64 + norms + 64 * 7 * 7 * 10 + 10
    assert neurons(net) == 2
    with pytest.raises(ValueError, match="at least"):
        conv(sf.LIF, 1, 10, (3, 8))


def test_mlp() -> None:
    net = mlp(sf.LIF, 1, 10, (8, 8))
    assert parameters(net) == 64 * 256 + 256 * 256 + 4 * 256 + 256 * 10 + 10
    assert neurons(net) == 2


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [(8, 8), (28, 28), (9, 13)])
def test_shapes_and_gradients(name: str, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    net = sf.Temporal(MODELS[name](lambda: sf.LIF(threshold=0.5), 2, 5, size))
    logits = net(torch.rand(3, 4, 2, *size))
    assert logits.shape == (3, 4, 5)
    logits.square().sum().backward()
    for parameter in net.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_every_neuron_is_its_own() -> None:
    net = resnet18(sf.PLIF, 1, 10, (28, 28))
    decays = [p for n, p in net.named_parameters() if "neuron" in n or n.startswith("2.")]
    assert len(decays) == len({id(p) for p in decays}) == 17
