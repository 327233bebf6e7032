"""Where layers on events read values on the host, which on a GPU is to wait for it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import spikefuse as sf
from spikefuse.events import format as events
from spikefuse.nn import EventLinear, Events

aten = torch.ops.aten
# Operations that read a value on the host, for itself or for the size of their result.
WAITING = {
    *(aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount),
    *(aten._unique2, aten.unique_consecutive, aten.unique_dim),
}


class Waits(TorchDispatchMode):
    """Notes the operations for which the host of a GPU would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        masks = [x for x in args[1] if x is not None] if packet in _INDEXING else []
        if (
            packet in WAITING
            or any(x.dtype in (torch.bool, torch.uint8) for x in masks)
            or (packet is aten.repeat_interleave and kwargs.get("output_size") is None)
        ):
            self.seen.append(str(func))
        return func(*args, **kwargs)


_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


@pytest.fixture
def lists_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs the interpreter")
    from spikefuse.events import lists_triton as event_lists_triton

    monkeypatch.setattr(events, "_kernels", lambda x: event_lists_triton)


def network(**options: Any) -> sf.Temporal:
    torch.manual_seed(0)
    layers = []
    for i, (a, b) in enumerate(itertools.pairwise((20, 30, 25, 5))):
        surrogate = sf.surrogate.FastSigmoid(10.0, cutoff=-0.3)
        neuron = sf.LIF(0.9, detach_reset=True, surrogate=surrogate) if i < 2 else None
        layers.append(EventLinear(a, b, neuron, **options))
        nn.init.normal_(layers[-1].weight, std=2.0 / a**0.5)
    return sf.Temporal(nn.Sequential(*layers))


def waits(run: Callable[[], Any]) -> list[str]:
    """The operations in `run` for which the host of a GPU would wait."""
    original = Tensor.tolist
    with Waits() as found, pytest.MonkeyPatch.context() as patch:

        def tolist(x: Tensor) -> Any:  # reads the memory of a CPU, by no operation
            found.seen.append("tolist")
            return original(x)

        patch.setattr(Tensor, "tolist", tolist)
        run()
    return found.seen


def test_they_are_seen() -> None:
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


# Each of the two layers with neurons asks once how long its list is. Each of the three asks what
# is left within its capacity, and which rows a sparse gradient has.
@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"impl": "triton"}, 2),
        ({"impl": "triton", "capacity": 0.2}, 2 + 3),
        ({"impl": "triton", "capacity": 0.9, "overflow": "dense"}, 2 + 3),
        ({"impl": "triton", "sparse_grad": True}, 2 + 3),
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
    assert all(grad is not None and grad.to_dense().any() for grad in grads)
    assert 0 < net.net[1].activity.fired < net.net[1].activity.candidates
