"""Report what a network does on data: firing rates, operations, memory and estimated energy."""

from __future__ import annotations

import base64
import contextlib
import html
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse.events.format import Events
from spikefuse.events.linear import EventLinear
from spikefuse.inspect import plots
from spikefuse.inspect.energy import HARDWARE, Accesses, Hardware, Memory, as_dict, estimate
from spikefuse.inspect.explain import explain
from spikefuse.inspect.explanation import in_bytes, in_joules, label, with_unit
from spikefuse.inspect.observer import ModuleObserver, own_parameters, unchanged
from spikefuse.inspect.operations import (
    Operations,
    count_operations,
    delayed,
    feedback,
    is_constant,
    num_steps,
)
from spikefuse.inspect.record import are_spikes, unfolded
from spikefuse.neurons.definition import FIRST_OUTPUT, Neuron, SpikingLayer
from spikefuse.nn.call import Scan, TemporalCall, active
from spikefuse.nn.delay import DelayedLinear
from spikefuse.nn.loop import Loop
from spikefuse.nn.recurrent import Recurrent
from spikefuse.scan.records import Arguments, Results, Wanted
from spikefuse.transforms.tables import aligned

LIMITS = (
    "per sample, over all time steps. rate: share of the neurons that fire in a step; dead and "
    "saturated: shares that never fire, and that fire at every step of every sample",
    "AC: weights that are added for inputs of 1 or -1, counted one by one. MAC: multiply-"
    "accumulates of layers whose input has other values, zeros and padding included. ANN: the same "
    "layers in one step of a network without spikes, all of it MACs",
    "energy: 0.9 pJ per AC and 4.6 pJ per MAC, 32-bit floating point in 45 nm (Horowitz, ISSCC "
    "2014). Memory accesses, which often dominate, are in report.estimate(). Operations of "
    "neurons, norms, pooling and additions of layers are not counted",
)
COLUMNS = ("layer", "module", "rate", "dead", "saturated", "inputs", "AC", "MAC", "ANN MAC")


@dataclass(frozen=True)
class LayerReport:
    """What one layer does; operations are per sample, over all time steps.

    Attributes:
        name: qualified name in the model; "" for the model itself.
        module: name of its type.
        rate: share of the neurons that fire in a step; None for layers without spikes.
        dead, saturated: shares of the neurons that never fire, and that always do; None also if the
            batches differ in their shape.
        nonzero: share of the inputs of its operations that are not 0; None without operations.
        accumulates, multiplies: operations on spikes, and on other values.
        ann: multiply-accumulates of one step without spikes.
        parameters: number of its own parameters, each counted for the first layer that has it.
        saved: bytes saved for backward by the first batch; None if not measured.
        accesses, ann_accesses: values read and written, and those of one step without spikes.
    """

    name: str
    module: str
    rate: float | None = None
    dead: float | None = None
    saturated: float | None = None
    nonzero: float | None = None
    accumulates: float = 0.0
    multiplies: float = 0.0
    ann: float = 0.0
    parameters: int = 0
    saved: int | None = None
    accesses: Accesses = field(default_factory=Accesses)
    ann_accesses: Accesses = field(default_factory=Accesses)


