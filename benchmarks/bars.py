"""The project's own bars for whole networks: what a step may take, and what it may keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import record, steps
from benchmarks.steps import CONVOLUTIONS, EAGER, EAGERLY, FUSED, GRAPH, RELU, WAYS
from benchmarks.workloads import RESNETS

# For the Spiking-ResNets: wall-clock time over that of SpikingJelly's best in the same way.
RIVAL = {
    ("training", EAGERLY): 0.7,
    ("training", GRAPH): 0.95,
    ("evaluation", EAGERLY): 0.6,
    ("evaluation", GRAPH): 0.6,
}


@dataclass(frozen=True)
class Goal:
    """At most `limit` milliseconds or MiB; on the same machine, in another run, the convolutions
    alone and the network with ReLUs took so much."""

    convolutions: float
    relu: float
    limit: float


# Training steps, by workload and dtype: eagerly, as a CUDA graph, and memory of the eager step.
# Machines differ, so besides the limits their ratios to the two others are judged in the same run.
GOALS = {
    ("resnet18-mnist-sgd", "bfloat16"): (
        Goal(3.9, 6.3, 6.0), Goal(3.3, 5.2, 4.3), Goal(353, 612, 450),
    ),
    ("resnet18-mnist-sgd", "float32"): (
        Goal(5.6, 7.8, 7.5), Goal(5.4, 7.5, 6.8), Goal(605, 1127, 850),
    ),
    ("large-cifar10", "bfloat16"): (
        Goal(4.9, 8.7, 6.8), Goal(4.8, 8.3, 6.6), Goal(679, 1314, 800),
    ),
    ("large-cifar10", "float32"): (
        Goal(11.0, 15.4, 14.3), Goal(11.3, 15.2, 14.2), Goal(1346, 2619, 1550),
    ),
    ("resnet18-gesture", "bfloat16"): (
        Goal(5.7, 9.3, 7.2), Goal(5.3, 8.6, 6.9), Goal(694, 1176, 850),
    ),
}  # fmt: skip

# Against the eager loop: the time of a step in the same way, and memory.
AGAINST_EAGER = ("alexnet-imagenet", "resnet34-imagenet")
EAGER_TIME, EAGER_MEMORY = 0.5, 0.25
# The checkpoint policy: memory against the eager loop, time against the default policy's.
CHECKPOINTED = ("large-cifar10", "resnet34-imagenet")
CHECKPOINT_TIME, CHECKPOINT_MEMORY = 1.5, 0.12


def needed(workload: str, kind: str) -> set[str]:
    """The contenders with which a row is judged, besides those that always take part."""
    if kind != "training":
        return set()
    found = {EAGER} if workload in (*AGAINST_EAGER, *CHECKPOINTED) else set()
    if workload in CHECKPOINTED and steps.CHECKPOINT in steps.POLICIES:
        found.add(steps.CHECKPOINT)
    return found


def of(
    title: str, workload: str, dtype: str, kind: str, found: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """The bars for a row; what could not be measured is None, and missed."""
    made = []

    def judge(what: str, measured: float | None, limit: float) -> None:
        made.append(record.bar(f"{title}, {what}", measured, limit, at_least=False))

    for way in WAYS if workload in RESNETS else ():
        share = ratio(time(found, way, FUSED), time(found, way, *steps.RIVALS))
        judge(f"{way}: over SpikingJelly's best", share, RIVAL[kind, way])
    if kind != "training":
        return made
    columns = [
        (EAGERLY, "ms", time, EAGERLY),
        (GRAPH, "ms", time, GRAPH),
        ("memory", "MiB", memory, EAGERLY),
    ]
    for (what, unit, value, way), goal in zip(
        columns, GOALS.get((workload, dtype), ()), strict=False
    ):
        ours = value(found, way, FUSED)
        judge(f"{what}: {unit}", ours, goal.limit)
        for name, taken in ((RELU, goal.relu), (CONVOLUTIONS, goal.convolutions)):
            limit = round(goal.limit / taken, 3)
            judge(f"{what}: over {name}", ratio(ours, value(found, way, name)), limit)
    shares = []
    if workload in AGAINST_EAGER or (workload, dtype) == ("large-cifar10", "float32"):
        shares.append((FUSED, EAGER_MEMORY))
    if workload in CHECKPOINTED:
        shares.append((steps.CHECKPOINT, CHECKPOINT_MEMORY))
        for way in WAYS:
            longer = ratio(time(found, way, steps.CHECKPOINT), time(found, way, FUSED))
            judge(f"{way}: checkpoint over the default policy", longer, CHECKPOINT_TIME)
    for name, limit in shares:
        share = ratio(memory(found, EAGERLY, name), memory(found, EAGERLY, EAGER))
        judge(f"memory: {name} over the eager loop", share, limit)
    for way in WAYS if workload in AGAINST_EAGER else ():
        share = ratio(time(found, way, FUSED), time(found, way, EAGER))
        judge(f"{way}: over the eager loop", share, EAGER_TIME)
    return made


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def time(found: dict[str, Any] | None, way: str, *names: str) -> float | None:
    """Wall-clock milliseconds of the fastest of some networks; None where none was measured."""
    return min((c["wall_ms"]["median"] for c in _right(found, way, names)), default=None)


def memory(found: dict[str, Any] | None, way: str, *names: str) -> float | None:
    """MiB at the peak, of the one of some networks that needs least."""
    peaks = (c["peak_bytes"] / 2**20 for c in _right(found, way, names) if "peak_bytes" in c)
    return min(peaks, default=None)


def _right(found: dict[str, Any] | None, way: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    contenders = (found or {}).get("contenders", [])
    return [
        c for c in contenders
        if c["status"] == "ok" and c["network"] in names and c["way"] == way
    ]  # fmt: skip
