"""Channels-last memory, as on a GPU: equal results, and fewer copies where nothing depends on the
layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import spikefuse as sf
from spikefuse.graph import layout, operations
from spikefuse.graph.backend import apply_passes
from spikefuse.graph.layout import use_channels_last
from spikefuse.graph.report import GraphReport
from spikefuse.models import MODELS
from tests.graph.graphs import targets


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pass take tensors on a CPU for those on a GPU."""
    monkeypatch.setattr(layout, "_is_on_gpu", lambda node: not node.kwargs)


MAPS = torch.rand(4, 3, 6, 6)
WEIGHT, BIAS = torch.rand(5, 3, 3, 3), torch.rand(5)
LINES, POINTWISE = torch.rand(4, 3, 7), torch.rand(5, 3, 1)


def changed(function: Callable[..., Tensor], *args: Tensor) -> fx.GraphModule:
    """The graph of a function after the pass, which computes the same."""
    gm, run = compiled(function, lambda gm: use_channels_last(gm.graph))
    torch.testing.assert_close(run(*args), function(*args), rtol=1e-4, atol=1e-4)
    return gm[0]


def compiled(
    function: Callable[..., Any], change: Callable[[fx.GraphModule], None]
) -> tuple[list[fx.GraphModule], Callable[..., Any]]:
    """A function that runs a changed graph, which is in the list after the first call."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        change(gm)
        gm.graph.lint()
        gm.recompile()
        found.append(gm)
        return gm.forward

    torch.compiler.reset()
    return found, torch.compile(function, backend=backend, fullgraph=True)


def test_a_cpu_computes_as_before() -> None:
    gm = changed(lambda x, w: torch.conv2d(x, w).contiguous(), MAPS, WEIGHT)
    assert targets(gm) == [torch.conv2d, "contiguous"]


def test_convolutions(on_gpu: None) -> None:
    gm = changed(lambda x, w, b: torch.conv2d(x, w, b, 2, 1), MAPS, WEIGHT, BIAS)
    assert targets(gm) == [operations.conv2d]
    (y,) = gm(MAPS, WEIGHT, BIAS)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_views_of_convolutions(on_gpu: None) -> None:
    """Which channels-last maps do not allow."""
    gm = changed(lambda x, w: (torch.conv2d(x, w) * 2).view(4, -1).view(torch.int32), MAPS, WEIGHT)
    assert targets(gm)[-2:] == ["reshape", "view"]


# Convolutions of [N, C, L], and whether each is a linear layer.
LINEAR = {
    "pointwise": (lambda x, w, b: torch.conv1d(x, w), True),
    "with a bias": (lambda x, w, b: torch.conv1d(x, w, b), True),
    "with defaults": (lambda x, w, b: torch.conv1d(x, w, b, 1, 0, 1, 1), True),
    "with tuples": (lambda x, w, b: torch.conv1d(x, w, b, (1,), (0,), (1,)), True),
    "of a window": (lambda x, w, b: torch.conv1d(x, w.expand(-1, -1, 2)), False),
    "with a stride": (lambda x, w, b: torch.conv1d(x, w, b, 2), False),
    "with padding": (lambda x, w, b: torch.conv1d(x, w, b, 1, 1), False),
    "with padding by name": (lambda x, w, b: torch.conv1d(x, w, b, padding="same"), False),
    "in groups": (lambda x, w, b: torch.conv1d(x[:, :2], w[:4, :1], b[:4], 1, 0, 1, 2), False),
    "of one sample": (lambda x, w, b: torch.conv1d(x[0], w, b), False),
}


@pytest.mark.parametrize("name", LINEAR)
def test_pointwise_convolutions(name: str, on_gpu: None) -> None:
    function, is_linear = LINEAR[name]
    gm = changed(function, LINES, POINTWISE, BIAS)
    assert (operations.pointwise_conv1d in targets(gm)) == is_linear


def kernels(x: Tensor) -> Tensor:
    """Stands for a block or scan, which takes any dense layout."""
    return torch.matmul(x, x.transpose(-1, -2))


# What reads a tensor behind `contiguous()`, and whether the copy is dropped.
READERS = {
    "convolution": (lambda y, w: torch.conv2d(y.contiguous(), w), True),
    "sum": (lambda y, w: y.contiguous() + y, True),
    "product": (lambda y, w: kernels(y.contiguous()), True),
    "view": (lambda y, w: kernels(y.contiguous().view(4, 5, 36)), True),
    "several views": (lambda y, w: kernels(y.contiguous().flatten(2).unsqueeze(0)), True),
    "returned": (lambda y, w: y.contiguous(), False),
    "a view returned": (lambda y, w: y.contiguous().view(4, -1), False),
    "strides": (lambda y, w: torch.as_strided(y.contiguous(), (4, 5), (180, 36)), False),
    "one of two": (lambda y, w: (z := y.contiguous()).sin().sum() + kernels(z), False),
    "an item": (lambda y, w: kernels((y.transpose(2, 3).contiguous() + 1)[0].view(5, -1)), True),
    "another format": (
        lambda y, w: torch.conv2d(y.contiguous(memory_format=torch.channels_last), w),
        False,
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_copies(name: str, on_gpu: None) -> None:
    function, is_dropped = READERS[name]
    weights = torch.rand(5, 5, 1, 1)
    gm = changed(lambda x, w, v: function(torch.conv2d(x, w, None, 1, 1), v), MAPS, WEIGHT, weights)
    assert ("contiguous" not in targets(gm)) == is_dropped


def test_a_copy_of_what_changes(on_gpu: None) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = torch.conv2d(x, w).transpose(2, 3)
        z = y.contiguous()
        y.mul_(2)
        return torch.matmul(z, y)

    gm = changed(function, MAPS, WEIGHT)
    assert "contiguous" in targets(gm)


def test_heads_are_merged_into_tokens(on_gpu: None) -> None:
    """The copy of [B, h, d, N] by a reshape to [B, h * d, N] is [B, N, h * d] in memory."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        heads = x.reshape(4, 2, 3, 7).transpose(2, 3)  # [B, h, N, d]
        y = torch.matmul(heads, heads.transpose(2, 3)) @ heads
        return torch.conv1d(y.transpose(2, 3).reshape(4, 6, 7), w)

    x, w = torch.rand(4, 6, 7), torch.rand(5, 6, 1)
    gm = changed(function, x, w)
    assert "reshape" in targets(gm)  # of the input, which is a view
    (conv,) = gm.graph.find_nodes(op="call_function", target=operations.pointwise_conv1d)
    assert conv.args[0].target == "transpose"