@dataclass(frozen=True)
class Report:
    """The result of `report`: as a string, a table.

    Attributes:
        layers: one row per layer that has neurons, parameters or operations.
        samples: number of samples of all batches.
        not_counted: names of layers whose operations are unknown and are not in the sums.
    """

    layers: tuple[LayerReport, ...]
    samples: int
    not_counted: tuple[str, ...]

    @property
    def rates(self) -> dict[str, float]:
        """The firing rate of each layer of neurons, by name."""
        return {row.name: row.rate for row in self.layers if row.rate is not None}

    @property
    def accumulates(self) -> float:
        """Accumulates per sample."""
        return sum(row.accumulates for row in self.layers)

    @property
    def multiplies(self) -> float:
        """Multiply-accumulates per sample."""
        return sum(row.multiplies for row in self.layers)

    @property
    def ann(self) -> float:
        """Multiply-accumulates of the same network without spikes, in one step of a sample."""
        return sum(row.ann for row in self.layers)

    @property
    def energy(self) -> float:
        """Estimated joules per sample."""
        return _energy(self.accumulates, self.multiplies)

    @property
    def ann_energy(self) -> float:
        """Estimated joules per sample of the same network without spikes."""
        return _energy(0.0, self.ann)

    def estimate(
        self, hardware: str | Hardware = "45nm-float32", weights: Memory = "sram"
    ) -> dict[str, Any]:
        """Return the estimated joules per sample of operations and memory accesses.

        Args:
            hardware: "45nm-float32", "45nm-int8", "7nm-float32", "7nm-int8", or a `Hardware` of
                `spikefuse.inspect.energy`.
            weights: whether weights are in "sram" or in "dram"; states and spikes are in SRAM.

        Returns:
            A dict for JSON: "layers" has the joules of "operations", "weights", "states", "spikes"
            and their "total" by layer, "total" and "ann" the sums of all layers and of the same
            network without spikes. `Accesses` says what is counted.

        Raises:
            ValueError: an argument has another value.
        """
        return estimate(self.layers, hardware, weights)

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(row.parameters for row in self.layers)

    def __str__(self) -> str:
        return "\n".join([*aligned(self._rows(), numbers_from=2), "", *self._notes()])

    __repr__ = __str__

    def to_markdown(self) -> str:
        """Return the table and its notes as Markdown."""
        head, *rows = self._rows()
        alignments = [":--", ":--", *["--:"] * (len(head) - 2)]
        lines = ["| " + " | ".join(row) + " |" for row in (head, alignments, *rows)]
        return "\n".join([*lines, "", *(f"- {note}" for note in self._notes()), ""])

    def to_html(self) -> str:
        """Return a page with the table, its notes and the picture. Needs matplotlib."""
        head, *rows = self._rows()
        image = base64.b64encode(self._png()).decode()

        def line(cells: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        return "\n".join(
            [
                '<!doctype html><meta charset="utf-8"><title>Report</title>',
                "<style>body{font-family:sans-serif;margin:2em}td,th{padding:.2em .6em;"
                "text-align:right}td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}"
                "tr:last-child{font-weight:bold}</style>",
                f"<table>{line(head, 'th')}",
                *(line(row, "td") for row in rows),
                "</table>",
                *(f"<p>{html.escape(note)}</p>" for note in self._notes()),
                f'<img alt="rates and energy by layer" src="data:image/png;base64,{image}">',
                "",
            ]
        )

    def save(self, path: str | Path) -> None:
        """Write the report as `.html`, as `.md` with the picture beside it as `.png`, or as `.json`
        with all numbers and the estimates for all hardware.

        Raises:
            ValueError: the name ends otherwise.
            ModuleNotFoundError: matplotlib is not installed.
        """
        path = Path(path)
        if path.suffix == ".html":
            path.write_text(self.to_html(), encoding="utf-8")
        elif path.suffix == ".md":
            picture = path.with_suffix(".png")
            picture.write_bytes(self._png())
            text = f"{self.to_markdown()}\n![rates and energy by layer]({picture.name})\n"
            path.write_text(text, encoding="utf-8")
        elif path.suffix == ".json":
            path.write_text(json.dumps(as_dict(self), indent=1) + "\n", encoding="utf-8")
        else:
            raise ValueError(
                f"path is {str(path)!r}: expected a name that ends in .html, .md, .json"
            )

    def plot(self) -> Any:
        """Return a matplotlib figure of the rates and the estimated energy of the layers."""
        rows = [row for row in self.layers if row.ann]
        height = 1 + 0.25 * max(len(rows), len(self.rates), 8)
        figure = plots.new_figure((10, height))
        left, right = figure.subplots(1, 2)
        plots.rates(self.rates, left)
        ours = [_energy(row.accumulates, row.multiplies) for row in rows]
        theirs = [_energy(0.0, row.ann) for row in rows]
        for values, shift, name in ((ours, -0.2, "this network"), (theirs, 0.2, "ANN, one step")):
            places = [i + shift for i in range(len(rows))]
            right.barh(places, [1e6 * value for value in values], 0.4, label=name)
        right.set(yticks=range(len(rows)), yticklabels=[label(row.name) for row in rows])
        right.set(xlabel="estimated energy per sample (µJ)")
        right.margins(y=0.01)
        right.invert_yaxis()
        right.legend()
        return figure

    def _png(self) -> bytes:
        buffer = io.BytesIO()
        self.plot().savefig(buffer, dpi=120, format="png")
        return buffer.getvalue()

    def _rows(self) -> list[list[str]]:
        is_saved = any(row.saved is not None for row in self.layers)
        rows = [[*COLUMNS, "parameters", *(["saved"] if is_saved else [])]]
        total = LayerReport(
            name="total",
            module="",
            accumulates=self.accumulates,
            multiplies=self.multiplies,
            ann=self.ann,
            parameters=self.parameters,
            saved=sum(row.saved or 0 for row in self.layers),
        )
        for row in (*self.layers, total):
            shares = (row.rate, row.dead, row.saturated, row.nonzero)
            cells = [label(row.name), row.module]
            cells += ["–" if share is None else f"{share:.1%}" for share in shares]
            products = (row.accumulates, row.multiplies, row.ann)
            cells += map(_number, products) if row.ann else ["–"] * 3
            cells.append(_number(row.parameters))
            cells += [in_bytes(row.saved or 0)] if is_saved else []
            rows.append(cells)
        return rows

    def _notes(self) -> list[str]:
        notes = [
            f"{self.samples} samples: {_number(self.accumulates)} AC, {_number(self.multiplies)} "
            f"MAC, {in_joules(self.energy)} estimated per sample; ANN: {_number(self.ann)} MAC, "
            f"{in_joules(self.ann_energy)}"
        ]
        if self.not_counted:
            names = ", ".join(map(label, self.not_counted))
            notes.append(f"not counted, since their operations are unknown: {names}")
        return [*notes, *LIMITS]


def report(net: nn.Module, batches: Iterable[Any], memory: bool = True) -> Report:
    """Run `net` on batches and report firing rates, operations, memory and estimated energy.

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(784, 128), sf.LIF(), nn.Linear(128, 10)))
        report = sf.report(net.eval(), [torch.rand(8, 32, 784)])
        print(report)
        report.save("report.html")

    Operations are counted from the values that arrive at `F.linear`, convolutions and matrix
    products, also where a layer calls them itself, at `EventLinear`, and from the spikes that a
    `Recurrent` feeds back. An input whose values are all 0, 1 or -1 costs accumulates: one for each
    weight that is added. Any other input, such as an image, the average of spikes, or a sum of
    spikes in a residual network, costs the multiply-accumulates of a dense layer. Layers before the
    first neuron that receive the same input at each step count once, since one step is enough. In a
    product of two tensors of spikes, a term counts if both values are not 0. A `DelayedLinear` in
    evaluation mode has one weight for each synapse, in training mode one for each delay.

    The estimated energy, of 0.9 pJ per accumulate and 4.6 pJ per multiply-accumulate, is compared
    with that of the same network without spikes, which runs once and only multiplies.

    Args:
        net: a `Temporal`, or a network that contains one; it runs in the mode that it is in, so
            call `net.eval()` for what it does after training. Buffers and the state of PyTorch's
            random number generators are restored.
        batches: the inputs of each call: one argument, or a tuple of arguments.
        memory: whether to measure what layers save for backward: one further call, of the first
            batch, by `explain`. Without gradients nothing is saved.

    Returns:
        The report; `print` shows it as a table.

    Raises:
        TypeError: `net` is not a module, or `batches` no sequence of inputs.
        ValueError: there is no batch, or `net` runs without a `Temporal`.

    Source: Horowitz, "Computing's energy problem (and what we can do about it)", ISSCC 2014, for
    the energies; Chen et al., "Training Full Spike Neural Networks via Auxiliary Accumulation
    Pathway", 2023, for which inputs cost multiply-accumulates.
    """
    is_sequence = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, Tensor | Events) or not is_sequence:
        kind = type(batches).__name__
        raise TypeError(f"batches is a {kind}: expected several inputs of the network, such as [x]")
    counter, saved = _Counter(net), None
    for batch in batches:
        inputs = batch if isinstance(batch, tuple) else (batch,)
        if memory and counter.samples == 0 and torch.is_grad_enabled():
            saved = {row.name: row.now for row in explain(net, *inputs, time=False).saved}
        with unchanged(net, inputs), torch.no_grad(), counter.observing():
            net(*inputs)
    if counter.samples == 0:
        raise ValueError("batches is empty: expected at least one input of the network")
    return counter.report(saved)


