"""Memory accesses of a network's operations, and the energy of both on stated hardware."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

Memory = Literal["sram", "dram"]


class Hardware(NamedTuple):
    """Joules per addition, addition of a product, and read or write of one value by memory."""

    accumulate: float
    multiply: float
    sram: float
    dram: float
    source: str


_HOROWITZ = "Horowitz, ISSCC 2014: 45 nm, SRAM of 32 kB, DRAM at 1.3 nJ for 64 bits"
_JOUPPI = (
    "Jouppi et al., Ten Lessons From Three Generations Shaped Google's TPUv4i, ISCA 2021, Table 2: "
    "7 nm, SRAM of 32 kB, HBM2 at 350 pJ for 64 bits, the middle of its range"
)
#: By name, what `Report.estimate` knows.
HARDWARE = {
    "45nm-float32": Hardware(0.9e-12, 4.6e-12, 10e-12, 650e-12, _HOROWITZ),
    "45nm-int8": Hardware(0.03e-12, 0.23e-12, 2.5e-12, 162.5e-12, _HOROWITZ),
    "7nm-float32": Hardware(0.38e-12, 1.69e-12, 4.25e-12, 175e-12, _JOUPPI),
    "7nm-int8": Hardware(0.007e-12, 0.077e-12, 1.0625e-12, 43.75e-12, _JOUPPI),
}


@dataclass(frozen=True)
class Accesses:
    """Values read and written per sample, over all time steps.

    A weight is read for each accumulate and multiply-accumulate. An accumulate also reads and
    writes the sum to which it adds, and a neuron reads and writes each of its states in each step.
    A spike is read once by each layer that adds weights for it, and written once; an input of a
    multiply-accumulate is read for each of them, whose sums stay in registers until they are
    written.

    Source: Lemaire et al., "An Analytical Estimation of Spiking Neural Networks Energy Efficiency",
    ICONIP 2022, for synapses; to which the steps of neurons are added.
    """

    weight_reads: float = 0.0
    state_reads: float = 0.0
    state_writes: float = 0.0
    spike_reads: float = 0.0
    spike_writes: float = 0.0


def estimate(rows: Iterable[Any], hardware: str | Hardware, weights: Memory) -> dict[str, Any]:
    """Return the result of `Report.estimate` for the rows of a report."""
    known = HARDWARE.get(hardware) if isinstance(hardware, str) else hardware
    if not isinstance(known, Hardware) or weights not in ("sram", "dram"):
        raise ValueError(
            f"hardware, weights are {hardware!r}, {weights!r}: expected one of "
            f"{', '.join(HARDWARE)} or a Hardware, and sram or dram"
        )
    names = ("operations", "weights", "states", "spikes", "total")

    def joules(accumulates: float, multiplies: float, number: Accesses) -> dict[str, float]:
        parts = (
            known.accumulate * accumulates + known.multiply * multiplies,
            getattr(known, weights) * number.weight_reads,
            known.sram * (number.state_reads + number.state_writes),
            known.sram * (number.spike_reads + number.spike_writes),
        )
        return dict(zip(names, (*parts, sum(parts)), strict=True))

    layers = {row.name: joules(row.accumulates, row.multiplies, row.accesses) for row in rows}
    ann = [joules(0.0, row.ann, row.ann_accesses) for row in rows]
    total, of_ann = ({n: sum(x[n] for x in xs) for n in names} for xs in (layers.values(), ann))
    stated = {"hardware": known._asdict(), "weights": weights}
    return {**stated, "layers": layers, "total": total, "ann": of_ann}


def as_dict(report: Any) -> dict[str, Any]:
    """Return the numbers of a report, and the estimates for all hardware, for JSON."""
    names = "samples", "not_counted", "accumulates", "multiplies", "ann", "energy", "ann_energy"
    sums = {name: getattr(report, name) for name in (*names, "parameters")}
    pairs = [(name, weights) for name in HARDWARE for weights in ("sram", "dram")]
    estimates = {f"{name}, weights in {w}": report.estimate(name, w) for name, w in pairs}
    return {**sums, "layers": [*map(asdict, report.layers)], "estimates": estimates}
