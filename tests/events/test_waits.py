"""Where layers on events read values on the host, which synchronizes with a GPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf
from spikefuse.events import format as event_format
from spikefuse.nn import EventLinear, Events
from tests.events.waits import waits


@pytest.fixture
def lists_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs the interpreter")
    from spikefuse.events import lists_triton

    monkeypatch.setattr(event_format, "_kernels", lambda x: lists_triton)


def network(**options: Any) -> sf.Temporal:
    torch.manual_seed(0)
    layers = []
    for i, (a, b) in enumerate(itertools.pairwise((20, 30, 25, 5))):
        surrogate = sf.surrogate.FastSigmoid(10.0, cutoff=-0.3)
        neuron = sf.LIF(0.9, detach_reset=True, surrogate=surrogate) if i < 2 else None
        layers.append(EventLinear(a, b, neuron, **options))
        nn.init.normal_(layers[-1].weight, std=2.0 / a**0.5)
    return sf.Temporal(nn.Sequential(*layers))


def test_waits_are_found() -> None:
    x, y = torch.rand(5), torch.tensor([0, 1, 2])
    asking: list[Callable[[], Any]] = [
        x[0].item,
        lambda: x.tolist(),
        lambda: x[x > 0.5],
        lambda: x.repeat_interleave(torch.tensor([1, 2, 0, 0, 1])),
        lambda: torch.bincount(y),
        lambda: torch.unique_consecutive(y),
        lambda: torch.equal(x, x),
        lambda: x.index_put_((x > 0.5,), torch.tensor(1.0)),
    ]
    for ask in asking:
        assert waits(ask)
    assert not waits(lambda: x[y])


# Each of the two layers with neurons reads the length of its list. Each of the three reads how many
# events are within its capacity.
@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"impl": "triton"}, 2),
        ({"impl": "triton", "capacity": 0.2}, 2 + 3),
        ({"impl": "triton", "capacity": 0.9, "overflow": "dense"}, 2 + 3),
        ({"impl": "dense"}, 2),
    ],
)
@pytest.mark.usefixtures("lists_by_triton")
def test_training_step(options: dict[str, Any], number: int) -> None:
    net = network(**options)
    x = Events.from_dense((torch.rand(4, 2, 20) < 0.3).float())
    grads: list[Tensor | None] = []

    def step() -> None:
        net(x).square().sum().backward()
        grads.extend(layer.weight.grad for layer in net.net)

    seen = waits(step)
    assert len(seen) == number, seen
    assert all(grad is not None and grad.any() for grad in grads)
    assert 0 < net.net[1].activity.fired < net.net[1].activity.candidates
