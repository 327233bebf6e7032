"""Record spikes, states and layer outputs of the calls of a network."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, KeysView, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from spikefuse._torch import version
from spikefuse.events.format import Events
from spikefuse.events.linear import EventLinear
from spikefuse.inspect.explanation import label
from spikefuse.inspect.observer import ModuleObserver
from spikefuse.neurons.definition import (
    FIRST_OUTPUT,
    NO_NAME,
    Neuron,
    SpikingLayer,
    UnknownOutput,
)
from spikefuse.neurons.per_step import per_step_values
from spikefuse.nn.call import Scan, active
from spikefuse.nn.checkpoint import is_recomputed
from spikefuse.nn.nesting import map_tensors
from spikefuse.nn.neuron import exposed_names, fires, scan_neuron
from spikefuse.nn.readouts import valid
from spikefuse.scan.layout import unflatten_steps
from spikefuse.scan.records import Arguments, Results, Wanted

SPIKES, OUTPUT = "spikes", "output"
Names = str | Iterable[str]


class Record:
    """What `record` has recorded: `record["net.2"]["v"]` is a tensor `[T, B, ...]`.

    The keys are the names of the recorded neurons and layers that were called, in the order of
    their first calls. `items()` and `values()` have the values of each call. Reading a name that
    was called several times raises a ValueError: its values are in `calls`, and `rates` counts all
    of them.

    Attributes:
        calls: for each name, the values of every call, in order.
        lengths: steps of each sample, of padded sequences.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[dict[str, Any]]] = {}
        self.lengths: Tensor | None = None
        self._neurons: dict[str, nn.Module] = {}
        self._calls_of_network = 0
        self._read: list[tuple[str, Tensor, int]] = []

    def __getitem__(self, name: str) -> dict[str, Any]:
        self._check()
        if name not in self.calls:
            raise KeyError(
                f"{name!r} was not recorded: expected one of {', '.join(self.calls) or '(none)'}; "
                "it was not called, or neurons= and layers= do not select it"
            )
        calls = self.calls[name]
        if len(calls) > 1:
            raise ValueError(
                f"{name!r} was called {len(calls)} times: read record.calls[{name!r}], a list of "
                "its calls, or record one call of the network"
            )
        return calls[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __contains__(self, name: object) -> bool:
        return name in self.calls

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self.calls.keys()

    def items(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the name and the values of each call: several pairs for a name that was called
        several times."""
        self._check()
        return [(name, values) for name, calls in self.calls.items() for values in calls]

    def values(self) -> list[dict[str, Any]]:
        """Return the values of each call."""
        return [values for _, values in self.items()]

    def of(self, state: str = SPIKES) -> dict[str, Tensor]:
        """Return one state of all neurons that have it, by the neuron's name.

        Raises:
            ValueError: one of them was called several times.
        """
        return {name: self[name][state] for name, calls in self.calls.items() if state in calls[0]}

    @property
    def rates(self) -> dict[str, float]:
        """The share of neurons that fire in a step, by layer of neurons, over all calls, each of
        which counts by the number of its values. Of neurons with several outputs, the first counts.
        Layers whose outputs are not spikes, such as the potentials of `LI`, have none. Padding does
        not count: each call of the network reads sequences of `lengths`."""
        self._check()
        rates = {}
        for name, calls in self.calls.items():
            spikes = [s.detach() for s in first_outputs(calls)]
            if self.lengths is not None:
                if all(len(s) == 1 for s in spikes):  # the steps of a loop, or of a stream
                    number = max(len(spikes) // max(self._calls_of_network, 1), 1)
                    starts = range(0, len(spikes), number)
                    spikes = [torch.cat(spikes[start : start + number]) for start in starts]
                spikes = [s[valid(s, self.lengths)] for s in spikes]
            if spikes and all(are_spikes(s, self._neurons[name]) for s in spikes):
                rates[name] = firing_rate(*spikes)
        return rates

    def __repr__(self) -> str:
        def shown(x: Any) -> str:
            return str(list(x.shape)) if isinstance(x, Tensor) else type(x).__name__

        lines = [f"{len(self)} recorded"]
        for name, calls in self.calls.items():
            times = f" ({len(calls)} calls, the first one)" if len(calls) > 1 else ""
            values = ", ".join(f"{key} {shown(x)}" for key, x in calls[0].items())
            lines.append(f"{label(name)}: {values}{times}")
        return "\n".join(lines)

    def _add(self, name: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self.calls.setdefault(name, []).append(values)
        return values

    def _check(self) -> None:
        for name, x, before in self._read:
            if version(x) != before:
                raise RuntimeError(
                    f"the network changed the output of {name!r} in place after it was recorded "
                    "with its history: record with grad=False, which copies, or change a copy"
                )


@contextlib.contextmanager
def record(
    net: nn.Module,
    neurons: Names = "*",
    states: Names = (SPIKES,),
    layers: Names = (),
    grad: bool = False,
    lengths: Tensor | None = None,
) -> Iterator[Record]:
    """Record the calls of `net` inside the `with` block.

    Example::

        net = sf.Temporal(nn.Sequential(nn.Linear(784, 128), sf.LIF(), nn.Linear(128, 10)))
        with sf.record(net, states=("spikes", "v"), layers="net.0") as record:
            logits = net(torch.rand(8, 32, 784))
        v = record["net.1"]["v"]  # potentials of the LIF neurons, [T, B, 128]
        current = record["net.0"]["output"]  # output of the linear layer, [T, B, 128]

    The results of the network do not change: kernels return potentials as additional outputs. The
    values are bit for bit those of the calls, and the states are those after each step, for `LIF`
    after the reset.

    Networks that `spikefuse.fuse` or `torch.compile` has compiled, and those under the policy
    `Checkpoint`, run eagerly meanwhile, each layer on its own: this takes the memory of the plain
    network, and rounds as it does. Only calls in this thread are recorded, and one thread records
    at a time; replays of CUDA graphs are not recorded, nor are second runs of a checkpoint in
    backward. A process that holds some of the time steps, or some of the neurons, records its own.

    A recorded neuron that reads NaN warns, since it gives no spike for NaN.

    Args:
        net: any module; names are those of `net.named_modules()`.
        neurons: names of neurons, as patterns of `fnmatch`, one or several.
        states: "spikes" for the output of `step` (recorded as "output0", "output1", ... if it has
            several), names of declared states, and of values that `step` exposes, such as "h", the
            potential before the reset; each neuron records those that it has. `PSN`, and neurons of
            an `EventLinear`, have their spikes only.
        layers: names of other modules, as patterns; their results are recorded as "output". Inside
            `Temporal`, tensors are unfolded to `[T, B, ...]`, also with `batch_first=True`.
        grad: whether values keep their history, for a loss on them. Otherwise they are copies
            without it. Gradients of the network's output with respect to recorded values are not
            supported.
        lengths: of padded sequences, the steps of each sample, `[B]`, which `rates` counts. Values
            are recorded with their padding.

    Yields:
        The `Record`, which is filled as the network is called.

    Raises:
        TypeError: `net` is not a module, or names are no strings.
        ValueError: a pattern selects nothing; no selected neuron has a state; or one of a neuron of
            an `EventLinear` is asked for.
    """
    recorder = _RecordObserver(net, neurons, states, layers, grad)
    recorder.record.lengths = lengths
    with recorder.observing():
        yield recorder.record
    recorder.record._check()


class _RecordObserver(ModuleObserver):
    def __init__(
        self, net: nn.Module, neurons: Names, states: Names, layers: Names, grad: bool
    ) -> None:
        super().__init__(net)
        self.record, self.grad, self.keeps_graph = Record(), grad, grad
        self.states = _names("states", states)
        kinds = Neuron | SpikingLayer
        known = {name: m for m, name in self.names.items() if isinstance(m, kinds)}
        others = {name: m for m, name in self.names.items() if not isinstance(m, Neuron)}
        self._neurons: dict[Any, str] = {known[n]: n for n in _selected("neuron", neurons, known)}
        self.record._neurons = {name: neuron for neuron, name in self._neurons.items()}
        self._layers = {others[n]: n for n in _selected("layer", layers, others)}
        self._event_layers: dict[Any, str] = {
            m: self._neurons[m.neuron]
            for m in others.values()
            if isinstance(m, EventLinear) and m.neuron in self._neurons
        }
        self._check_states()
        # By neuron, the names of what its step returns, and those of `states` that it has.
        self._labels: dict[Neuron, tuple[tuple[str, ...], list[str]]] = {}

    def _check_states(self) -> None:
        further = [s for s in self.states if s != SPIKES]
        if not (further and self._neurons):
            return
        found = [_further_names(neuron) for neuron in self._neurons]
        if None not in found:  # else a neuron tells its names in its first call
            names = {SPIKES}.union(*(names or () for names in found))
            for state in further:
                if state not in names:
                    raise ValueError(
                        f"no selected neuron has {state!r}: expected names among "
                        f"{', '.join(map(repr, sorted(names)))}"
                    )
        for layer, name in self._event_layers.items():
            hidden = [s for s in further if s in (_further_names(layer.neuron) or ())]
            if hidden:
                raise ValueError(
                    f"{name!r} is inside an EventLinear, which does not store {hidden[0]!r} over "
                    "time: select other neurons, or use nn.Linear followed by the neuron"
                )

    def scan(
        self, neuron: nn.Module, scan: Scan, arguments: Arguments[Tensor], wanted: Wanted
    ) -> Results[Tensor]:
        """Run a scan with the states as further outputs, and record it."""
        assert isinstance(neuron, Neuron)
        name = self._neurons.get(neuron)
        if name is None:
            return super().scan(neuron, scan, arguments, wanted)
        self._warn_of_nan(neuron, name, arguments)
        labels, states = self._labels_of(neuron, arguments)
        returned = wanted.outputs or labels
        recorded = [*(labels if SPIKES in self.states else ())]
        recorded += [s for s in states if s not in recorded]
        further = tuple(s for s in recorded if s not in returned)
        if further:
            wanted = wanted._replace(outputs=(*returned, *further))
        results = super().scan(neuron, scan, arguments, wanted)
        if recorded and not is_recomputed(or_by_ours=True):
            values = self.record._add(name)
            found = dict(zip((*returned, *further), results.outputs, strict=True))
            for state in recorded:
                values[state] = self._value(name, found[state], copy=state in returned)
        return results._replace(outputs=results.outputs[: len(returned)])

    def _warn_of_nan(self, neuron: nn.Module, name: str, arguments: Arguments[Tensor]) -> None:
        values = {"inputs": arguments.inputs, "initial states": arguments.states or ()}
        for kind, tensors in {**values, "parameters": list(neuron.parameters())}.items():
            if any(bool(x.isnan().any()) for x in tensors):
                warnings.warn(
                    f"{name!r} has NaN in its {kind}, for which neurons give no spikes",
                    stacklevel=2,
                )

    def _labels_of(
        self, neuron: Neuron, arguments: Arguments[Tensor]
    ) -> tuple[tuple[str, ...], list[str]]:
        """The names of what `step` returns, and of the states to record, from one sample."""
        if neuron not in self._labels:
            # Without the residual of a block.
            inputs = arguments.inputs[: len(type(neuron).input_names)]
            # A parameter with a value per step takes sequences of this length only.
            num_steps = len(inputs[0]) if per_step_values(neuron.values(), inputs[0]) else 1
            step = Arguments([x[:num_steps, :1].detach() for x in inputs])
            try:
                with torch.no_grad():
                    scan_neuron(neuron, step, Wanted(outputs=(NO_NAME,), impl="reference"))
            except UnknownOutput as error:
                further = {*type(neuron).states, *error.exposed}
                states = [s for s in self.states if s in further]
                self._labels[neuron] = error.labels or (SPIKES,), states
        return self._labels[neuron]

    def enter(self, module: nn.Module, inputs: Any) -> None:
        if module is self.modules[""]:
            self.record._calls_of_network += 1
        if isinstance(module, SpikingLayer) and module in self._neurons:
            self._warn_of_nan(module, self._neurons[module], Arguments(inputs))

    def leave(self, module: nn.Module, output: Any) -> None:
        if is_recomputed(or_by_ours=True):
            return
        values: dict[str, Any] = {}
        if isinstance(module, SpikingLayer) and module in self._neurons and SPIKES in self.states:
            values[SPIKES] = self._value(self._neurons[module], unfolded(output))
        if module in self._event_layers and isinstance(output, Events) and SPIKES in self.states:
            with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
                self.record._add(self._event_layers[module])[SPIKES] = output.to_dense()
        if module in self._layers:
            name = self._layers[module]
            values[OUTPUT] = map_tensors(lambda y: self._value(name, unfolded(y)), output)
        if values:
            self.record._add(self.names[module]).update(values)

    def _value(self, name: str, y: Tensor, copy: bool = True) -> Tensor:
        if self.grad and y.requires_grad:
            self.record._read.append((name, y, version(y)))
            return y
        y = y.detach()
        if not copy:
            return y
        if y.ndim and y.stride(0) == 0 and len(y):  # the same at each step
            return y[:1].clone().expand_as(y)
        return y.clone()


def are_spikes(y: Tensor, neuron: nn.Module | None = None) -> bool:
    """Whether outputs are spikes, instead of potentials: by the step of the neuron, if it tells,
    else whether they are whole numbers.

    Args:
        neuron: which has returned them, if it is known.
    """
    if isinstance(neuron, SpikingLayer):
        return True
    known = fires(neuron) if isinstance(neuron, Neuron) else None
    return bool((y == y.round()).all()) if known is None else known


def first_outputs(calls: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    """Return the first output of a neuron, spikes or potentials, in each call that recorded it."""
    outputs = [values.get(SPIKES, values.get(FIRST_OUTPUT)) for values in calls]
    return [y for y in outputs if y is not None]


def firing_rate(*calls: Tensor) -> float:
    """Return the share of the neurons that fire in a step, given their spikes in each call."""
    fired = sum(int(spikes.count_nonzero()) for spikes in calls)
    return fired / max(sum(spikes.numel() for spikes in calls), 1)


def _names(argument: str, names: Names) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Iterable) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{argument} is {names!r}: expected names, one or several")
    return tuple(names)


def _selected(kind: str, patterns: Names, names: Mapping[str, nn.Module]) -> list[str]:
    """The names that match any of the patterns."""
    chosen: dict[str, None] = {}
    for pattern in _names(f"{kind}s", patterns):
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found and pattern != "*":
            hint = "; neurons are selected by neurons=" if kind == "layer" else ""
            known = ", ".join(map(repr, names)) or "none"
            raise ValueError(f"{pattern!r} selects no {kind}: the names are {known}{hint}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _further_names(neuron: Any) -> Iterable[str] | None:
    """The names of the states and exposed values of a neuron; None if they are not known."""
    if isinstance(neuron, SpikingLayer):
        return ()
    exposed = exposed_names(neuron)
    return None if exposed is None else (*type(neuron).states, *exposed)


def unfolded(y: Tensor) -> Tensor:
    """The output of a layer, `[T*B, ...]` inside `Temporal`, as `[T, B, ...]`; other tensors as
    they are."""
    num_steps = active.call.num_steps if active.call else 0
    if not num_steps or y.ndim == 0 or y.shape[0] % num_steps:
        return y
    return unflatten_steps(y, num_steps)
