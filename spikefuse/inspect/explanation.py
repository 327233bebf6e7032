"""The report of `explain`, and its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from spikefuse.memory.policies import Policy
from spikefuse.transforms.tables import aligned

# Steps for which the eager loop is measured; every further step saves as much as the last of them.
LOOP_STEPS = 4


@dataclass(frozen=True)
class Layer:
    """One call of a neuron, or of a block of norm and neuron.

    Attributes:
        name: qualified name of the neuron in the model; "" for the model itself.
        module: name of its type, with its norm: "BatchNorm2d + residual + LIF".
        shape: shape of each input, `[T, B, ...]`.
        dtypes: dtypes of the inputs.
        implementation: "triton", "numba" or "reference".
        memory: the memory policy in effect.
        program: name of its kernels, or None on the reference.
        chunk: K, the number of steps between states stored for backward, or None.
        moved: bytes that must move. Forward reads inputs and writes outputs; backward reads inputs
            and gradients of outputs, and writes the gradients of inputs that require one. Batch
            statistics read the norm's input once more, and their backward reads inputs and
            gradients once more.
        least: seconds to move these bytes at the bandwidth of a copy, or None if not measured.
        achieved: median seconds of forward, and backward if there is one, of this layer alone,
            including host time; None if not measured.
        notes: why it runs on the reference, and which inputs are copied.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    implementation: str
    memory: Policy
    program: str | None
    chunk: int | None
    moved: int
    least: float | None
    achieved: float | None
    notes: tuple[str, ...]

    @property
    def fraction(self) -> float | None:
        """Least over achieved time; 1 is the speed of a copy."""
        if self.least is None or self.achieved is None:
            return None
        return self.least / self.achieved


@dataclass(frozen=True)
class SavedBytes:
    """What a layer saves for backward; memory that several layers save counts for the first.

    Attributes:
        name: qualified name of the layer in the model; "" for the model itself.
        module: name of its type, as in `Layer`.
        now: bytes under the policy in effect, without parameters and buffers.
        eager: bytes in PyTorch alone: norm, sum and `impl="reference"` one after the other, and no
            packed spikes. The loop is measured for up to four steps; every further step is assumed
            to save as much as the fourth. None for layers on events.
    """

    name: str
    module: str
    now: int
    eager: int | None


@dataclass(frozen=True)
class Explanation:
    """The report of `explain`; as a string, two tables.

    Attributes:
        layers: one row per call of a neuron, in the order of the calls.
        saved: one row per layer that saves anything for backward, in the order of first calls.
        not_called: names of the neurons that were not called.
        num_others: number of modules without submodules that are not neurons.
        bandwidth: bytes per second that a copy reads and writes, or None if not measured.
        notes: lines on layers on events, on loops over time, and on batch norms of `fuse` that were
            not fused, with the reason.
    """

    layers: tuple[Layer, ...]
    saved: tuple[SavedBytes, ...]
    not_called: tuple[str, ...]
    num_others: int
    bandwidth: float | None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = _table(self.layers) if self.layers else []
        for layer in self.layers:
            lines += [f"{label(layer.name)}: {note}" for note in layer.notes]
        lines += self.notes
        if self.not_called:
            lines.append(f"not called: {', '.join(self.not_called)}")
        lines += ["", *_saved_table(self.saved), ""] if self.saved else []
        return "\n".join([*lines, *_legend(self)])

    __repr__ = __str__


def label(name: str) -> str:
    """Return what a table shows for the name of a layer."""
    return name or "(the model)"


def _table(layers: Sequence[Layer]) -> list[str]:
    timed = any(layer.least is not None for layer in layers)
    rows = [["layer", "module", "input", "dtype", "kernel", "memory", "K"]]
    rows[0] += ["least", "achieved", "fraction"] if timed else []
    for layer in layers:
        times = f"{len(layer.dtypes)} × " if len(layer.dtypes) > 1 else ""
        dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in layer.dtypes)
        row = [label(layer.name), layer.module, f"{times}{list(layer.shape)}", ", ".join(dtypes)]
        row += [layer.program or layer.implementation, type(layer.memory).__name__]
        row.append(str(layer.chunk or "–"))
        if layer.least is not None and layer.achieved is not None:
            row += [_time(layer.least), _time(layer.achieved), f"{layer.fraction:.1%}"]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return aligned(rows, numbers_from=6)


def _saved_table(layers: Sequence[SavedBytes]) -> list[str]:
    known = [x.eager for x in layers if x.eager is not None]
    eager = sum(known) if len(known) == len(layers) else None
    total = SavedBytes("total", "", sum(x.now for x in layers), eager)
    rows = [["layer", "module", "saved", "by eager PyTorch"]]
    for row in (*layers, total):
        shown = "–" if row.eager is None else in_bytes(row.eager)
        rows.append([label(row.name), row.module, in_bytes(row.now), shown])
    return aligned(rows, numbers_from=2)


def _legend(explanation: Explanation) -> Iterator[str]:
    plural = "module is" if explanation.num_others == 1 else "modules are"
    yield f"{explanation.num_others} other {plural} ordinary PyTorch"
    if explanation.layers:
        yield "K: steps between stored states"
    if explanation.saved:
        yield (
            "saved: for backward, at the first of the layers that save it; by the eager loop, "
            f"measured for {LOOP_STEPS} steps and scaled"
        )
    if explanation.bandwidth is not None:
        yield (
            "least: bytes that must move at the bandwidth of a copy, "
            f"{explanation.bandwidth / 1e9:,.0f} GB/s. achieved: this layer alone, forward and "
            "backward, including host time"
        )


def in_bytes(number: int) -> str:
    """Return a size in the largest fitting unit."""
    return with_unit(number, {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0})


def in_joules(energy: float) -> str:
    """Return an energy in the largest fitting unit."""
    return with_unit(energy, {"J": 1.0, "mJ": 1e-3, "µJ": 1e-6, "nJ": 1e-9, "pJ": 1e-12})


def with_unit(value: float, units: Mapping[str, float]) -> str:
    """Format with three digits in the first unit that fits, or in the last; 1 MB, not 1000 kB."""
    fitting = (unit for unit, size in units.items() if value >= 0.9995 * size)
    unit = next(fitting, [*units][-1])
    return f"{value / units[unit]:.3g} {unit}".rstrip()


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"
