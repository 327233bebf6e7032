"""Plots of a run: learning curves, and a raster of the spikes of one example."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from spikefuse.data import DATASETS
from spikefuse.nn import EventLinear, Events, Neuron
from spikefuse.train.checkpoint import EpochMetrics, replacing
from spikefuse.train.classifier import Classifier, best_epoch

MAX_NEURONS = 200
PANEL = (3.6, 2.6)  # inches
IMAGE: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}


def plot_curves(history: list[EpochMetrics], path: Path) -> None:
    """Plot training and validation loss and accuracy over the epochs."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    best = best_epoch(history)["epoch"]
    epochs = [row["epoch"] for row in history]
    for axes, quantity, scale in zip(
        figure.subplots(1, 2), ("loss", "accuracy"), (1, 100), strict=True
    ):
        for part, name in (("train", "training"), ("val", "validation")):
            values = [scale * row[f"{part}_{quantity}"] for row in history]
            axes.plot(epochs, values, marker=".", label=name)
        axes.axvline(best, color="grey", linewidth=0.8, linestyle=":", label="best epoch")
        axes.set(xlabel="epoch", ylabel=quantity if scale == 1 else f"{quantity} (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    _save(figure, path)


def record(module: Classifier, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Record input, spikes and output of the network for one example, a batch of one.

    Returns:
        The encoded input `[T, C, H, W]` or `[T, units]`, the spikes `[T, ...]` of each neuron
        layer by name, and the output `[T, classes]`.
    """
    spikes: dict[str, Tensor] = {}

    def observe(name: str) -> Any:
        # Inside Temporal, time is folded into the batch, which has one sample here.
        return lambda _, inputs, output: spikes.update({name: _dense(output).float().cpu()})

    layers = _spiking_layers(module.net.net)
    hooks = [layer.register_forward_hook(observe(name)) for name, layer in layers]
    try:
        with torch.no_grad():
            x = module.encode(pixels)
            output = module.net(x)
    finally:
        for hook in hooks:
            hook.remove()
    x = _dense(x) if isinstance(x, Events) else x[:, 0]
    return x.cpu(), spikes, output[:, 0].float().cpu()


def _spiking_layers(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that output spikes; the neuron inside an event layer is never called."""
    for name, module in net.named_modules():
        if isinstance(module, Neuron) or (
            isinstance(module, EventLinear) and module.neuron is not None
        ):
            yield name, module


def _dense(x: Tensor | Events) -> Tensor:
    """Convert events of a batch of one to `[T, W]`; return tensors unchanged."""
    return x.to_dense()[:, 0] if isinstance(x, Events) else x


def plot_raster(module: Classifier, pixels: Tensor, label: int, path: Path) -> None:
    """Plot input, output and the spikes of every neuron layer for one example."""
    x, spikes, output = record(module, pixels)
    columns = math.ceil(math.sqrt(len(spikes) + 2))
    rows = math.ceil((len(spikes) + 2) / columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)

    classes = DATASETS[module.config.dataset].classes
    _plot_input(panels[0], x, classes[label])
    for axes, (name, layer) in zip(panels[1:], spikes.items(), strict=False):
        _plot_spikes(axes, name, layer)
    _plot_output(panels[len(spikes) + 1], output, classes)
    for axes in panels[len(spikes) + 2 :]:
        axes.set_axis_off()
    _save(figure, path)


def _plot_input(axes: Axes, x: Tensor, label: str) -> None:
    axes.set_title(f"input: {label}")
    if x.ndim == 2:
        axes.imshow(x.T.numpy(), cmap="binary", **IMAGE)
        axes.set(xlabel="time step", ylabel="units")
        return
    axes.imshow(x.mean((0, 1)).numpy(), cmap="gray")
    axes.set_axis_off()


def _plot_spikes(axes: Axes, name: str, layer: Tensor) -> None:
    neurons = layer.flatten(1).T
    count = len(neurons)
    shown = torch.linspace(0, count - 1, min(count, MAX_NEURONS)).round().long()
    axes.imshow(neurons[shown].numpy(), cmap="binary", **IMAGE)
    shape = " × ".join(map(str, layer.shape[1:]))
    axes.set_title(f"{name}: {shape} neurons, {100 * layer.mean():.1f} % firing", fontsize=8)
    neurons_shown = "neurons" if len(shown) == count else f"{len(shown)} of {count} neurons"
    axes.set(xlabel="time step", ylabel=neurons_shown)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plot_output(axes: Axes, output: Tensor, classes: tuple[str, ...]) -> None:
    steps = torch.arange(1, len(output) + 1)
    means = output.cumsum(0) / steps.unsqueeze(1)
    image = axes.imshow(means.T.numpy(), cmap="viridis", **IMAGE)
    axes.figure.colorbar(image, ax=axes)
    axes.set_title(f"running mean of the output: {classes[int(output.mean(0).argmax())]}")
    axes.set(xlabel="time step", yticks=range(len(classes)), yticklabels=classes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