class Maps(nn.Module):
    """Maps that become tokens, by steps, as in published transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.q, self.q_bn = nn.Conv1d(8, 8, 1, bias=False), nn.BatchNorm1d(8)
        self.lif, self.q_lif, self.pool = sf.LIF(0.5, 0.3), sf.LIF(0.5, 0.3), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        T, B = x.shape[:2]
        y = self.pool(self.bn(self.conv(x.flatten(0, 1))))
        y = self.lif(y.reshape(T, B, 8, -1).contiguous())
        z = self.q_bn(self.q(y.flatten(0, 1))).reshape(T, B, 8, -1).contiguous()
        heads = self.q_lif(z).transpose(2, 3).reshape(T, B, -1, 2, 4).permute(0, 1, 3, 2, 4)
        heads = heads.contiguous()
        z = (heads @ (heads.transpose(-2, -1) @ heads)).transpose(3, 4).reshape(T, B, 8, -1)
        return F.relu(self.q(z.flatten(0, 1).contiguous())) + y.flatten(0, 1)


def test_models_whose_blocks_return_sums(on_gpu: None) -> None:
    torch.manual_seed(0)
    net = sf.Temporal(MODELS["ms_resnet18"](lambda: sf.LIF(threshold=0.3), 2, 5, (8, 8)))
    fused, x = sf.fuse(net), torch.rand(2, 2, 2, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), net(x), rtol=1e-3, atol=1e-3)
    assert fused.fusion.summary == "21 of 21 batch norms fused with the neuron after them"


def test_a_network(on_gpu: None) -> None:
    net, x = Maps(), torch.rand(4, 2, 3, 8, 8)
    other = copy.deepcopy(net)
    found, fused = compiled(other, lambda gm: apply_passes(gm, GraphReport()))
    results = []
    for module, run in ((net, net), (other, fused)):
        y = run(x)
        (y * torch.arange(float(y.numel())).view(y.shape).cos()).sum().backward()
        results.append([y, *(p.grad for p in module.parameters()), *module.buffers()])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
    calls = targets(found[0])
    assert calls.count(operations.pointwise_conv1d) == 2
    assert calls.count(operations.conv2d) == 1


def test_layouts_of_gradients(on_gpu: None) -> None:
    """Those of a mean are converted once, before they meet those of the layers."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = torch.conv2d(x, w, None, 1, 1)
        z = y + torch.conv2d(y, v)
        return z.flatten(2).mean(2)

    x, w, v = (t.clone().requires_grad_() for t in (MAPS, WEIGHT, torch.rand(5, 5, 1, 1)))
    gm = changed(function, x, w, v)
    assert targets(gm).count(operations.keep_layout) == 1
    found: list[bool] = []

    def observe(x: Tensor) -> Tensor:
        x.register_hook(
            lambda grad: found.append(grad.is_contiguous(memory_format=torch.channels_last))
        )
        return x

    for node in gm.graph.nodes:
        if node.target is operations.conv2d:
            with gm.graph.inserting_after(node):
                seen = gm.graph.call_function(observe, (node,))
            node.replace_all_uses_with(
                seen, delete_user_cb=lambda user, seen=seen: user is not seen
            )
    gm.recompile()
    torch.autograd.backward(gm(x, w, v), torch.rand(4, 5))
    assert found == [True, True]


def test_gradients_of_an_expanded_tensor() -> None:
    x = torch.rand(1, 3, requires_grad=True)
    y = operations.keep_layout(x.expand(4, 3))
    y.backward(torch.ones(3, 4).t())
    assert torch.equal(x.grad, torch.full((1, 3), 4.0))
