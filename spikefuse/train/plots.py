"""Plots of a run: learning curves, and a raster of the spikes of one example."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from spikefuse.data.files import replacing
from spikefuse.inspect.plots import raster
from spikefuse.inspect.record import are_spikes, firing_rate, first_outputs, record
from spikefuse.nn import Events
from spikefuse.train.checkpoint import EpochMetrics, best_epoch
from spikefuse.train.training_module import TrainingModule

PANEL = (3.6, 2.6)  # inches
MAX_CLASSES = 12  # of which names fit beside a panel
MAX_VALUES = 6  # whose lines can be told apart


def plot_curves(history: list[EpochMetrics], path: Path) -> None:
    """Plot training and validation loss, and accuracy or R², over the epochs."""
    of_classes = "val_accuracy" in history[0]
    metric = ("accuracy", "accuracy (%)", 100) if of_classes else ("r2", "R²", 1)
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    best = best_epoch(history)["epoch"]
    epochs = [row["epoch"] for row in history]
    panels = zip(figure.subplots(1, 2), (("loss", "loss", 1), metric), strict=True)
    for axes, (quantity, label, scale) in panels:
        for part, name in (("train", "training"), ("val", "validation")):
            values = [scale * row[f"{part}_{quantity}"] for row in history]
            axes.plot(epochs, values, marker=".", label=name)
        axes.axvline(best, color="grey", linewidth=0.8, linestyle=":", label="best epoch")
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    _save(figure, path)


def record_example(
    module: TrainingModule, pixels: Tensor
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Record input, spikes and output of the network for one example, a batch of one.

    Returns:
        The encoded input `[T, C, H, W]` or `[T, units]`, the spikes `[T, ...]` of each call of a
        neuron layer by name, such as "2", or "2, call 1" of several, and the output `[T, K]`.
    """
    with torch.no_grad(), record(module.net.net) as recorded:
        x = module.encode(pixels)
        output = module.net(x)
    x = x.to_dense() if isinstance(x, Events) else x
    spikes = {}
    for name, calls in recorded.calls.items():
        for i, y in enumerate(first_outputs(calls)):
            label = f"{name}, call {i + 1}" if len(calls) > 1 else name
            spikes[label] = y[:, 0].float().cpu()
    return x[:, 0].cpu(), spikes, output[:, 0].float().cpu()


def plot_raster(module: TrainingModule, pixels: Tensor, target: Tensor, path: Path) -> None:
    """Plot input, output and the spikes of every neuron layer for one example."""
    x, spikes, output = record_example(module, pixels)
    columns = math.ceil(math.sqrt(len(spikes) + 2))
    rows = math.ceil((len(spikes) + 2) / columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)

    modules = dict(module.net.net.named_modules())
    names, task = module.config.data.classes, module.task
    if task.name == "classification":
        label, predicted = int(target), int(task.predict(output[:, None]).argmax())
        color = "tab:green" if predicted == label else "tab:red"
        title = f"class: {names[label]}, predicted: {names[predicted]}"
        figure.suptitle(title, color=color, fontsize=11)
    _plot_input(panels[0], x)
    for axes, (name, layer) in zip(panels[1:], spikes.items(), strict=False):
        shape = " × ".join(map(str, layer.shape[1:]))
        is_firing = are_spikes(layer, modules.get(name.split(", ")[0]))
        kind = f"{100 * firing_rate(layer):.1f} % firing" if is_firing else "potentials"
        neurons = "neuron" if layer[0].numel() == 1 else "neurons"
        raster(layer, axes, f"{name}: {shape} {neurons}, {kind}")
        axes.title.set_fontsize(8)
    what, axes = "output", panels[len(spikes) + 1]
    if not task.per_step and task.steps == "last":
        what = "output (its last step is the prediction)"
    elif not task.per_step:
        steps = torch.arange(1, len(output) + 1)
        what, output = "running mean of the output", output.cumsum(0) / steps.unsqueeze(1)
    if task.of_classes:
        _plot_classes(axes, output, names, what)
    else:
        _plot_values(axes, output, names, target, what)
    axes.set(xlabel="time step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels[len(spikes) + 2 :]:
        axes.set_axis_off()
    _save(figure, path)


def _plot_input(axes: Axes, x: Tensor) -> None:
    if x.ndim == 2:
        raster(x, axes, max_neurons=x.shape[1])
        axes.set_ylabel("units")
    else:
        axes.imshow(x.mean((0, 1)).numpy(), cmap="gray")
        axes.set_axis_off()
    axes.set_title("input", fontsize=8)


def _plot_values(
    axes: Axes, output: Tensor, names: tuple[str, ...], target: Tensor, what: str
) -> None:
    for i, name in enumerate(names[:MAX_VALUES]):
        axes.plot(output[:, i], color=f"C{i}", label=name)
        axes.plot(target[..., i].expand(len(output)), color=f"C{i}", linestyle="--")
    axes.set_title(f"{what}, and target (dashed)", fontsize=8)
    axes.legend(fontsize=8)


def _plot_classes(axes: Axes, output: Tensor, classes: tuple[str, ...], what: str) -> None:
    shown = output[-1].topk(min(MAX_CLASSES, len(classes))).indices.sort().values
    image = axes.imshow(output[:, shown].T.numpy(), aspect="auto", interpolation="nearest")
    axes.figure.colorbar(image, ax=axes)
    most = "" if len(shown) == len(classes) else f", {len(shown)} of {len(classes)} classes"
    axes.set_title(f"{what}{most}", fontsize=8)
    names = [classes[i] if len(classes[i]) <= 14 else f"{classes[i][:13]}…" for i in shown]
    axes.set(yticks=range(len(shown)), yticklabels=names)
    axes.tick_params(axis="y", labelsize=8)


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of names of classes
        figure.savefig(temporary, dpi=150, format="png")
