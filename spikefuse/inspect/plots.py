"""Plots of spikes, potentials and rates, on matplotlib axes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from spikefuse.inspect.explanation import label
from spikefuse.inspect.record import are_spikes
from spikefuse.neurons.checks import check_tensor
from spikefuse.neurons.learnable import Learnable

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["animate", "new_figure", "raster", "rates", "traces"]

MAX_NEURONS = 200


def raster(
    spikes: Tensor, axes: Axes | None = None, title: str = "", max_neurons: int = MAX_NEURONS
) -> Axes:
    """Plot the spikes `[T, ...]` of one sample: time from left to right, one row per neuron.

    Example::

        spikes = sf.LIF()(torch.rand(100, 32, 64))
        axes = sf.plots.raster(spikes[:, 0], title="LIF")
        axes.figure.savefig("raster.png")

    Args:
        spikes: such as `record["net.2"]["spikes"][:, 0]`; other values are drawn from white, the
            lowest, to blue.
        axes: where to draw; by default, axes of a new figure of pyplot.
        title: of the axes.
        max_neurons: draw at most this many rows, of evenly spaced neurons.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError, ValueError: `spikes` is not a tensor, or has fewer than two dims.
    """
    rows = _by_neuron(spikes, "spikes")
    axes = _axes_or_new(axes)
    count = len(rows)
    shown = torch.linspace(0, count - 1, min(count, max_neurons)).round().long()
    options: dict[str, Any] = {}
    if rows.numel() and are_spikes(rows):  # which are no background if all neurons always fire
        options = {"vmin": min(0.0, float(rows.min())), "vmax": max(1.0, float(rows.max()))}
    image = rows[shown].numpy()
    axes.imshow(image, cmap="Blues", aspect="auto", interpolation="nearest", **options)
    neurons = "neurons" if count > 1 else "neuron"
    most = "" if len(shown) == count else f"{len(shown)} of {count} "
    axes.set(xlabel="time step", ylabel=most + neurons, title=title)
    _whole_numbers(axes.xaxis)
    _whole_numbers(axes.yaxis)
    names = dict(enumerate(map(str, shown.tolist())))
    axes.yaxis.set_major_formatter(lambda row, _: names.get(round(row), ""))
    return axes


def traces(
    values: Tensor,
    axes: Axes | None = None,
    neurons: Sequence[int] = range(5),
    threshold: float | Tensor | Learnable | None = None,
) -> Axes:
    """Plot a state `[T, ...]` of one sample over time, a line per neuron.

    Example::

        spikes, h = sf.LIF(0.9)(torch.rand(100, 32, 64) / 4, outputs=("spikes", "h"))
        axes = sf.plots.traces(h[:, 0], neurons=[0, 1, 2], threshold=1.0)

    Args:
        values: such as `record["net.2"]["h"][:, 0]`, the potential before the reset.
        axes: as in `raster`.
        neurons: which ones, by their index in the flattened dims after T; those beyond the last one
            are left out.
        threshold: draw a line there; a number, or that of a neuron, if it has one value.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError, ValueError: `values` is not a tensor, or has fewer than two dims; `threshold` is
            not one number.
    """
    rows = _by_neuron(values, "values")
    level = None if threshold is None else _number(threshold)
    axes = _axes_or_new(axes)
    for i in neurons:
        if i < len(rows):
            axes.plot(rows[i].numpy(), label=f"neuron {i}")
    if level is not None:
        axes.axhline(level, color="grey", linewidth=0.8, linestyle=":", label="threshold")
    axes.set(xlabel="time step")
    axes.legend(loc="upper right", fontsize=8)
    _whole_numbers(axes.xaxis)
    return axes


class HasRates(Protocol):
    """A `Record` or a `Report`."""

    @property
    def rates(self) -> dict[str, float]: ...


def rates(rates: Mapping[str, float] | HasRates, axes: Axes | None = None) -> Axes:
    """Plot a bar per layer: the share of its neurons that fire in a step.

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(784, 128), sf.LIF(), nn.Linear(128, 10)))
        with sf.record(net) as record:
            net(torch.rand(8, 32, 784))
        axes = sf.plots.rates(record)

    Args:
        rates: a `Record` or a `Report`, or its `rates`: a share by layer.
        axes: as in `raster`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        TypeError: `rates` is neither.
    """
    values: Any = getattr(rates, "rates", rates)
    if not isinstance(values, Mapping):
        raise TypeError(
            f"rates is a {type(rates).__name__}: expected what sf.record or sf.report returns, or "
            "a rate for each layer"
        )
    axes = _axes_or_new(axes)
    axes.barh(range(len(values)), [100 * rate for rate in values.values()])
    names = [label(name) for name in values]
    axes.set(yticks=range(len(values)), yticklabels=names, xlabel="neurons firing in a step (%)")
    axes.margins(y=0.01)
    axes.invert_yaxis()
    return axes


def animate(frames: Tensor, axes: Axes | None = None, interval: float = 100.0) -> FuncAnimation:
    """Animate event frames `[T, C, H, W]` of one sample; two channels are shown in red and blue.

    Example::

        frames = torch.rand(8, 32, 2, 34, 34)  # [T, B, C, H, W]
        sf.plots.animate(frames[:, 0]).save("events.gif")

    Args:
        frames: such as the input `x[:, 0]` of a network. Other numbers of channels are averaged.
        axes: as in `raster`.
        interval: milliseconds per frame.

    Returns:
        The animation, whose `save("events.gif")` writes a file and whose `to_jshtml()` a notebook
        shows. Hold it as long as it is to be played.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: `frames` does not have four dims, or no step.
    """
    check_tensor("frames", frames, " [T, C, H, W]")
    if frames.ndim != 4 or not len(frames):
        raise ValueError(
            f"frames have shape {list(frames.shape)}: expected [T, C, H, W] with T >= 1, a sample "
            "such as x[:, 0]"
        )
    axes = _axes_or_new(axes)
    from matplotlib.animation import FuncAnimation

    images = _images(frames.detach().float().cpu()).numpy()
    image = axes.imshow(images[0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_axis_off()

    def draw(step: int) -> list[Any]:
        image.set_data(images[step])
        axes.set_title(f"step {step}")
        return [image]

    figure = axes.get_figure(root=True)
    assert figure is not None
    return FuncAnimation(figure, draw, frames=len(images), interval=interval)


def new_figure(size: tuple[float, float]) -> Figure:
    """Return a figure that pyplot does not hold.

    Example::

        figure = sf.plots.new_figure((6, 3))
        sf.plots.raster(sf.LIF()(torch.rand(100, 64)), figure.subplots())
        figure.savefig("raster.png")

    Args:
        size: width and height in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    with _required():
        from matplotlib.figure import Figure
    return Figure(figsize=size, layout="constrained")