@dataclass
class _Counts:
    """Sums over all calls of a layer; `operations.dense` and `outputs` over single steps."""

    operations: Operations = field(default_factory=Operations)
    fired: Tensor | None = None  # by neuron
    spikes: float = 0.0
    outputs: int = 0
    reads: float = 0.0  # of inputs
    updates: float = 0.0  # of states of neurons
    writes: float = 0.0  # of outputs of neurons
    steps: int = 0  # T B
    has_one_shape: bool = True

    def accesses(self, samples: int) -> Accesses:
        done = self.operations
        results = done.outputs * done.multiplies / max(done.dense, 1)  # of multiply-accumulates
        sums = done.accumulates + self.updates
        numbers = done.accumulates + done.multiplies, sums, sums, self.reads, self.writes + results
        return Accesses(*(number / samples for number in numbers))

    def shares(self) -> tuple[float | None, float | None, float | None]:
        """Return the rate, and the shares of dead and of saturated neurons."""
        if self.fired is None:
            return None, None, None
        rate = self.spikes / max(self.outputs, 1)
        if not self.has_one_shape:
            return rate, None, None
        dead, saturated = self.fired == 0, self.fired == self.steps
        return rate, dead.float().mean().item(), saturated.float().mean().item()


class _Counter(ModuleObserver):
    """Sums what the layers of a network do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.net, self.samples = net, 0
        self.counts = defaultdict[str, _Counts](_Counts)
        self.unknown: dict[str, None] = {}
        self._call: TemporalCall | None = None  # of this batch
        self._spiking: TemporalCall | None = None  # a call in which a neuron has run

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Count one batch."""
        self._call = None
        with super().observing(), count_operations(self._count, self.net):
            yield
        if self._call is None:
            raise ValueError(
                "the network runs without a Temporal, so that steps and samples are unknown: "
                "report on sf.Temporal(net), or on a network that contains one"
            )
        self.samples += self._call.batch

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self._call = self._call or active.call
        self.counts[self.layer]  # in the order of the calls

    def _count(self, x: Tensor, operations: Operations | None) -> None:
        layer = self.modules.get(self.layer)
        if isinstance(layer, EventLinear | Recurrent):
            return  # its dense products: `leave` and `scan` count what was added
        if isinstance(layer, DelayedLinear) and not layer.training and x.ndim == 4:
            operations = delayed(layer, x)
        if operations is None:
            self.unknown[self.layer] = None
        else:
            self._add(self.layer, operations, active.call is not self._spiking and is_constant(x))

    def _add(self, name: str, operations: Operations, once: bool = False) -> None:
        """Add the operations of all steps, or of one step if they are needed `once`."""
        repeats = 1 if active.call is None else active.call.repeats
        share = 1 / (num_steps() * repeats)
        one_step = Operations(*(share * number for number in operations))
        total = one_step
        if not once or repeats > 1:
            total = operations._replace(dense=one_step.dense, outputs=one_step.outputs)
        counts = self.counts[name]
        counts.operations = counts.operations.plus(total)
        counts.reads += total.multiplies or total.nonzero

    def scan(
        self, neuron: nn.Module, scan: Scan, arguments: Arguments[Tensor], wanted: Wanted
    ) -> Results[Tensor]:
        """Run a scan and count its spikes."""
        self._spiking = active.call  # also for a body through which the neuron feeds back
        number = len(wanted.outputs)  # which may be without spikes
        outputs = (*wanted.outputs, FIRST_OUTPUT) if number else ()
        results = super().scan(neuron, scan, arguments, wanted._replace(outputs=outputs))
        y = results.outputs[number]
        self._count_spikes(self.names.get(neuron, self.layer), neuron, y)
        layer = self.modules.get(self.layer)
        if isinstance(layer, Recurrent):
            start = None if arguments.states is None else arguments.states[-1]
            self._add(self.layer, feedback(layer, y, start))
        return results._replace(outputs=results.outputs[: number or None])

    def leave(self, module: nn.Module, output: Any) -> None:
        if isinstance(module, Loop | SpikingLayer):  # a loop's neurons ran in calls of its steps
            self._spiking = active.call
        if isinstance(module, SpikingLayer):
            self._count_spikes(self.names[module], module, unfolded(output))
        if not isinstance(module, EventLinear) or module.activity is None:
            return
        name, read = self.names[module], module.activity
        used = float((read.fired - read.dropped) * module.out_features)
        dense = float(read.sites * module.out_features)
        numbers = float(read.fired), float(read.sites), dense / module.in_features
        self._add(name, Operations(used, 0.0, dense, *numbers))
        if isinstance(output, Events):
            self._count_spikes(name, module.neuron, output.to_dense())

    def _count_spikes(self, name: str, neuron: Any, y: Tensor) -> None:
        """Count the spikes of a layer; membrane potentials of readout neurons are not spikes."""
        counts, spike = self.counts[name], are_spikes(y, neuron)
        counts.updates += y.numel() * len(getattr(neuron, "states", ()))
        counts.writes += float(y.count_nonzero()) if spike else y.numel()
        if not spike:
            return
        fired = (y != 0).sum((0, 1))
        if counts.fired is None or counts.fired.shape == fired.shape:
            counts.fired = fired if counts.fired is None else counts.fired + fired
        else:
            counts.has_one_shape = False
        counts.spikes += fired.sum().item()
        counts.outputs += y.numel()
        counts.steps += y.shape[0] * y.shape[1]

    def report(self, saved: dict[str, int] | None) -> Report:
        """Return the rows of all layers, in the order of their first calls."""
        rows, seen = [], set[Tensor]()
        for name in dict.fromkeys([*self.counts, *self.modules]):
            if name not in self.modules:
                continue
            module, counts = self.modules[name], self.counts.get(name) or _Counts()
            own, done = own_parameters(module), counts.operations
            if not (own or done.inputs or counts.outputs or (saved or {}).get(name)):
                continue
            is_called = name in self.counts and not isinstance(module, Neuron | nn.LayerNorm)
            if is_called and not done.inputs and any(p.ndim > 1 for p in own):
                self.unknown[name] = None
            ann = done.dense / self.samples
            row = LayerReport(
                name,
                type(module).__name__,
                *counts.shares(),
                nonzero=done.nonzero / done.inputs if done.inputs else None,
                accumulates=done.accumulates / self.samples,
                multiplies=done.multiplies / self.samples,
                ann=ann,
                parameters=sum(p.numel() for p in own - seen),
                saved=None if saved is None else saved.get(name, 0),
                accesses=counts.accesses(self.samples),
                ann_accesses=Accesses(ann, 0.0, 0.0, ann, done.outputs / self.samples),
            )
            seen |= own
            rows.append(row)
        return Report(tuple(rows), self.samples, tuple(self.unknown))


def _energy(accumulates: float, multiplies: float) -> float:
    hardware = HARDWARE["45nm-float32"]
    return hardware.accumulate * accumulates + hardware.multiply * multiplies


def _number(number: float) -> str:
    return with_unit(number, {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0})
