"""Operations of single layers and products are those counted by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from spikefuse.inspect.operations import Operations, count_operations


def spikes(*shape: int, rate: float = 0.4) -> Tensor:
    return (torch.rand(shape) < rate).float()


def counted(call) -> Operations:
    found: list[Operations] = []
    with torch.no_grad(), count_operations(lambda input, operations: found.append(operations)):
        call()
    return found[0] if len(found) == 1 else pytest.fail(f"{len(found)} operations")


def test_a_linear_layer_by_hand() -> None:
    x = torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0], [0, -1, 0, 0]])
    layer = nn.Linear(4, 5)
    assert counted(lambda: layer(x)) == Operations(3 * 5, 0, 3 * 4 * 5, 3, 12, 15)
    x[0, 0] = 0.5
    assert counted(lambda: layer(x)) == Operations(0, 3 * 4 * 5, 3 * 4 * 5, 3, 12, 15)


CONVOLUTIONS = [
    {},
    {"padding": 1},
    {"padding": 1, "stride": 2},
    {"padding": (2, 0), "stride": (1, 3), "dilation": 2},
    {"padding": "same", "dilation": 2},
    {"padding": "valid"},
    {"groups": 2, "padding": 1, "stride": 2},
    {"groups": 4, "padding": 1},
    {"padding": 1, "padding_mode": "circular"},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_convolutions_by_hand(options: dict) -> None:
    torch.manual_seed(0)
    x, layer = spikes(2, 4, 7, 8), nn.Conv2d(4, 8, 3, bias=False, **options)
    found = counted(lambda: layer(x))
    # With weights of 1, each output is the number of spikes that it adds.
    nn.init.ones_(layer.weight)
    y = layer(x)
    assert found.accumulates == y.sum().item() > 0
    assert found.multiplies == 0
    assert found.dense == y.numel() * 9 * 4 / layer.groups
    expected = Operations(0, found.dense, found.dense, found.nonzero, found.inputs, y.numel())
    assert counted(lambda: layer(x / 2)) == expected


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d])
@pytest.mark.parametrize("options", [{}, {"padding": 1, "stride": 2, "groups": 2}])
def test_other_convolutions(kind: type[nn.Module], options: dict) -> None:
    torch.manual_seed(0)
    dims = int(kind.__name__[-2])
    x, layer = spikes(2, 4, *(5, 6, 7)[:dims]), kind(4, 6, 3, bias=False, **options)
    nn.init.ones_(layer.weight)
    found = counted(lambda: layer(x))
    assert found.accumulates == layer(x).sum().item() > 0
    full = kind(4, 6, 3, bias=False, **{**options, "padding": 0})
    per_input = full.weight[0].numel() if "Transpose" in kind.__name__ else None
    if per_input:
        assert found.dense == x.numel() * per_input
    else:
        assert found.dense == layer(x).numel() * layer.weight[0].numel()


def test_an_image_without_a_batch() -> None:
    x, layer = spikes(4, 5, 6), nn.Conv2d(4, 2, 3, bias=False)
    nn.init.ones_(layer.weight)
    assert counted(lambda: layer(x)).accumulates == layer(x).sum().item()


@pytest.mark.parametrize("product", [torch.matmul, torch.Tensor.__matmul__, torch.bmm])
def test_products_of_spikes(product) -> None:
    torch.manual_seed(0)
    a, b = spikes(3, 4, 5), spikes(3, 5, 6)
    noise = torch.rand(3, 5, 6)
    both = sum(
        a[n, i, k] * b[n, k, j]
        for n, i, k, j in itertools.product(range(3), range(4), range(5), range(6))
    )
    assert counted(lambda: product(a, b)).accumulates == both
    assert counted(lambda: product(a, noise)).accumulates == a.sum() * 6
    assert counted(lambda: product(noise.mT, a.mT)).accumulates == a.sum() * 6
    found = counted(lambda: product(noise.mT, noise))
    assert (found.accumulates, found.multiplies) == (0, 3 * 6 * 5 * 6)
    assert counted(lambda: a[0] @ noise[0, :, 0]).accumulates == a[0].sum()
