"""Layers on events on a GPU: lists by Triton and dense products, against ordinary layers there."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.kernels import event_lists_numba, event_lists_triton
from spikefuse.nn import EventLinear, Events, EventStream, RowAdam

WIDTHS = (700, 980, 490, 20)


def neuron() -> sf.LIF:
    surrogate = sf.surrogate.FastSigmoid(10.0, cutoff=-0.1)
    return sf.LIF(0.95, detach_reset=True, surrogate=surrogate)


def networks(**options) -> tuple[sf.Temporal, sf.Temporal]:
    """On events, and the same of ordinary layers."""
    torch.manual_seed(0)
    ours, others = [], []
    for i, (a, b) in enumerate(itertools.pairwise(WIDTHS)):
        layer = EventLinear(a, b, neuron() if i < len(WIDTHS) - 2 else None, **options)
        # Such that no potential comes near a threshold by rounding: few values, and exact sums.
        with torch.no_grad():
            layer.weight.copy_(torch.randint(-3, 4, (a, b)) / 16)
            layer.bias.zero_()
        linear = nn.Linear(a, b)
        linear.load_state_dict({"weight": layer.weight.t(), "bias": layer.bias})
        ours.append(layer)
        others += [linear] if layer.neuron is None else [linear, neuron()]
    return tuple(sf.Temporal(nn.Sequential(*n)).cuda() for n in (ours, others))


@pytest.mark.parametrize("impl", ["auto", "triton", "dense"])
@pytest.mark.parametrize("sparse_grad", [False, True])
def test_as_ordinary_layers(impl: str, sparse_grad: bool) -> None:
    ours, others = networks(impl=impl, sparse_grad=sparse_grad)
    x = (torch.rand(25, 6, 700, device="cuda") < 0.03).float()
    y, expected = ours(Events.from_dense(x)), others(x)
    assert 0.001 < ours.net[1].activity.rate < 0.6
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    linears = [m for m in others.net if isinstance(m, nn.Linear)]
    for layer, linear in zip(ours.net, linears, strict=True):
        for a, b in (
            (layer.weight.grad.to_dense().t(), linear.weight.grad),
            (layer.bias.grad, linear.bias.grad),
        ):
            assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.parametrize("width", [1, 700, 5000])
def test_lists(width: int) -> None:
    marks = torch.randint(3, (50, width)).float() * (torch.rand(50, width) < 0.1)
    for a, b in zip(
        event_lists_triton.listed(marks.cuda()), event_lists_numba.listed(marks), strict=True
    ):
        assert torch.equal(a.cpu(), b)


def test_a_step_of_row_adam() -> None:
    weights = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(30, 40, device="cpu").to(device))
        optimizer = RowAdam([weight])
        for k in range(3):
            rows = torch.tensor([[1, 7, 10 + k]], device=device)
            values = torch.randn(3, 40).to(device)
            with torch.sparse.check_sparse_tensor_invariants(False):
                weight.grad = torch.sparse_coo_tensor(rows, values, (30, 40), is_coalesced=True)
            optimizer.step()
        weights.append(weight.detach().cpu())
    torch.testing.assert_close(*weights)


def test_steps_of_one_sample_in_a_cuda_graph() -> None:
    ours, _ = networks()
    spikes = (torch.rand(5, 1, 700, device="cuda") < 0.03).float()
    expected = ours(Events.from_dense(spikes))[:, 0]
    stream = EventStream(ours.net)
    x = spikes[0, 0].clone()
    y, state = stream(x)
    torch.testing.assert_close(y, expected[0], rtol=1e-4, atol=1e-4)
    with torch.cuda.stream(torch.cuda.Stream()):
        stream(x, state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # which refuses whatever waits for the GPU
        y, after = stream(x, state)
    for spike, wanted in zip(spikes[1:, 0], expected[1:], strict=True):
        x.copy_(spike)
        graph.replay()
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
        for old, new in zip(state, after, strict=True):
            old[0].copy_(new[0])
