"""Turn a trained network with ReLUs into a spiking network of nearly the same outputs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from spikefuse.neurons.rate_if import RateIF
from spikefuse.nn.encode import direct
from spikefuse.nn.neuron import check_module
from spikefuse.nn.temporal import Temporal
from spikefuse.transforms.ann_graph import (
    Recorder,
    RunningMean,
    fold_norms,
    is_relu,
    learned_threshold,
    rewrite,
    traced,
)
from spikefuse.transforms.copies import copied
from spikefuse.transforms.tables import aligned

#: Values of a layer among which its threshold is chosen, and candidates.
SAMPLES, CANDIDATES = 1 << 16, 64


@dataclass(frozen=True)
class ConvertedLayer:
    """An activation that became a neuron, on the last batch of the data.

    Attributes:
        name: of the neuron in the converted network.
        threshold: its mean over channels.
        clipped: share of the activations above the threshold.
        rate: spikes per neuron and step, negative ones included.
        error: root mean square of mean output minus activation, relative to that of the activation.
    """

    name: str
    threshold: float
    clipped: float
    rate: float
    error: float


@dataclass(frozen=True)
class ConversionReport:
    """What `from_ann` did, and how it does on the last batch of the data; `print` shows the table.

    Attributes:
        layers: in the order of their calls.
        on_means: operations that read the mean of the steps so far.
        error: of the mean output after 1, 2, ... steps, the root mean square of its difference from
            the output of the original, relative to that of the output.
        agreement: likewise, of outputs `[B, classes]`, the share of samples with the largest one at
            the same place; empty for other outputs.
    """

    layers: tuple[ConvertedLayer, ...]
    on_means: tuple[str, ...]
    error: tuple[float, ...]
    agreement: tuple[float, ...]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("neuron", "threshold", "clipped", "rate", "error")]
        for x in self.layers:
            rows.append(
                (x.name, f"{x.threshold:.4g}", *map(_percent, (x.clipped, x.rate, x.error)))
            )
        lines = aligned(rows, 1)
        if self.on_means:
            lines.append(f"on means of the steps so far: {', '.join(self.on_means)}")
        rows = [("steps", "error of the output", "same largest output")]
        shares = self.agreement or (None,) * len(self.error)
        for t, (error, share) in enumerate(zip(self.error, shares, strict=True), 1):
            if t & (t - 1) == 0 or t == len(self.error):
                rows.append((str(t), _percent(error), "" if share is None else _percent(share)))
        return "\n".join([*lines, "", *aligned(rows, 0)])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def from_ann(
    net: nn.Module,
    data: Iterable[Any],
    num_steps: int = 8,
    *,
    share: float | None = None,
    per_channel: bool = False,
    negative: Literal["never", "undo"] = "undo",
    correct: bool = True,
    also: tuple[type[nn.Module], ...] = (),
) -> Temporal:
    """Return a spiking network whose mean output over time is close to the output of `net`.

    ReLUs, also as functions, become `RateIF` neurons with thresholds from data, and batch norms are
    folded into the layers in front of them. What is affine runs as it is, in each step. All other
    operations, such as max pooling, layer norms, softmax and products of activations, read the mean
    `m` of the steps so far; the steps of their output, `y[t] = t f(m[t]) - (t - 1) f(m[t - 1])`,
    have the mean `f(m[t])`. Up to rounding, those of max pooling of spikes are spikes.

    Weights keep their names, except for folded norms. The result trains on by surrogate gradients
    after `.train()`, as any network does.

    Source: Diehl et al., "Fast-Classifying, High-Accuracy Spiking Deep Networks Through Weight and
    Threshold Balancing", IJCNN 2015; Bu et al. and Wang et al., see `RateIF`; Li et al., "A Free
    Lunch From ANN: Towards Efficient, Accurate Spiking Neural Networks Calibration", ICML 2021
    (`correct`); Huang et al., "Towards High-performance Spiking Transformers from ANN to SNN
    Conversion", ACM MM 2024 (means of the steps so far).

    Example::

        relus = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))  # a trained network
        images = torch.rand(100, 64)
        net = sf.from_ann(relus, images)
        logits = net(sf.nn.encode.direct(images, 8)).mean(0)
        print(net.conversion)

    Args:
        net: a network of `[B, ...]`, whose samples are independent, to a tensor `[B, ...]`;
            torch.fx must be able to trace it. It remains as it is. Integer inputs, such as tokens,
            are the same in each step.
        data: batches for thresholds and corrections, a few hundred samples in all: tensors, or
            tuples that begin with the inputs of `net`, such as a DataLoader yields.
        num_steps: steps for which thresholds are chosen; the result runs for any number.
        share: of the activations of a layer that its threshold exceeds, such as 1.0 for their
            maximum; by default, the threshold has the least square error in `num_steps` steps.
        per_channel: choose a threshold for each channel (dim 1) of activations with 2, 4 or 5
            dims, not for each layer.
        negative: whether neurons undo spikes, see `RateIF`.
        correct: shift the inputs of neurons, layer after layer, by the difference between
            activations and mean outputs, averaged over each channel and the data.
        also: classes of other layers behind which neurons with spikes of both signs are put, such
            as `(nn.GELU, nn.LayerNorm)` in a transformer, whose outputs are values otherwise.

    Returns:
        A `Temporal` in evaluation mode. Its attribute `conversion` is a report, see
        `spikefuse.transforms.from_ann.ConversionReport`.

    Raises:
        TypeError: `net` is not a module or does not return a tensor, a batch has no tensors, or
            `also` has no classes.
        ValueError: an argument is out of range, torch.fx cannot trace `net`, its samples depend on
            each other, it has no ReLU, or one with hooks, or there are no data.
    """
    check_module("net", net)
    if num_steps < 1 or not (share is None or 0 < share <= 1):
        raise ValueError(
            f"num_steps, share are {num_steps}, {share}: expected at least 1, and a share of the "
            "activations in (0, 1] or None"
        )
    if not isinstance(also, tuple) or not all(isinstance(kind, type) for kind in also):
        raise TypeError(f"also is {also!r}: expected a tuple of classes, such as (nn.GELU,)")
    original = copied(net).eval()
    graph = traced(copy.deepcopy(original), also)
    recorder, batches = Recorder(graph, also), list[tuple[Tensor, ...]]()
    activations: dict[fx.Node, Activation] = {}
    with torch.no_grad():
        for batch in _batches(data, len(graph.graph.find_nodes(op="placeholder"))):
            output = recorder.run(*batch)
            if not batches:
                _check(original, batch, output)
            batches.append(batch)
            for node, value in recorder.values.items():
                activations.setdefault(node, Activation()).add(value)
        if not batches:
            raise ValueError("data has no batches")
        if not activations:
            raise ValueError("no ReLU was found between input and output, nor layers of also=")
        fold_norms(graph, recorder.active)
        neurons = {}
        for node, activation in activations.items():
            threshold = learned_threshold(graph, node)
            if threshold is None:
                threshold = activation.threshold(num_steps, share, per_channel)
            neurons[node] = RateIF(threshold, negative if is_relu(graph, node) else "always")
        names, on_means = rewrite(graph, recorder, neurons)
        result: Any = Temporal(graph.eval())
        if correct:
            for node, neuron in neurons.items():
                _correct(result, neuron, activations[node].mean, batches, num_steps)
        spikes, y = _run(result, [*neurons.values()], batches[-1], num_steps)
        layers = [
            _compared(name, neuron, activations[node].last, spikes[neuron])
            for name, (node, neuron) in zip(names, neurons.items(), strict=True)
        ]
        means, agreement = RunningMean()(y), ()
        errors = tuple(_error(m, output) for m in means)
        if output.ndim == 2 and output.shape[1] > 1:
            agree = means.argmax(2) == output.argmax(1)
            agreement = tuple(agree.float().mean(1).tolist())
        result.conversion = ConversionReport(tuple(layers), tuple(on_means), errors, agreement)
    return result


def _check(original: nn.Module, batch: Sequence[Tensor], output: Any) -> None:
    """Refuse a network whose graph computes something else, or whose samples are not independent.

    Args:
        output: of the graph.
    """
    expected = original(*(x.clone() for x in batch))
    if not isinstance(expected, Tensor) or not expected.is_floating_point():
        raise TypeError(f"the network returns a {type(expected).__name__}: expected a tensor")
    if _error(output, expected) > 1e-3:
        raise ValueError(
            "torch.fx recorded something else than what the network computes: remove its own "
            "hooks, and write y = f(x) in place of changes through a view, x.view(...).f_()"
        )
    half = len(batch[0]) // 2
    if half and _error(original(*(x[:half].clone() for x in batch)), expected[:half]) > 1e-3:
        raise ValueError(
            "the outputs of a sample depend on the others in the batch, which also holds the time "
            "steps of a spiking network: average or join along other dims than the batch"
        )


def _batches(data: Iterable[Any], num_inputs: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the inputs in each batch of the data."""
    for batch in [data] if isinstance(data, Tensor) else data:
        inputs = (batch,) if isinstance(batch, Tensor) else tuple(batch)[:num_inputs]
        if len(inputs) < num_inputs or not all(isinstance(x, Tensor) for x in inputs):
            raise TypeError(
                f"data has a {type(batch).__name__}: expected a tensor, or a tuple that begins "
                f"with {num_inputs} tensors, the inputs of the network"
            )
        yield inputs


