"""What `explain` finds, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from spikefuse.memory.policies import Policy

# Steps for which the eager loop is measured; each further one keeps as much as the last of them.
LOOP_STEPS = 4


@dataclass(frozen=True)
class Layer:
    """One call of a neuron, or of a block of norm and neuron.

    Attributes:
        name: the neuron's qualified name in the model; "" for the model itself.
        module: the name of its type, after that of its norm: "BatchNorm2d + residual + LIF".
        shape: of each input, `[T, B, ...]`.
        dtypes: of the inputs.
        implementation: "triton", "numba" or "reference".
        memory: the policy in force, which says what is kept for backward.
        program: the name of its kernels, or None on the reference.
        chunk: K, the steps between the states that are stored for backward, or None.
        moved: the bytes that must move: inputs read, outputs written; for backward inputs and
            gradients of outputs read, and gradients written of the inputs that require them. The
            statistics of a batch take one more reading of the norm's input, and backward one more
            of inputs and gradients.
        least: seconds for moving them at the bandwidth of a copy, or None if not measured.
        achieved: seconds of a forward call of this layer alone, and its backward if there is one:
            the median of a few, the host's part included; or None if not measured.
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
        """Least over achieved time; 1 is the speed of memory."""
        if self.least is None or self.achieved is None:
            return None
        return self.least / self.achieved


@dataclass(frozen=True)
class Kept:
    """What a layer keeps for backward; memory that several layers keep counts at the first.

    Attributes:
        name: the layer's qualified name in the model; "" for the model itself.
        module: the name of its type, as in `Layer`.
        now: bytes under the policy in force; parameters and buffers do not count.
        eager: bytes if PyTorch did it alone: norm, sum and `impl="reference"` one after the other,
            and no spikes packed. The loop is measured for up to four steps; each further one is
            taken to keep as much more as the fourth. None for layers on events.
    """

    name: str
    module: str
    now: int
    eager: int | None


@dataclass(frozen=True)
class Explanation:
    """What `explain` has found; as a string, two tables.

    Attributes:
        layers: one per call of a neuron, in the order of the calls.
        kept: one per layer that keeps anything for backward, in the order of the first calls.
        not_called: the names of neurons that were not called.
        num_others: modules without submodules that are not neurons.
        bandwidth: bytes per second that a copy reads and writes, or None if not measured.
        events: a line for each `EventLinear`: what it ran on, why, and how active its input was.
        again: the names of networks whose layers `Checkpoint` has computed, and computes again in
            backward: they have no rows, but for layers that are not computed again.
    """

    layers: tuple[Layer, ...]
    kept: tuple[Kept, ...]
    not_called: tuple[str, ...]
    num_others: int
    bandwidth: float | None
    events: tuple[str, ...] = ()
    again: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = _table(self.layers) if self.layers else []
        for layer in self.layers:
            lines += [f"{_label(layer.name)}: {note}" for note in layer.notes]
        lines += self.events
        for name in self.again:
            lines.append(
                f"{_label(name)}: memory=Checkpoint() computes its layers again in backward; they "
                "and what it keeps are not shown: explain it with Recompute()"
            )
        if self.not_called:
            lines.append(f"not called: {', '.join(self.not_called)}")
        lines += ["", *_table_of_kept(self.kept, not self.again), ""] if self.kept else []
        return "\n".join([*lines, *_legend(self)])

    __repr__ = __str__


def _label(name: str) -> str:
    return name or "(the model)"


def _table(layers: Sequence[Layer]) -> list[str]:
    timed = any(layer.least is not None for layer in layers)
    rows = [["layer", "module", "input", "dtype", "kernel", "memory", "K"]]
    rows[0] += ["least", "achieved", "fraction"] if timed else []
    for layer in layers:
        count = f"{len(layer.dtypes)} × " if len(layer.dtypes) > 1 else ""
        dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in layer.dtypes)
        row = [_label(layer.name), layer.module, f"{count}{list(layer.shape)}", ", ".join(dtypes)]
        row += [layer.program or layer.implementation, type(layer.memory).__name__]
        row.append(str(layer.chunk or "–"))
        if layer.least is not None and layer.achieved is not None:
            row += [_time(layer.least), _time(layer.achieved), f"{layer.fraction:.1%}"]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return _aligned(rows, numbers_from=6)


def _table_of_kept(layers: Sequence[Kept], are_all: bool) -> list[str]:
    known = [x.eager for x in layers if x.eager is not None]
    eager = sum(known) if len(known) == len(layers) else None
    total = [Kept("total", "", sum(x.now for x in layers), eager)] if are_all else []
    rows = [["layer", "module", "kept", "by eager PyTorch"]]
    for kept in (*layers, *total):
        shown = "–" if kept.eager is None else _bytes(kept.eager)
        rows.append([_label(kept.name), kept.module, _bytes(kept.now), shown])
    return _aligned(rows, numbers_from=2)


def _aligned(rows: list[list[str]], numbers_from: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i >= numbers_from else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _legend(explanation: Explanation) -> Iterator[str]:
    plural = "module is" if explanation.num_others == 1 else "modules are"
    yield f"{explanation.num_others} other {plural} ordinary PyTorch"
    if explanation.layers:
        yield "K: steps between stored states"
    if explanation.kept:
        yield (
            "kept: for backward, at the first of the layers that keep it; by the eager loop, "
            f"measured for {LOOP_STEPS} steps and scaled"
        )
    if explanation.bandwidth is not None:
        yield (
            "least: what must move at the bandwidth of a copy, "
            f"{explanation.bandwidth / 1e9:,.0f} GB/s. achieved: this layer alone, forward and "
            "backward, the host's part included"
        )


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:  # 1 MB, not 1000 kB
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"
