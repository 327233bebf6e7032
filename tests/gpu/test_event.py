"""Layers on events on a GPU, by lists and by dense products, against ordinary layers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spikefuse as sf
from spikefuse.events.format import merge_slices
from spikefuse.events.lists import FIRED, NEAR, SliceCounts
from spikefuse.nn import EventLinear, Events, EventStream
from spikefuse.train.activity import ActivityMonitor
from spikefuse.train.processes import Processes

WIDTHS = (700, 980, 490, 20)


def neuron() -> sf.LIF:
    surrogate = sf.surrogate.FastSigmoid(10.0, cutoff=-0.1)
    return sf.LIF(0.95, detach_reset=True, surrogate=surrogate)


def networks(**options) -> tuple[sf.Temporal, sf.Temporal]:
    """Return a network on events, and the same of ordinary layers."""
    torch.manual_seed(0)
    ours, others = [], []
    for i, (a, b) in enumerate(itertools.pairwise(WIDTHS)):
        layer = EventLinear(a, b, neuron() if i < len(WIDTHS) - 2 else None, **options)
        # Few values with exact sums, so that rounding can't move a potential across a threshold.
        with torch.no_grad():
            layer.weight.copy_(torch.randint(-3, 4, (b, a)) / 16)
            layer.bias.zero_()
        linear = nn.Linear(a, b)
        linear.load_state_dict({"weight": layer.weight, "bias": layer.bias})
        ours.append(layer)
        others += [linear] if layer.neuron is None else [linear, neuron()]
    return tuple(sf.Temporal(nn.Sequential(*n)).cuda() for n in (ours, others))


@pytest.mark.parametrize("impl", ["auto", "triton", "dense"])
def test_equals_ordinary_layers(impl: str) -> None:
    ours, others = networks(impl=impl)
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
            (layer.weight.grad, linear.weight.grad),
            (layer.bias.grad, linear.bias.grad),
        ):
            assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.parametrize("width", [1, 700, 5000])
def test_lists(width: int) -> None:
    marks = torch.randint(3, (10, 5, width)).float() * (torch.rand(10, 5, width) < 0.1)
    found, expected = Events.from_marks(marks.cuda()), Events.from_marks(marks)
    for name in ("offsets", "fired", "indices"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name))


@pytest.mark.parametrize("rate", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("width", [1, 700, 5000])
def test_reads_of_lists(width: int, rate: float) -> None:
    torch.manual_seed(0)
    marks = torch.randint(3, (10, 5, width)).float() * (torch.rand(10, 5, width) < rate)
    marks[3, 2], marks[4, 1] = FIRED, NEAR
    lists = Events.from_marks(marks)
    lists = lists.with_values(torch.rand(len(lists.indices)))
    few = lists.truncate(7)
    for mine, other in ((lists.to("cuda"), lists), (lists.to("cuda").truncate(7), few)):
        assert torch.equal(mine.rows().cpu(), other.rows())
        assert torch.equal(mine.is_fired().cpu(), other.is_fired())
        assert torch.equal(mine.values.cpu(), other.values)
        assert torch.equal(mine.to_dense().cpu(), other.to_dense())
        for dtype in (torch.float16, torch.bfloat16):
            cast = mine.with_values(mine.values.to(dtype)).to_dense(dtype)
            assert torch.equal(cast.cpu(), other.to_dense().to(dtype))
            ones = mine.with_values(None).to_dense(dtype)
            assert torch.equal(ones.cpu(), other.with_values(None).to_dense(dtype))


@pytest.mark.parametrize("width", [2, 700, 5000])
def test_merge_slices(width: int) -> None:
    """Merged lists of three slices of the sites equal the list of all sites."""
    torch.manual_seed(0)
    marks = torch.randint(3, (10, 5, width)).float() * (torch.rand(10, 5, width) < 0.05)
    marks[3, 2], marks[4, 1] = FIRED, NEAR
    first = [width * k // 3 for k in range(4)]
    slices = [Events.from_marks(marks[..., a:b].cuda()) for a, b in itertools.pairwise(first)]
    rows = [torch.stack((x.fired, x.offsets.diff().int())) for x in slices]
    counts = SliceCounts.of(torch.stack(rows))
    padded = [F.pad(x.indices, (0, counts.max_size - len(x.indices)), value=-9) for x in slices]
    lists = torch.stack(padded), torch.tensor(first, device="cuda"), counts
    expected = Events.from_marks(marks)
    for part, own in enumerate(slices):
        whole, values, places = merge_slices((10, 5, width), *lists, part)
        for name in ("offsets", "fired", "indices"):
            assert torch.equal(getattr(whole, name).cpu(), getattr(expected, name))
        assert torch.equal(values.cpu(), expected.is_fired())
        assert torch.equal(whole.indices[places], own.indices + first[part])
        assert torch.equal(whole.rows()[places], own.rows())


def waits(run: Callable[[], object]) -> int:
    """Count the synchronizations of the host with the GPU."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(w.message) for w in found)


# As in tests/events/test_waits.py: two layers build lists; all three read what their capacity
# leaves.
@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 2), ({"capacity": 0.1}, 2 + 3)],
    ids=["all", "capacity"],
)
@pytest.mark.parametrize("impl", ["auto", "triton", "dense"])
def test_waits_of_a_training_step(impl: str, options: dict, most: int) -> None:
    assert waits(torch.ones(1, device="cuda").item) == 1
    ours, _ = networks(impl=impl, **options)
    x = Events.from_dense((torch.rand(25, 6, 700, device="cuda") < 0.03).float())
    grad = torch.randn(25, 6, 20, device="cuda")
    activity = ActivityMonitor(ours.net, 1e-3)

    def step() -> None:
        ours.zero_grad()
        torch.autograd.backward([ours(x), activity.penalty(Processes())], [grad, None])

    for _ in range(2):  # compile, and time the choices
        step()
    assert 0 < waits(step) <= most


def test_a_step_is_reproducible() -> None:
    ours, _ = networks(impl="triton", capacity=0.1)
    x = Events.from_dense((torch.rand(25, 6, 700, device="cuda") < 0.03).float())
    found = []
    for _ in range(3):
        ours.zero_grad()
        ours(x).square().sum().backward()
        found.append([p.grad for p in ours.parameters()])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_steps_of_one_sample_in_a_cuda_graph() -> None:
    ours, _ = networks()
    spikes = (torch.rand(5, 1, 700, device="cuda") < 0.03).float()
    expected = ours(Events.from_dense(spikes))[:, 0]
    stream = EventStream(ours.net)
    x = spikes[0, 0].clone()
    torch.testing.assert_close(stream(x), expected[0], rtol=1e-4, atol=1e-4)
    state = stream.state
    with torch.cuda.stream(torch.cuda.Stream()):
        stream(x)
    torch.cuda.synchronize()
    stream.state = state
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # which refuses to synchronize
        y = stream(x)
    after = stream.state
    for spike, wanted in zip(spikes[1:, 0], expected[1:], strict=True):
        x.copy_(spike)
        graph.replay()
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
        for name in state:
            state[name][0].copy_(after[name][0])


def test_numba_on_a_gpu() -> None:
    layer = EventLinear(4, 3, impl="numba", device="cuda")
    with pytest.raises(ValueError, match='impl="numba" runs on the CPU, but the input is on cuda'):
        layer(torch.ones(2, 1, 4, device="cuda"))
