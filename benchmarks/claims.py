"""The claims of the README: for each, how much faster one contender was than another in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.events import DENSE, EVENTS
from benchmarks.layers import LOOP, OURS


class Claim(NamedTuple):
    """A row of a result and two of its contenders; `what` names `slow`, and describes the row by
    its values; `limit` says when there is no such gain."""

    what: str
    benchmark: str
    row: dict[str, Any]
    fast: str
    slow: str
    limit: str
    section: str  # of docs/benchmarks.md
    on_gpu: bool = True


CLAIMS = (
    Claim(
        "{N:,} LIF neurons over {T} steps, forward and backward, against an eager loop",
        "timestep_scaling",
        {"T": 32, "dtype": "float32"},
        OURS,
        LOOP,
        "for one or two steps `torch.compile` of the loop is as fast; SpikingJelly's kernel is "
        "closer than the loop",
        "one-layer-of-lif-neurons",
    ),
    Claim(
        "a layer of 128 recurrent LIF neurons over 100 steps, against an eager loop",
        "recurrent",
        {"row": "T=100 B=256 N=128, float32"},
        OURS,
        LOOP,
        "in float32, up to 256 neurons, `nn.RNN` of cuDNN, which has no spikes, is faster",
        "recurrent-layers",
    ),
    Claim(
        "a training step of Spiking-ResNet18 in {dtype} with `sf.graph_step`, against the same "
        "network with ReLUs as a CUDA graph",
        "networks",
        {"workload": "resnet18-mnist-sgd", "dtype": "bfloat16"},
        "spikefuse, fused, sf.graph_step",
        "ReLU and batch norm, CUDA graph",
        "eager steps are bound by the host, and slower than with ReLUs",
        "whole-training-steps",
    ),
    Claim(
        "a training step of snnTorch's tutorial 5, against snnTorch",
        "cpu",
        {"row": "snnTorch's tutorial 5, T = 25"},
        OURS,
        "snnTorch",
        "networks whose convolutions take most of the time gain less",
        "whole-steps-on-a-cpu",
        on_gpu=False,
    ),
    Claim(
        "a training step of {neurons:,} neurons of which {rate:.1%} fire, in event-driven layers, "
        "against dense layers",
        "events",
        {"case": "shd", "rate": 0.005},
        EVENTS,
        DENSE,
        "on a GPU, dense layers are faster at every activity measured for small networks",
        "sparse-event-driven-training",
        on_gpu=False,
    ),
)


def claims(results: list[tuple[Path, dict[str, Any]]], root: Path) -> str:
    """A table with a line for each claim.

    Raises:
        StopIteration: a claim has no row or contender in the results.
    """
    lines = ["| faster | times | on | not faster |", "| --- | ---: | --- | --- |"]
    for claim in CLAIMS:
        names = (claim.benchmark, claim.on_gpu)
        result = next(r for _, r in results if (r["benchmark"], "gpu" in r["machine"]) == names)
        row = next(r for r in result["rows"] if claim.row.items() <= r.items())
        fast, slow = (
            next(c["wall_ms"]["median"] for c in row["contenders"] if c["name"] == name)
            for name in (claim.fast, claim.slow)
        )
        what = f"[{claim.what.format_map(row)}](docs/benchmarks.md#{claim.section})"
        lines.append(f"| {what} | {slow / fast:.2g}× | {record.device(result)} | {claim.limit} |")
    return "\n".join(lines)
