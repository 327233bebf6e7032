"""Networks that run one time step at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.nn.call import active
from spikefuse.nn.encode import direct
from tests.grid import on_grid, with_exact_layers

IMAGES = on_grid((12, 2, 1, 8, 8), spread=1.0)


class Residual(nn.Module):
    """Convolutions, norms, a residual and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.lif1, self.lif2 = sf.LIF(0.5, 0.3), sf.ALIF(threshold=0.3)
        self.head, self.out = nn.Linear(256, 5), sf.PLIF(0.6, 0.2, channels=5)
        with_exact_layers(self)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.lif1(self.bn1(self.conv1(x)))
        y = self.lif2(self.bn2(self.conv2(x)) + x)
        return {"hidden": y, "out": self.out(self.head(y.flatten(1)))}


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal on CPUs; on GPUs convolutions round, so that a few spikes may differ."""
    assert actual.shape == expected.shape
    if actual.is_cuda:
        assert (actual != expected).float().mean() < 0.02
    else:
        assert torch.equal(actual, expected)


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def net(request: pytest.FixtureRequest, device: str) -> sf.Temporal:
    net = sf.Temporal(Residual()).to(device)
    net(IMAGES.to(device))  # so that the running statistics are not those at the start
    return (sf.fuse(net) if request.param else net).eval()


def test_steps_equal_a_sequence(net: sf.Temporal, device: str) -> None:
    x = IMAGES.to(device)
    with torch.no_grad():
        expected, final = net(x, return_state=True)
    stream = sf.Stream(net)
    for _ in range(2):
        steps = [stream(step) for step in x]
        for key, value in expected.items():
            assert_same(torch.stack([step[key] for step in steps]), value)
            assert not any(step[key].requires_grad for step in steps)
        assert stream.state is not None
        assert list(stream.state) == list(final)
        for name, states in final.items():
            for actual, wanted in zip(stream.state[name], states, strict=True):
                assert x.is_cuda or torch.equal(actual, wanted)
        stream.reset()
        assert stream.state is None


def test_states_are_exchanged_with_a_sequence(net: sf.Temporal, device: str) -> None:
    x = IMAGES.to(device)
    with torch.no_grad():
        expected = net(x)["out"]
        _, state = net(x[:5], return_state=True)
    stream = sf.Stream(net.net)
    stream.state = state
    for step, wanted in zip(x[5:8], expected[5:8], strict=True):
        assert_same(stream(step)["out"], wanted)
    with torch.no_grad():
        assert_same(net(x[8:], state=stream.state)["out"], expected[8:])
    # A step leaves the earlier state as it was.
    stream.state = state
    assert_same(stream(x[5])["out"], expected[5])


def test_arguments_and_neurons_that_are_not_called() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = sf.IF(2.0), sf.IF(2.0)

        def forward(self, x: Tensor, *, skip: bool) -> Tensor:
            return self.first(x) if skip else self.second(self.first(x) + x)

    stream, x = sf.Stream(Net()), torch.ones(1, 3)
    assert [stream(x, skip=skip)[0, 0].item() for skip in (False, True, False)] == [0, 1, 1]


def test_an_encoded_image_and_inference_mode(net: sf.Temporal, device: str) -> None:
    image = IMAGES[0].to(device)
    with torch.no_grad():
        expected = net(direct(image, 3))["out"]
    stream = sf.Stream(net)
    with torch.inference_mode():
        actual = torch.stack([stream(image)["out"] for _ in range(3)])
    assert_same(actual, expected)


def test_a_failed_step_leaves_the_state() -> None:
    stream = sf.Stream(nn.Sequential(sf.IF(2.0), nn.Linear(3, 2)))
    stream(torch.ones(4, 3))
    before = stream.state
    with pytest.raises(
        ValueError, match=r"state v is \[4, 3\] on cpu: expected \[5, 3\]"
    ) as caught:
        stream(torch.ones(5, 3))
    assert caught.value.__notes__ == [
        "a stream reads its inputs as one time step [B, ...], without T; call reset() before "
        "another sequence"
    ]
    assert stream.state is before
    assert active.call is None


def test_batch_norms_need_running_statistics(device: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), sf.LIF()).to(device)
    stream, x = sf.Stream(net), torch.ones(2, 3, device=device)
    message = "batch norm 'net.1' would take the statistics of a single step: call net.eval"
    with pytest.raises(ValueError, match=message):
        stream(x)
    with pytest.raises(ValueError, match=message):
        sf.Stream(sf.fuse(sf.Temporal(net)))(x)
    net.eval()
    stream(x)
    net[1] = nn.BatchNorm1d(4, track_running_stats=False).eval()
    with pytest.raises(ValueError, match=message):
        stream(x)


def test_wrong_networks_and_states() -> None:
    with pytest.raises(TypeError, match=r"net is a builtin\w+: expected a torch.nn.Module"):
        sf.Stream(torch.relu)
    with pytest.raises(ValueError, match="net contains a Temporal: stream the Temporal, or"):
        sf.Stream(nn.Sequential(sf.Temporal(sf.LIF()), nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"layer 'net.0' \(GRU\) has a memory of its own"):
        sf.Stream(nn.Sequential(nn.GRU(2, 2)))(torch.ones(1, 2))
    stream = sf.Stream(nn.Sequential(nn.Linear(2, 2), sf.LIF()))
    with pytest.raises(ValueError, match=r"entries for \(0\): expected \(net.1\)"):
        stream.state = {"0": ()}
    with pytest.raises(TypeError, match="state is a tuple: expected a dict"):
        stream.state = (torch.zeros(1, 2),)
    assert str(stream).startswith("Stream(Sequential(\n  (0): Linear")
