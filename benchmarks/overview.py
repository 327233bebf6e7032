"""The table to decide from: for each workload, our best time beside the best of a rival."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import convert, jelly, networks, open_neuromorphic, record, recurrent, sections
from benchmarks.layers import LOOP, OURS

Result = dict[str, Any]
JELLY = "SpikingJelly"


class Group(NamedTuple):
    """Rows of a benchmark; contenders are named by how their names begin.

    Attributes:
        workload: describes a row by its values.
        kind: of time; that of the device hides the host, as a recorded step does.
    """

    benchmark: str
    workload: str
    rivals: tuple[str, ...]
    ours: str = OURS
    kind: str = "wall_ms"


GROUPS = (
    Group("neurons", "{neuron}, {N:,} neurons, T = {T}", (JELLY, jelly.FLEXSN), kind="device_ms"),
    Group("networks", "{workload}, T = {T}, {steps}", (JELLY,)),
    Group("networks", "{workload}, T = {T}, {steps}, against ReLUs", (networks.RELU,)),
    Group("latency", "{workload}, {steps}", (JELLY, "snnTorch")),
    Group("latency", "{workload}, {steps}, against ReLUs", (networks.RELU,)),
    Group("convert", "{network}, {steps}", (convert.ORIGINAL,), convert.CONVERTED),
    Group("recurrent", "{N:,} recurrent neurons, T = {T}", (LOOP, recurrent.RLEAKY)),
    Group("recurrent", "{N:,} recurrent neurons, T = {T}, without spikes", (recurrent.RNN,)),
    Group(
        "open_neuromorphic",
        "linear layer and {N:,} LIF neurons, T = {T}",
        (JELLY, open_neuromorphic.SNNTORCH, open_neuromorphic.NORSE, open_neuromorphic.SPYX),
    ),
    Group("methods", "{row}", (JELLY, "shifted sequences", LOOP)),
    Group("cpu", "{row}", (JELLY, "snnTorch", "Norse")),
)

MEASURABLE_BYTES = 1 << 17


def best(contenders: Iterable[Result], names: tuple[str, ...], kind: str) -> Result | None:
    """Return the fastest contender whose name begins with one of `names`."""
    found = [c for c in contenders if c["name"].startswith(names) and kind in c]
    return min(found, key=lambda c: float(c[kind]["median"]), default=None)


def lines(group: Group, result: Result) -> Iterator[Result]:
    for row in result["rows"]:
        ours = best(row["contenders"], (group.ours,), group.kind)
        rival = best(row["contenders"], group.rivals, group.kind)
        if ours is None or rival is None or not row.get("training", True):
            continue
        ratio = sections.median(rival, group.kind) / sections.median(ours, group.kind)
        peaks = ours.get("peak_bytes"), rival.get("peak_bytes")
        # What torch.compile has recorded holds its memory from the first call on.
        is_known = all(peaks) and min(peaks) > MEASURABLE_BYTES
        yield {
            "workload": group.workload.format_map(row),
            "dtype": row.get("dtype", "float32"),
            "ours": ours[group.kind],
            "rival": rival["name"],
            "its": rival[group.kind],
            "gain": sections.times(ratio) if ratio >= 1 else f"**{sections.times(ratio)}**",
            "memory": sections.times(peaks[0] / peaks[1]) if is_known else "–",
        }


def overview(results: list[tuple[Path, Result]], root: Path) -> str:
    """A table for each device, with the newest result of each workload."""
    found: dict[str, dict[tuple[str, str], Result]] = {}
    for group in GROUPS:
        for _, result in sorted(results, key=lambda entry: str(entry[1]["date"])):
            if result["benchmark"].startswith(group.benchmark):
                for line in lines(group, result):
                    of_device = found.setdefault(record.device(result), {})
                    of_device[line["workload"], line["dtype"]] = line
    columns: sections.Columns = {"workload": "workload", "dtype": "dtype", "spikefuse, ms": "ours"}
    columns |= {"best rival": "rival", "its ms": "its", "its time / ours": "gain"}
    columns |= {"our memory / its": "memory"}
    return "\n\n".join(
        text
        for device, rows in found.items()
        for text in (f"**{device}**", sections.table(list(rows.values()), columns))
    )
