"""The claims of the README: how much faster ours was than the fastest rival of the same run.

Beside it is the memory of that rival over ours, where it was measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record, sections
from benchmarks.events import DENSE, EVENTS
from benchmarks.layers import OURS
from benchmarks.overview import JELLY, best
from benchmarks.recurrent import RLEAKY


class Claim(NamedTuple):
    """A row of a result, and those of its contenders whose names begin as given; `what` describes
    the row by its values; `limit` says when there is no such gain."""

    what: str
    benchmark: str
    row: dict[str, Any]
    rivals: tuple[str, ...]
    limit: str
    section: str  # of docs/benchmarks.md
    ours: str = OURS
    kind: str = "wall_ms"
    on_gpu: bool = True


CLAIMS = (
    Claim(
        "{N:,} LIF neurons over {T} steps in {dtype}, forward and backward",
        "neurons",
        {"group": "lif", "T": 32, "dtype": "bfloat16"},
        (JELLY,),
        "both read and write what they must: in float32, the gain is smaller",
        "other-neurons-and-sizes",
        kind="device_ms",
    ),
    Claim(
        "a training step of Spiking-ResNet18 in {dtype}, T = {T}",
        "networks",
        {"workload": "resnet18-stem3", "dtype": "bfloat16"},
        (JELLY,),
        "a network of ReLUs that `torch.compile` has compiled is about as fast",
        "whole-training-steps",
    ),
    Claim(
        "a layer of {N} recurrent LIF neurons over {T} steps",
        "recurrent",
        {"row": "T=100 B=256 N=128, float32"},
        (RLEAKY, "eager loop"),
        "`nn.RNN` of cuDNN, which has no spikes, is faster at this size",
        "recurrent-layers",
    ),
    Claim(
        "a training step of snnTorch's tutorial 5",
        "cpu",
        {"row": "snnTorch's tutorial 5, T = 25"},
        ("snnTorch",),
        "networks whose convolutions take most of the time gain less",
        "whole-steps-on-a-cpu",
        on_gpu=False,
    ),
    Claim(
        "a training step of {neurons:,} neurons of which {rate:.1%} fire, in event-driven layers",
        "events",
        {"case": "shd", "rate": 0.005},
        (DENSE,),
        "on a GPU, dense layers are faster at every activity measured for small networks",
        "sparse-event-driven-training",
        ours=EVENTS,
        on_gpu=False,
    ),
)


def claims(results: list[tuple[Path, dict[str, Any]]], root: Path) -> str:
    """A table with a line for each claim.

    Raises:
        StopIteration: a claim has no row in the results.
        AssertionError: a claim has no contender.
    """
    names = ("faster", "than", "its time", "its memory", "on", "not faster")
    lines = [f"| {' | '.join(names)} |", "| --- | --- | ---: | ---: | --- | --- |"]
    for claim in CLAIMS:
        result, row = next(
            (result, row)
            for _, result in results
            if result["benchmark"].startswith(claim.benchmark)
            if ("gpu" in result["machine"]) == claim.on_gpu
            for row in result["rows"]
            if claim.row.items() <= row.items()
        )
        ours = best(row["contenders"], (claim.ours,), claim.kind)
        rival = best(row["contenders"], claim.rivals, claim.kind)
        assert ours is not None, claim.what
        assert rival is not None, claim.what
        ratio = sections.median(rival, claim.kind) / sections.median(ours, claim.kind)
        peaks = rival.get("peak_bytes"), ours.get("peak_bytes")
        memory = f"{peaks[0] / peaks[1]:.2g}×" if all(peaks) else "–"
        what = f"[{claim.what.format_map(row)}](docs/benchmarks.md#{claim.section})"
        cells = (what, rival["name"], f"{ratio:.2g}×", memory, record.device(result), claim.limit)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
