"""A block inside torch.compile."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import spikefuse as sf


@pytest.fixture(autouse=True)
def reset():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def block() -> sf.nn.Block:
    return sf.nn.Block(nn.BatchNorm1d(6), sf.PLIF(0.5, channels=6, threshold=0.5))


def results(net: nn.Module, block: sf.nn.Block, batch: int, has_residual: bool) -> list[Tensor]:
    """Outputs, gradients and statistics of a call in training, and the output of another one in
    evaluation."""
    torch.manual_seed(batch)
    leaves = [torch.randn(s, requires_grad=True) for s in ((5, batch, 6),) * 2 + ((batch, 6),)]
    *inputs, state = leaves
    if not has_residual:
        leaves = [inputs.pop(0), state]
    y, (v,) = net.train()(*inputs, state=(state,), return_state=True)
    block.zero_grad()
    (y.sum() + (v * v).sum()).backward()
    with torch.no_grad():
        evaluated = net.eval()(*inputs)
    gradients = [x.grad for x in (*leaves, *block.parameters())]
    return [y, v, evaluated, *gradients, *(b.clone() for b in block.buffers())]


@pytest.mark.parametrize("has_residual", [False, True])
def test_one_graph_for_all_batches(has_residual: bool) -> None:
    expected, actual, graphs = block(), block(), []
    aot_eager = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(actual, fullgraph=True, backend=backend)
    for batch in (3, 4, 6, 7):
        pairs = (results(net, b, batch, has_residual) for net, b in
                 ((compiled, actual), (expected, expected)))  # fmt: skip
        torch.testing.assert_close(*pairs)
    assert len(graphs) == 4  # training and evaluation, of one batch and of any


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that Inductor imports
def test_inductor() -> None:
    expected, actual = block(), block()
    compiled = torch.compile(actual, fullgraph=True, dynamic=False)
    pairs = (results(net, b, 3, True) for net, b in ((compiled, actual), (expected, expected)))
    torch.testing.assert_close(*pairs, rtol=1e-3, atol=1e-3)


def test_settings_that_change() -> None:
    net = block().eval()
    compiled, x = torch.compile(net, fullgraph=True, backend="aot_eager"), torch.randn(5, 4, 6)
    found = []
    for change in (
        lambda: None,
        lambda: setattr(net.neuron, "threshold", 0.1),
        lambda: setattr(net.norm, "eps", 0.5),
        lambda: setattr(net.neuron, "reset", "soft"),
    ):
        change()
        found.append(compiled(x))
        assert torch.equal(found[-1], net(x))
    assert all(not torch.equal(a, b) for a, b in pairwise(found))


def test_a_copy_is_its_own() -> None:
    net, x = block(), torch.randn(5, 4, 6)
    compiled = torch.compile(net, backend="aot_eager")
    other = copy.deepcopy(compiled)
    other(x)
    assert net.norm.num_batches_tracked == 0