class Activation:
    """The outputs of a ReLU over batches.

    Attributes:
        last: those of the last batch.
    """

    last: Tensor

    def __init__(self) -> None:
        self._samples: list[Tensor] = []
        self._maxima: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._count = 0
        self._generator = torch.Generator().manual_seed(0)

    def add(self, values: Tensor) -> None:
        rows = by_channel(values)
        self.last, self._count = values, self._count + len(rows)
        self._sums.append(rows.double().sum(0))
        self._maxima.append(rows.abs().amax(0))
        size = min(len(rows), max(1, SAMPLES // rows.shape[1]))
        chosen = torch.randperm(len(rows), generator=self._generator)[:size]
        self._samples.append(rows[chosen.to(rows.device)])

    @property
    def mean(self) -> Tensor:
        """By channel."""
        return (torch.stack(self._sums).sum(0) / self._count).float()

    def threshold(self, num_steps: int, share: float | None, per_channel: bool) -> Any:
        """Choose a threshold, or one for each channel; see `from_ann`."""
        samples = torch.cat(self._samples).float()
        highest = torch.stack(self._maxima).amax(0).float()
        if not per_channel:
            samples, highest = samples.reshape(-1, 1), highest.amax(0, keepdim=True)
        chosen = highest
        if share is None:
            chosen = _least_error(samples, highest, num_steps)
        elif share < 1:
            chosen = samples.abs().sort(0).values[int(share * (len(samples) - 1))]
        is_silent = (highest == 0) | (chosen == 0)
        chosen = torch.where(is_silent, 1.0, chosen)
        return chosen if len(chosen) > 1 else float(chosen)


def _least_error(samples: Tensor, highest: Tensor, num_steps: int) -> Tensor:
    """The thresholds with which `num_steps` steps represent samples best, by column."""
    best, least = highest, torch.full_like(highest, torch.inf)
    lowest = -num_steps if samples.min() < 0 else 0
    for i in range(1, CANDIDATES + 1):
        threshold = (highest * (i / CANDIDATES)).clamp_min(torch.finfo(highest.dtype).tiny)
        levels = (samples / threshold * num_steps + 0.5).floor().clamp(lowest, num_steps)
        error = (levels / num_steps * threshold - samples).square().mean(0)
        best = torch.where(error < least, threshold, best)
        least = torch.minimum(error, least)
    return best


def by_channel(x: Tensor) -> Tensor:
    """`[B, C, ...]` as `[-1, C]`; other tensors, such as tokens `[B, N, C]`, as one channel."""
    if x.ndim in (2, 4, 5):
        return x.movedim(1, -1).flatten(0, -2)
    return x.reshape(-1, 1)


def _run(
    net: nn.Module, neurons: Sequence[RateIF], batch: Sequence[Tensor], num_steps: int
) -> tuple[dict[RateIF, Tensor], Tensor]:
    """Return the outputs of neurons `[T, B, ...]` by neuron, and those of the network."""
    found: dict[RateIF, Tensor] = {}

    def note(neuron: RateIF, _: Any, y: Tensor) -> None:
        found[neuron] = y.unflatten(0, (num_steps, -1))

    hooks = [neuron.register_forward_hook(note) for neuron in neurons]
    try:
        return found, net(*(direct(x, num_steps) for x in batch))
    finally:
        for hook in hooks:
            hook.remove()


def _correct(
    net: nn.Module,
    neuron: RateIF,
    mean: Tensor,
    batches: Sequence[Sequence[Tensor]],
    num_steps: int,
) -> None:
    """Shift the input of a neuron by what its mean output lacks."""
    total, count = torch.zeros_like(mean, dtype=torch.float64), 0
    for batch in batches:
        spikes, _ = _run(net, [neuron], batch, num_steps)
        rows = by_channel(spikes[neuron].mean(0))
        total, count = total + rows.double().sum(0), count + len(rows)
    shift = mean - (total / count).to(mean.dtype)
    neuron.shift = shift if len(shift) > 1 else float(shift)


def _compared(name: str, neuron: RateIF, activation: Tensor, y: Tensor) -> ConvertedLayer:
    """Compare the outputs of a neuron with the activation that it replaces."""
    threshold = torch.as_tensor(neuron.threshold)
    return ConvertedLayer(
        name,
        float(threshold.mean()),
        float((by_channel(activation).abs() > threshold).float().mean()),
        float((y != 0).float().mean()),
        _error(y.mean(0), activation),
    )


def _error(y: Tensor, target: Tensor) -> float:
    """The root mean square error relative to the target."""
    difference = (y.float() - target.float()).norm()
    return float(difference / target.float().norm().clamp_min(1e-30))
