"""The bars of whole networks."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import bars, lif, steps
from benchmarks.steps import CONVOLUTIONS, EAGER, EAGERLY, FUSED, GRAPH, RELU
from benchmarks.workloads import WORKLOADS

MIB = 1 << 20


def contender(
    network: str, way: str, ms: float, mib: float = 1, status: str = "ok"
) -> dict[str, Any]:
    times = {"wall_ms": {"median": ms}, "peak_bytes": mib * MIB}
    return {"network": network, "way": way, "status": status} | times


def judged(
    workload: str, dtype: str, kind: str, contenders: list[dict[str, Any]] | None
) -> dict[str, tuple[Any, ...]]:
    found = None if contenders is None else {"contenders": contenders}
    made = bars.of("row", workload, dtype, kind, found)
    assert all(bar["what"].startswith("row, ") for bar in made)
    return {b["what"].removeprefix("row, "): (b["measured"], b["bar"], b["met"]) for b in made}


@pytest.mark.parametrize(
    ("kind", "limits"), [("training", (0.7, 0.95)), ("evaluation", (0.6, 0.6))]
)
def test_the_best_rival_in_the_same_way(kind: str, limits: tuple[float, float]) -> None:
    contenders = [
        contender(FUSED, EAGERLY, 6.0),
        contender(FUSED, GRAPH, 5.7),
        contender(lif.RIVAL_FUNCTION, EAGERLY, 10.0),
        contender(lif.RIVAL_NODE, EAGERLY, 12.0),
        contender(lif.RIVAL_FUNCTION, GRAPH, 1.0, status="wrong"),
        contender(lif.RIVAL_NODE, GRAPH, 5.0),
        contender(RELU, EAGERLY, 1.0),
    ]
    assert judged("resnet18-mnist", "float32", kind, contenders) == {
        "eager: over SpikingJelly's best": (0.6, limits[0], True),
        "CUDA graph: over SpikingJelly's best": (1.14, limits[1], False),
    }
    missing = judged("resnet18-mnist", "float32", kind, None)
    assert [(measured, met) for measured, _, met in missing.values()] == [(None, False)] * 2


def test_time_and_memory_of_the_goals() -> None:
    contenders = [
        contender(name, way, ms, mib)
        for name, ms, mib in ((FUSED, 6.0, 460), (RELU, 8.0, 500), (CONVOLUTIONS, 4.0, 400))
        for way in steps.WAYS
    ]
    assert judged("resnet18-mnist-sgd", "bfloat16", "training", contenders) == {
        "eager: ms": (6.0, 6.0, True),
        f"eager: over {RELU}": (0.75, 0.952, True),
        f"eager: over {CONVOLUTIONS}": (1.5, 1.538, True),
        "CUDA graph: ms": (6.0, 4.3, False),
        f"CUDA graph: over {RELU}": (0.75, 0.827, True),
        f"CUDA graph: over {CONVOLUTIONS}": (1.5, 1.303, False),
        "memory: MiB": (460, 450, False),
        f"memory: over {RELU}": (0.92, 0.735, False),
        f"memory: over {CONVOLUTIONS}": (1.15, 1.275, True),
    }
    assert judged("resnet18-mnist-sgd", "bfloat16", "evaluation", contenders) == {}


def test_against_the_eager_loop() -> None:
    contenders = [
        contender(name, way, ms, mib)
        for name, ms, mib in ((FUSED, 6.0, 30), (steps.CHECKPOINT, 12.0, 10), (EAGER, 10.0, 100))
        for way in steps.WAYS
    ]
    found = judged("resnet34-imagenet", "bfloat16", "training", contenders)
    assert found == {
        "eager: checkpoint over the default policy": (2.0, 1.5, False),
        "CUDA graph: checkpoint over the default policy": (2.0, 1.5, False),
        "memory: spikefuse, fused over the eager loop": (0.3, 0.25, False),
        "memory: spikefuse, fused, checkpoint over the eager loop": (0.1, 0.12, True),
        "eager: over the eager loop": (0.6, 0.5, False),
        "CUDA graph: over the eager loop": (0.6, 0.5, False),
    }
    assert len(judged("alexnet-imagenet", "bfloat16", "training", contenders)) == 3
    share = "memory: spikefuse, fused over the eager loop"
    large = [judged("large-cifar10", d, "training", contenders) for d in ("bfloat16", "float32")]
    assert [share in one for one in large] == [False, True]


def test_bars_are_for_workloads_that_exist() -> None:
    assert {workload for workload, _ in bars.GOALS} <= WORKLOADS.keys()
    assert {*bars.AGAINST_EAGER, *bars.CHECKPOINTED} <= WORKLOADS.keys()
    assert all(len(goals) == 3 for goals in bars.GOALS.values())