def _images(frames: Tensor) -> Tensor:
    """`[T, H, W]` in grey, or `[T, H, W, 3]` of two polarities on white, from 0 to 1."""
    frames = frames / frames.abs().amax().clamp(min=1e-12)
    if frames.shape[1] != 2:
        return frames.mean(1)
    off, on = frames[:, 0], frames[:, 1]
    channels = (1 - off, 1 - torch.maximum(off, on), 1 - on)
    return torch.stack(channels, -1).clamp(0, 1)


def _by_neuron(x: Tensor, name: str) -> Tensor:
    check_tensor(name, x, " [T, ...] of one sample")
    if x.ndim < 2:
        raise ValueError(
            f"{name} has shape {list(x.shape)}: expected [T, ...] of one sample, such as "
            'record["net.2"]["spikes"][:, 0]'
        )
    return x.detach().float().cpu().flatten(1).T


def _number(threshold: Any) -> float:
    value = threshold() if isinstance(threshold, Learnable) else threshold
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(
            f"threshold has shape {list(value.shape)}: expected one value, such as that of the "
            "channel that is shown"
        )
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):
        raise TypeError(f"threshold is {value!r}: expected a number") from None


def _axes_or_new(axes: Axes | None) -> Axes:
    if axes is not None:
        return axes
    with _required():
        from matplotlib import pyplot
    return pyplot.subplots()[1]


def _whole_numbers(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


@contextlib.contextmanager
def _required() -> Iterator[None]:
    """Say how to install matplotlib where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'plots need matplotlib: pip install "spikefuse[plot]"', name=error.name
        ) from error
