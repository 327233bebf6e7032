"""The networks' script in small, what is found to be wrong, and its bars."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spikefuse as sf
from benchmarks import lif, networks, record, steps
from benchmarks.agreement import Agreement, Reference, apart
from benchmarks.networks import Row
from benchmarks.runner import CpuClock, Settings
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
    result = run(tmp_path, "--also", steps.EAGER, "--dtype", "bfloat16")
    assert result["left_out"] == []
    assert [(row["dtype"], row["steps"]) for row in result["rows"]] == [
        ("bfloat16", "training"), ("bfloat16", "evaluation"),
    ]  # fmt: skip
    always = (steps.FUSED, steps.OURS, steps.RELU, steps.CONVOLUTIONS, steps.EAGER)
    for row in result["rows"]:
        assert row["spikes"] == 2 * 2 * (32 * 32 * 32 + 64 * 16 * 16)
        agreement = row["agreement"][steps.OURS]
        assert (agreement["flips"], agreement["flips_allowed"]) == (0, 0)
        fused = row["agreement"][steps.FUSED]
        assert fused["flips"] <= fused["flips_allowed"]
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


References = tuple[Task, Reference, Reference]


@pytest.fixture(scope="module")
def references() -> References:
    """Of the network, and of the fused one."""
    task = Task(CONV.small(), "float32", CPU)
    first = Reference.of(task, "training")
    return task, first, Reference.of(task, "training", fused=True, other=first)


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
    references: References, changes: dict[str, Any], message: str
) -> None:
    task, right, _ = references
    agreement = Agreement(task, "training", functools.partial(other, **changes), right)
    with pytest.raises(AssertionError, match=message):
        agreement.verify(agreement.expected, task.labels)


def judged(references: References, network: Network) -> Agreement:
    """What a step of a fused network has to be, verified."""
    task, _, right = references
    agreement = Agreement(task, "training", lambda task: network, right)
    agreement.verify(agreement.expected, task.labels)
    return agreement


def test_a_fused_network_is_held_to_its_own_arithmetic(references: References) -> None:
    task, _, right = references
    network = steps.spiking(task, fused=True)
    assert network.note == "2 of 2 batch norms fused with the neuron after them"
    about = judged(references, network).about()
    assert about["flips"] <= about["flips_allowed"]
    assert about["errors"]["gradients"] < 1e-4
    assert right.flip_rate < 1e-5


def eps(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 0.1


def gradient_alone(net: nn.Module) -> None:
    """Without what flows through the statistics."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            setattr(module, "train", lambda mode=True, module=module: module)  # noqa: B010


@pytest.mark.parametrize(
    ("change", "message"),
    [(eps, "spikes differ for the same inputs"), (gradient_alone, "gradients differ by")],
)
def test_a_fused_network_with_other_norms_is_wrong(
    references: References, change: Any, message: str
) -> None:
    network = steps.spiking(references[0], fused=True)
    change(network.net)
    with pytest.raises(AssertionError, match=message):
        judged(references, network)


def test_fusing_may_turn_few_spikes(references: References) -> None:
    task = references[0]
    agreement = judged(references, steps.spiking(task, fused=True))
    agreement.flip_rate = 1e-3
    with pytest.raises(AssertionError, match=r"fusing turns 0\.001 of the spikes"):
        agreement.verify(agreement.expected, task.labels)


def test_contenders_of_a_row() -> None:
    plan = networks.Plan(CPU, CpuClock(), Settings(), frozenset(), frozenset(), quick=True)
    usual = plan.names(Row("resnet18-mnist", "float32", "training"))
    assert usual[:2] == [steps.FUSED, steps.OURS]
    assert steps.EAGER not in usual
    assert steps.EAGER in plan.names(Row("alexnet-imagenet", "float32", "training"))
    assert plan.names(Row("alexnet-imagenet", "float32", "evaluation")) == usual


def test_policies_are_contenders_by_name() -> None:
    assert steps.POLICIES[f"{steps.FUSED}, bits"] == sf.memory.Bits()
    assert sf.memory.Recompute() not in steps.POLICIES.values()  # that is without a name
    for name, policy in steps.POLICIES.items():
        network = steps.NETWORKS[name](Task(CONV.small(), "float32", CPU))
        container = network.call.func  # type: ignore[attr-defined]
        assert (container.memory, container.net) == (policy, network.net)


def test_a_step_repeats_the_first(references: References) -> None:
    task, reference, _ = references
    agreement = Agreement(task, "training", steps.spiking, reference)
    network = steps.spiking(task)
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
    network = steps.spiking(task)
    step = steps.training(task, network)
    first = step()
    stepped, initial = (
        [p.detach() for p in net.parameters()] for net in (network.net, steps.spiking(task).net)
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
    monkeypatch.setitem(steps.NETWORKS, steps.CONVOLUTIONS, functools.partial(other, decay=0.3))
    monkeypatch.setitem(WORKLOADS, "none", Workload("none", (1, 28, 28)))
    one = ["--dtype", "float32", "--steps", "evaluation"]
    result = run(tmp_path, *one, "--workloads", "none", "conv", "--name", "networks_trial")
    assert result["benchmark"] == "networks_trial"
    (row,) = result["rows"]
    found = {(c["network"], c["way"]): c for c in row["contenders"]}
    for way in steps.WAYS:
        assert found[steps.RELU, way]["reason"] == "RuntimeError: no such network"
    assert found[steps.CONVOLUTIONS, EAGERLY]["status"] == "wrong"
    assert "spikes differ" in found[steps.CONVOLUTIONS, EAGERLY]["reason"]
    assert found[steps.OURS, EAGERLY]["status"] == "ok"
    (left_out,) = result["left_out"]
    assert left_out["reason"] == "left out, KeyError: 'none'"
    late = run(tmp_path, *one, "--within", "0")
    assert [one["reason"] for one in late["left_out"]] == ["left out, the time is up"]


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
