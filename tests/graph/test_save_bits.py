"""Spikes that compiled graphs save as bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import spikefuse as sf
from spikefuse.graph import backend
from spikefuse.memory.spikes import MIN_VALUES


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def split_graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """Let joint graphs be split as Inductor splits them, but run eagerly; and collect them."""
    found: list[fx.Graph] = []

    def run(gm: fx.GraphModule, inputs: Any, rewrite: Callable[..., Any] | None = None) -> Any:
        def split(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            if rewrite is not None:
                rewrite(joint.graph)
                joint.graph.lint()
                joint.recompile()
            found.append(joint.graph)
            return min_cut_rematerialization_partition(joint, *args, compiler="inductor", **kwargs)

        def compiler(part: fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(part.forward)

        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=split)(
            gm, inputs
        )

    monkeypatch.setattr(backend, "inductor", run)
    return found


def lif() -> sf.LIF:
    return sf.LIF(0.5, 0.2)


def conv(channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, 8, 3, padding=1, bias=False)


class Branches(nn.Module):
    """Spikes that several layers read: as they are, in other shapes, and from a max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(conv(3), nn.BatchNorm2d(8), lif())
        self.left, self.right, self.next = conv(8), nn.Conv2d(8, 8, 1, bias=False), conv(8)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.sum, self.last = lif(), sf.PLIF(0.5, threshold=0.2)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.sum(self.norms[0](self.left(x)) + self.norms[1](self.right(x)))
        z = self.last(self.norms[2](self.next(F.max_pool2d(y, 2))) + F.max_pool2d(x, 2))
        tokens = z.flatten(2).transpose(1, 2)
        return self.out(tokens).mean(1) + (tokens @ tokens.transpose(1, 2)).mean((1, 2))[:, None]


def recurrent() -> nn.Module:
    layers = nn.Linear(48, 64), sf.Recurrent(lif(), 64), nn.Linear(64, 64), sf.ALIF()
    return nn.Sequential(nn.Flatten(), nn.AvgPool1d(16), *layers, nn.Linear(64, 4))


def channels_last() -> nn.Module:
    return Branches().to(memory_format=torch.channels_last)


NETWORKS = {
    "branches": Branches,
    "channels-last": channels_last,
    "recurrent": recurrent,
}


def network(name: str, policy: sf.memory.Policy | None = None) -> sf.Temporal:
    torch.manual_seed(0)
    return sf.fuse(sf.Temporal(NETWORKS[name](), policy), mode="inductor")


def saved_tensors(y: Tensor) -> list[Tensor]:
    """What the nodes of the graph of `y` save."""
    nodes, found = {y.grad_fn}, []
    while nodes:
        node = nodes.pop()
        found += getattr(node, "saved_tensors", ())
        nodes |= {n for n, _ in node.next_functions if n is not None}
    return found


def num_spikes(tensors: list[Tensor]) -> int:
    """How many tensors of zeros and ones in full are among those large enough to be packed."""
    floats = [x for x in tensors if x.is_floating_point() and x.numel() >= MIN_VALUES]
    return sum(bool(((x == 0) | (x == 1)).all()) for x in floats)


def train(net: nn.Module, x: Tensor, dtype: torch.dtype) -> tuple[int, int, list[Tensor]]:
    """The bytes and tensors of spikes that a call saves; its output and gradients."""
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        y = net(x)
    saved = saved_tensors(y)
    net.zero_grad()
    y.float().square().sum().backward()
    size = sum({t.data_ptr(): t.nbytes for t in saved}.values())
    return size, num_spikes(saved), [y, *(p.grad.clone() for p in net.parameters())]


@pytest.mark.usefixtures("blocks_of_any_size")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("branches", torch.float32), ("channels-last", torch.bfloat16), ("recurrent", torch.float32)],
)
def test_saved_tensors(split_graphs: list[fx.Graph], name: str, dtype: torch.dtype) -> None:
    """Spikes are saved as bits, also in a graph of all batch sizes, with the same results."""
    unpacked, packed = network(name, sf.memory.SaveAll()), network(name)
    for batch in (32, 40):
        x = torch.rand(4, batch, 3, 16, 16)
        size, num, expected = train(unpacked, x, dtype)
        less, none, actual = train(packed, x, dtype)
        assert num > none == 0
        assert less < 0.9 * size
        assert all(map(torch.equal, actual, expected))
    assert len(split_graphs) == 4  # of one batch and of any


def test_few_spikes_stay_as_they_are(split_graphs: list[fx.Graph]) -> None:
    y = network("branches")(torch.rand(4, 1, 3, 16, 16))
    assert num_spikes(saved_tensors(y)) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that Inductor imports
def test_inductor() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 64), lif(), nn.Linear(64, 4))
    make = partial(copy.deepcopy, sf.Temporal(layers))
    x = torch.rand(4, 32, 6)
    plain = train(make(), x, torch.float32)
    _, num, found = train(sf.fuse(make(), mode="inductor"), x, torch.float32)
    assert num == 0
    torch.testing.assert_close(found, plain[2])
