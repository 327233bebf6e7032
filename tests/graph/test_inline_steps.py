"""Short scans as operations that Inductor compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import spikefuse as sf
from spikefuse.graph import backend, operations
from spikefuse.graph.inline_steps import MAX_STEPS
from spikefuse.testing import make_input
from tests.definitions import CORE, RESETS_OF, make

NAMES = [*CORE, "SlidingPSN", "IntegerLIF"]


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs that Inductor gets, which run eagerly in its place."""
    found: list[fx.Graph] = []

    def run(gm: fx.GraphModule, inputs: Sequence[Any], _: Any) -> Callable[..., Any]:
        found.append(gm.graph)
        return gm.forward

    monkeypatch.setattr(backend, "inductor", run)
    return found


def number_of(function: Any, graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=function))


class Parallel(nn.Module):
    """Neurons that read the same input, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.neurons = nn.ModuleDict(
            {name: make(name, RESETS_OF.get(name, ("soft",))[0], 4, "cpu") for name in NAMES}
        )

    def forward(self, x: Tensor) -> list[Any]:
        return [n(*[x] * len(n.input_names)) for n in self.neurons.values()]


def test_every_kind_of_neuron(graphs: list[fx.Graph]) -> None:
    net, x = sf.Temporal(Parallel()), make_input((6, 2, 4, 3))
    fused = sf.fuse(net, mode="inductor")
    with torch.no_grad():
        state = found_state = None
        for part in x.split([3, 2, 1]):
            expected, state = net(part, state=state, return_state=True, impl="reference")
            found, found_state = fused(part, state=found_state, return_state=True)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            torch.testing.assert_close(found_state, state, rtol=0, atol=0)
    for graph in graphs:
        assert number_of(operations.run_steps, graph) == len(NAMES)
        assert number_of(operations.scan, graph) == 0


def test_scans_that_remain(graphs: list[fx.Graph]) -> None:
    """Those of many steps, and those that need a gradient."""
    neurons = nn.Sequential(sf.LIF(), sf.PLIF(0.5))
    fused, x = sf.fuse(sf.Temporal(neurons), mode="inductor"), torch.rand(MAX_STEPS + 1, 2, 3)
    fused(x[1:])
    with torch.no_grad():
        fused(x)
    inlined = [(number_of(operations.run_steps, g), number_of(operations.scan, g)) for g in graphs]
    assert inlined == [(1, 1), (0, 2)]


def test_parameters_are_read_in_every_call(graphs: list[fx.Graph]) -> None:
    neuron = sf.LIF(nn.Parameter(torch.tensor([0.25, 0.5])), threshold=0.75)
    net, x = sf.fuse(sf.Temporal(neuron), mode="inductor"), torch.full((2, 1, 2), 0.5)
    stream = sf.Stream(net)
    # 0.5, then 0.625 and 0.75
    assert [stream(step).tolist() for step in x] == [[[0.0, 0.0]], [[0.0, 1.0]]]
    with torch.no_grad():
        neuron.decay.fill_(0.5)
    stream.reset()
    assert [stream(step).tolist() for step in x] == [[[0.0, 0.0]], [[1.0, 1.0]]]
    net.net.threshold = 0.8
    stream.reset()
    assert [stream(step).tolist() for step in x] == [[[0.0, 0.0]], [[0.0, 0.0]]]
    assert len(graphs) > 1
