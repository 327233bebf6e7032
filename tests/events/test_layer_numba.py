"""Fused layers on a CPU: neither the way of summing currents nor threads change results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import spikefuse as sf
from spikefuse.events import layer_numba, products_numba
from spikefuse.events.candidates import with_candidates
from spikefuse.events.format import Events
from spikefuse.kernels import numba_host

INPUTS = 40


def some_marks(num_steps: int, batch: int) -> Tensor:
    """Marks of inputs that are often read."""
    torch.manual_seed(0)
    return torch.randint(3, (num_steps, batch, INPUTS)).float()


def results(marks: Tensor, width: int, threads: tuple[int, int] | None = None) -> list[Tensor]:
    """Return events and gradients: offsets, fired, indices, weight, bias, values.

    Args:
        threads: of forward and backward; by default PyTorch's.
    """
    torch.manual_seed(1)
    neuron = sf.LIF(0.9, 1.0, surrogate=sf.surrogate.FastSigmoid(10.0, cutoff=-0.2))
    weight, bias = torch.randn(INPUTS, width) * 0.2, torch.rand(width) * 0.3
    events = Events.from_marks(marks)
    events = Events(events.shape, events.offsets, events.fired, events.indices, events.is_fired())
    forward, backward = threads or (torch.get_num_threads(),) * 2
    torch.set_num_threads(forward)
    layer = layer_numba.FusedLayer(events, with_candidates(neuron), weight, bias)
    outputs = layer.forward()
    if marks.numel():
        assert 0 < outputs.num_fired < len(outputs.indices)
    grad = torch.randn(len(outputs.indices))
    torch.set_num_threads(backward)
    found = layer.backward(outputs, grad)
    return [outputs.offsets, outputs.fired, outputs.indices, *found]


def same(actual: list[Tensor], expected: list[Tensor], tiles: bool) -> None:
    """Bit for bit, except for the gradient of values if the tiles differ."""
    *actual, values = actual
    *expected, wanted = expected
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    if tiles:
        assert torch.equal(values, wanted)
    else:
        torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_steps", [3, 16, 17, 40])
@pytest.mark.parametrize("width", [70, 600])
def test_ways_of_summing(num_steps: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for saved in (0, 1 << 30):
        for copied in (0, 1 << 20):
            monkeypatch.setattr(layer_numba, "SAVED", saved)
            monkeypatch.setattr(layer_numba, "COPIED", copied)
            found.append(results(some_marks(num_steps, 3), width))
    for other in found[1:]:
        same(other, found[0], tiles=True)


# So few values per group that there are several groups.
FEW = 1 << 13

SHAPES = {  # num_steps, batch, width
    "short": (3, 3, 70),
    "long, uneven": (40, 7, 33),
    "one sample": (17, 1, 600),
    "several tiles": (5, 11, 600),
    "many tiles": (2, 3, 1290),  # 10 threads have 9
    "one step": (1, 6, 300),
    "no samples": (4, 0, 70),
    "one neuron": (6, 300, 1),
}


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda x: "x".join(map(str, x)))
@pytest.mark.parametrize("saved", [0, 1 << 30])
@pytest.mark.parametrize("copied", [0, 1 << 20])
def test_threads(
    shape: tuple[int, int, int],
    saved: int,
    copied: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_numba, "SAVED", saved)
    monkeypatch.setattr(products_numba, "GROUPED", FEW)
    monkeypatch.setattr(layer_numba, "COPIED", copied)
    *sizes, width = shape
    marks = some_marks(*sizes)
    marks[..., 5:9] = marks[..., -1] = 0.0  # Inputs that never fire, the last too.
    expected = results(marks, width, (1, 1))
    size = tile_width(width, sizes[1], 1)
    for threads in ((2, 2), (5, 5), (10, 10), (16, 16), (16, 2), (1, 5)):
        found = results(marks, width, threads)
        same(found, expected, tiles=tile_width(width, sizes[1], threads[0]) == size)


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("width", [1, 33, 600])
@pytest.mark.parametrize("grouped", [1, 1 << 20])
def test_streaming_changes_nothing(
    width: int, grouped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_numba, "GROUPED", grouped)
    marks = some_marks(5, 11)
    marks[..., 5:9] = marks[..., -1] = 0.0
    expected = results(marks, width, (1, 1))
    monkeypatch.setattr(products_numba, "STREAMED", 0)
    for threads in (1, 2, 16):
        same(results(marks, width, (threads, threads)), expected, tiles=threads == 1)
    events = Events.from_marks(marks)
    work = products_numba.Gradients(events, torch.zeros(INPUTS, width), (5, 11), 64)
    assert work.streamed == (grouped > 1)


def tile_width(width: int, samples: int, threads: int) -> int:
    torch.set_num_threads(threads)
    return products_numba.tile_width(width, samples)


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("mark", [0.0, 1.0])
def test_threads_without_spikes(mark: float) -> None:
    """No events, or candidates only: only the bias makes neurons fire."""
    expected = results(torch.full((20, 5, INPUTS), mark), 70, (1, 1))
    assert not expected[3].any()
    for threads in (2, 5, 16):
        found = results(torch.full((20, 5, INPUTS), mark), 70, (threads, threads))
        same(found, expected, tiles=True)


@pytest.mark.usefixtures("any_threads")
@pytest.mark.parametrize("threads", [1, 2, 5, 16])
def test_every_thread_has_work(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single tile; only threads that share it pass gradients through memory."""
    tasks = {}

    def shared(kernel: Any, count: int, unit: int, work: int, *arguments: object) -> None:
        tasks[kernel.__name__] = -(-count // unit)
        numba_host.shared(kernel, count, unit, work, *arguments)

    monkeypatch.setattr(products_numba, "shared", shared)
    results(some_marks(4, 32), 70, (threads, threads))
    alone = {"layer": threads, "layer_backward": threads}
    wanted = alone if threads == 1 else {**alone, "_backward": threads}
    assert {name: tasks[name] for name in wanted} == wanted
    assert ("_backward" in tasks) == (threads > 1)
