"""The networks' script in small, what is found to be wrong, and its bars."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import spikefuse as sf
from benchmarks import lif, networks, record, steps
from benchmarks.agreement import Agreement, Reference, apart
from benchmarks.networks import Row
from benchmarks.steps import EAGERLY, GRAPH, Network, Result
from benchmarks.workloads import RESNETS, WORKLOADS, Task, Workload

CPU = torch.device("cpu")
CONV = Workload("conv", (1, 28, 28))


@pytest.fixture(autouse=True)
def conv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "conv", CONV)


def run(tmp_path: Path, *more: str) -> dict[str, Any]:
    command = ["--device", "cpu", "--quick", "--workloads", "conv", "--out", str(tmp_path), *more]
    return record.read(networks.main(command))


def test_rows_are_verified_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, "--also", steps.EAGER)
    assert result["left_out"] == []
    assert [(row["dtype"], row["steps"]) for row in result["rows"]] == [
        ("float32", "training"), ("float32", "evaluation"),
        ("bfloat16", "training"), ("bfloat16", "evaluation"),
    ]  # fmt: skip
    always = (steps.OURS, steps.RELU, steps.CONVOLUTIONS, steps.EAGER)
    for row in result["rows"]:
        assert row["spikes"] == 2 * 2 * (32 * 32 * 32 + 64 * 16 * 16)
        agreement = row["agreement"][steps.OURS]
        assert (agreement["flips"], agreement["flips_allowed"]) == (0, 0)
        found = {(c["network"], c["way"]): c for c in row["contenders"]}
        for name in always:
            assert found[name, EAGERLY]["status"] == "ok", found[name, EAGERLY]
            assert found[name, EAGERLY]["wall_ms"]["median"] > 0
            assert found[name, GRAPH]["reason"] == "CUDA graphs need a CUDA GPU"
        for name in lif.RIVALS:  # where they are installed they are right
            assert found[name, EAGERLY]["status"] in ("ok", "unavailable")
    assert result["bars"] == []  # they are meant for a GPU
    said = capsys.readouterr().out
    assert "conv, bfloat16, evaluation: 196,608 neuron-steps compared" in said


def other(task: Task, exact: bool = True, **changes: Any) -> Network:
    """Our network with other neurons."""
    net = task.network(replace(task.workload, **changes).neuron)
    return Network(net, sf.Temporal(net), sf.LIF, exact)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 0.31}, "spikes differ for the same inputs, allowed are 0"),
        ({"threshold": 0.3 * (1 + 2**-8), "exact": False}, "the same inputs, allowed are 16"),
        ({"decay": 0.3}, "spikes differ for the same inputs, allowed are 0"),
        ({"surrogate": "rectangle"}, "gradients differ by"),
    ],
)
def test_other_neurons_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(steps.NETWORKS, steps.RELU, functools.partial(other, **changes))
    (row,) = run(tmp_path, "--dtype", "float32", "--steps", "training")["rows"]
    found = {(c["network"], c["way"]): c for c in row["contenders"]}
    assert found[steps.OURS, EAGERLY]["status"] == "ok"
    assert found[steps.RELU, EAGERLY]["status"] == "wrong"
    assert message in found[steps.RELU, EAGERLY]["reason"]


def test_a_step_repeats_the_first() -> None:
    task = Task(CONV.small(), "float32", CPU)
    agreement = Agreement(task, "training", steps.ours, Reference.of(task, "training"))
    network = steps.ours(task)
    step = steps.training(task, network)
    right = step()
    agreement.verify(right, task.labels)
    step()
    with pytest.raises(AssertionError, match="the results are not finite"):
        agreement.verify(replace(right, logits=right.logits / 0), task.labels)
    with pytest.raises(AssertionError, match="of their size from its first"):
        agreement.verify(replace(right, grads=tuple(2 * g for g in right.grads)), task.labels)
    assert right.loss is not None
    with pytest.raises(AssertionError, match="the loss is another's"):
        agreement.verify(replace(right, loss=right.loss + 1), task.labels)


def test_a_step_changes_the_weights_and_restoring_undoes_it() -> None:
    task = Task(CONV.small(), "float32", CPU)
    network = steps.ours(task)
    step = steps.training(task, network)
    first = step()
    stepped, initial = (
        [p.detach() for p in net.parameters()] for net in (network.net, steps.ours(task).net)
    )
    assert 0 < apart(stepped, initial) < 1e-3
    assert all(p.grad is None for p in network.net.parameters())
    task.restore(network.net)
    assert torch.equal(step().logits, first.logits)


def test_a_network_without_norms_has_convolutions_alone() -> None:
    task = Task(CONV.small(), "float32", CPU)
    network = steps.convolutions(task)
    kinds = {type(m).__name__ for m in network.net.modules()}
    assert kinds == {"Sequential", "Conv2d", "Identity", "AvgPool2d", "Flatten", "Linear"}
    assert steps.evaluation(task, network)().logits.shape == (2, 10)


@pytest.mark.parametrize("shape", [(6, 4, 3, 5), (6, 4)])
def test_spikingjelly_reads_the_memory_as_it_lies(shape: tuple[int, ...]) -> None:
    def function(x: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        assert x.shape == (2, x[0].numel())
        assert rest.shape == x.shape[1:]
        return x

    module = steps.JellyFunction(2, function)
    x = torch.rand(shape)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    y = module(x)
    assert torch.equal(y, x)
    assert (y.data_ptr(), y.stride()) == (x.data_ptr(), x.stride())


def test_what_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(task: Task) -> Network:
        raise RuntimeError("no such network\nand more")

    monkeypatch.setitem(steps.NETWORKS, steps.RELU, broken)
    monkeypatch.setitem(WORKLOADS, "none", Workload("none", (1, 28, 28)))
    one = ["--dtype", "float32", "--steps", "evaluation"]
    result = run(tmp_path, *one, "--workloads", "none", "conv", "--name", "networks_trial")
    assert result["benchmark"] == "networks_trial"
    (row,) = result["rows"]
    found = {(c["network"], c["way"]): c for c in row["contenders"]}
    for way in steps.WAYS:
        assert found[steps.RELU, way]["reason"] == "RuntimeError: no such network"
    assert found[steps.OURS, EAGERLY]["status"] == "ok"
    (left_out,) = result["left_out"]
    assert left_out["reason"] == "left out, KeyError: 'none'"
    late = run(tmp_path, *one, "--within", "0")
    assert [one["reason"] for one in late["left_out"]] == ["left out, the time is up"]


def contender(network: str, way: str, ms: float, status: str = "ok") -> dict[str, Any]:
    return {"network": network, "way": way, "status": status, "wall_ms": {"median": ms}}


def test_bars_compare_with_the_best_rival_in_the_same_way() -> None:
    found = {
        "contenders": [
            contender(steps.OURS, EAGERLY, 6.0),
            contender(steps.OURS, GRAPH, 5.7),
            contender(lif.RIVAL_FUNCTION, EAGERLY, 10.0),
            contender(lif.RIVAL_NODE, EAGERLY, 12.0),
            contender(lif.RIVAL_FUNCTION, GRAPH, 1.0, "wrong"),
            contender(lif.RIVAL_NODE, GRAPH, 5.0),
            contender(steps.RELU, EAGERLY, 1.0),
        ]
    }
    for kind, limits in (("training", (0.7, 0.95)), ("evaluation", (0.6, 0.6))):
        row = Row("resnet18-mnist", "float32", kind)
        eagerly, graph = networks.bars(row, found)
        assert (eagerly["measured"], eagerly["bar"], eagerly["met"]) == (0.6, limits[0], True)
        assert (graph["measured"], graph["bar"], graph["met"]) == (1.14, limits[1], False)
        assert (
            eagerly["what"] == f"resnet18-mnist, float32, {kind}, eager: over SpikingJelly's best"
        )
        missing = networks.bars(row, None)
        assert [(b["measured"], b["met"]) for b in missing] == [(None, False)] * 2
    assert networks.bars(Row("large-cifar10", "float32", "training"), found) == []


def test_all_workloads_can_be_made() -> None:
    assert networks.arguments(["--device", "cuda"]).workloads == list(RESNETS)
    for name, workload in WORKLOADS.items():
        with torch.device("meta"):
            net = workload.network(workload.neuron)
        assert any(isinstance(m, sf.LIF) for m in net.modules()), name
        assert next(net.parameters()).shape[1] == workload.shape[0], name
        assert list(net.parameters())[-1].shape == (workload.num_classes,), name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--quick", "--rounds", "-1"], "--rounds must be at least 1"),
        (["--device", "cpu"], "sized for a GPU: add --quick"),
        (["--workloads", "speed"], "invalid choice: 'speed'"),
    ],
)
def test_arguments_are_checked(
    wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        networks.arguments(wrong)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_apart() -> None:
    ones = [torch.ones(3), torch.ones(1)]
    assert apart(ones, ones) == 0
    assert apart([torch.ones(3), torch.zeros(1)], ones) == pytest.approx(0.5)
    assert Result(ones[0]).grads == ()
