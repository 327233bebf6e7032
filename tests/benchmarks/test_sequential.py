"""Networks that read images pixel by pixel."""

from __future__ import annotations

import pytest
import torch

from benchmarks import sequential
from benchmarks.sequential import DELAYS, MASKED_PSN, S4D
from spikefuse.data import Images


def test_state_space_neurons_match_a_loop_over_time() -> None:
    torch.manual_seed(0)
    neurons = sequential.StateSpace(3, states=4)
    neurons.surrogate = torch.nn.Identity()  # type: ignore[assignment]
    x = torch.randn(20, 2, 3)
    p = {name: value.detach().double() for name, value in neurons.named_parameters()}
    dt, rate = p["log_dt"].exp(), p["log_rate"].exp()
    decay = torch.exp(dt * torch.complex(-rate, p["frequency"]))
    z, expected = torch.zeros(2, 3, 4, dtype=torch.complex128), []
    for current in x.double():
        z = decay * z + dt * current.unsqueeze(-1)
        potential = 2 * (torch.view_as_complex(p["output"]) * z).sum(-1).real
        expected.append(potential + p["skip"] * current + p["bias"])
    torch.testing.assert_close(neurons(x).double(), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [S4D, MASKED_PSN, DELAYS])
def test_outputs_depend_on_earlier_pixels_only(name: str) -> None:
    torch.manual_seed(0)
    net = sequential.make_network(name, 30, [16]).eval()
    x = 40 * torch.rand(30, 4, 1)
    later, earlier = x.clone(), x.clone()
    later[20:], earlier[0] = 0, 40
    y = net(x)
    torch.testing.assert_close(net(later)[:20], y[:20])
    assert not torch.equal(net(earlier), y)


def test_all_images_are_permuted_alike() -> None:
    pixels = torch.arange(50).byte().view(2, 1, 5, 5)
    images = Images(pixels, torch.tensor([3, 1]))
    first, second = sequential.ordered(images, "permuted").pixels.squeeze(2)
    assert torch.equal(second, first + 25)
    assert not torch.equal(first, pixels[0].flatten())
    assert torch.equal(first.sort().values, pixels[0].flatten())
    in_order = sequential.ordered(images, "sequential")
    assert torch.equal(in_order.pixels[1].flatten(), pixels[1].flatten())
    assert in_order.labels.tolist() == [3, 1]
