"""The axes show the values that they are given."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from matplotlib.figure import Figure

import spikefuse as sf


@pytest.fixture
def axes():
    return Figure().subplots()


def test_raster(axes) -> None:
    spikes = (torch.rand(7, 3, 2) < 0.5).float()
    assert sf.plots.raster(spikes, axes, title="hidden") is axes
    (image,) = axes.images
    assert torch.equal(torch.as_tensor(image.get_array().data), spikes.flatten(1).T)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time step", "neurons")
    assert axes.get_title() == "hidden"


def test_raster_of_many_neurons(axes) -> None:
    sf.plots.raster(torch.zeros(4, 1000), axes, max_neurons=10)
    assert axes.images[0].get_array().shape == (10, 4)
    assert axes.get_ylabel() == "10 of 1000 neurons"


def ticks(axis) -> dict[float, str]:
    """The labels that are drawn, by position."""
    axis.figure.draw_without_rendering()
    low, high = sorted(axis.get_view_interval())
    shown = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
    return {at: label.get_text() for at, label in shown if low <= at <= high}


def test_raster_names_neurons_by_their_index(axes) -> None:
    spikes = torch.zeros(10, 1000)
    spikes[:, 502] = 1
    sf.plots.raster(spikes, axes)
    (row,) = torch.as_tensor(axes.images[0].get_array().data).sum(1).nonzero().flatten().tolist()
    assert axes.yaxis.get_major_formatter()(row, 0) == "502"
    labels = ticks(axes.yaxis)
    assert len(labels) > 2
    assert all(int(label) == round(at * 999 / 199) for at, label in labels.items())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_raster_of_few_neurons_and_steps(axes, count: int) -> None:
    sf.plots.raster(torch.zeros(count, count), axes)
    for axis in axes.xaxis, axes.yaxis:
        assert [*ticks(axis)] == [*range(count)]
    assert [*ticks(axes.yaxis).values()] == ["0", "1", "2"][:count]
    assert axes.get_ylabel() == ("neurons" if count > 1 else "neuron")


def test_traces(axes) -> None:
    v = torch.rand(7, 2, 2, requires_grad=True)
    sf.plots.traces(v, axes, neurons=[0, 3, 9], threshold=1.0)
    first, last, threshold = axes.lines
    assert first.get_ydata().tolist() == v[:, 0, 0].tolist()
    assert last.get_ydata().tolist() == v[:, 1, 1].tolist()
    assert list(threshold.get_ydata()) == [1.0, 1.0]


LEARNED = sf.LearnablePositive(1.0)


@pytest.mark.parametrize("threshold", [torch.ones(1), torch.nn.Parameter(torch.ones(())), LEARNED])
def test_the_threshold_of_a_neuron(axes, threshold) -> None:
    sf.plots.traces(torch.rand(7, 2), axes, threshold=sf.LIF(threshold=threshold).threshold)
    assert list(axes.lines[-1].get_ydata()) == [1.0, 1.0]


def test_thresholds_that_are_no_number(axes) -> None:
    with pytest.raises(ValueError, match=r"threshold has shape \[3\]: expected one value, such as"):
        sf.plots.traces(torch.rand(7, 3), axes, threshold=torch.rand(3))
    with pytest.raises(TypeError, match=r"threshold is \[1\.0, 2\.0\]: expected a number"):
        sf.plots.traces(torch.rand(7, 3), axes, threshold=[1.0, 2.0])


def test_rates(axes) -> None:
    net = sf.Temporal(sf.LIF(threshold=0.5))
    with sf.record(net) as record:
        y = net(torch.rand(5, 2, 4))
    for rates in (record.rates, record):
        sf.plots.rates(rates, axes)
    assert axes.patches[0].get_width() == pytest.approx(100 * y.mean().item())
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["net"]


def test_animation(axes, tmp_path: Path) -> None:
    frames = torch.zeros(3, 2, 4, 4)
    frames[0, 0, 1, 1], frames[1, 1, 2, 2] = 2, 2
    animation = sf.plots.animate(frames, axes)
    animation.save(tmp_path / "events.gif", writer="pillow")
    assert (tmp_path / "events.gif").read_bytes().startswith(b"GIF")
    (image,) = axes.images
    animation._func(0)
    assert image.get_array()[1, 1].tolist() == [0, 0, 1]  # off: blue
    animation._func(1)
    assert image.get_array()[2, 2].tolist() == [1, 0, 0]  # on: red
    assert image.get_array()[0, 0].tolist() == [1, 1, 1]
    assert axes.get_title() == "step 1"


def test_new_axes() -> None:
    from matplotlib import pyplot

    mpl.use("agg")
    axes = sf.plots.raster(torch.zeros(4, 3))
    assert axes.figure.number in pyplot.get_fignums()
    pyplot.close(axes.figure)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"spikes has shape \[3\]: expected \[T, ...\]"):
        sf.plots.raster(torch.zeros(3))
    with pytest.raises(TypeError, match=r"spikes is a ndarray: expected a tensor \[T, ...\]"):
        sf.plots.raster(torch.zeros(3, 4).numpy())
    with pytest.raises(TypeError, match=r"rates is a list: expected what sf.record or sf.report"):
        sf.plots.rates([0.1])
    with pytest.raises(ValueError, match=r"frames have shape \[3, 4, 4\]"):
        sf.plots.animate(torch.zeros(3, 4, 4))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.delattr(mpl, "pyplot", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "spikefuse\[plot\]"'):
        sf.plots.raster(torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        (torch.zeros(4, 3), (0, 1)),
        (torch.ones(4, 3), (0, 1)),
        (-torch.ones(4, 3), (-1, 1)),
        (torch.full((4, 3), 5.0), (0, 5)),
        (torch.linspace(0.2, 0.7, 12).view(4, 3), (0.2, 0.7)),
    ],
    ids=["silent", "always firing", "signed", "counts", "potentials"],
)
def test_raster_of_neurons_that_always_fire(axes, values, limits) -> None:
    """They are not drawn as those that never fire."""
    sf.plots.raster(values, axes)
    assert axes.images[0].get_clim() == pytest.approx(limits)
