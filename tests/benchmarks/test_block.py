"""The block's script in small, what is found to be wrong, and its bars."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import spikefuse as sf
from benchmarks import block, layer, lif, record
from benchmarks.block import RIVAL, TWO, Row, Truth
from spikefuse.block.block import Block

CPU = torch.device("cpu")


def test_rows_are_verified_and_timed(tmp_path: Path) -> None:
    command = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--rows", "large"]
    result = record.read(block.main([*command, "--profile"]))
    assert result["left_out"] == []
    assert [(row["layout"], row["dtype"]) for row in result["rows"]] == [
        ("channels-last", "bfloat16"), ("channels-last", "float32"),
        ("contiguous", "bfloat16"), ("contiguous", "float32"),
    ]  # fmt: skip
    for row in result["rows"]:
        found = {c["name"]: c for c in row["contenders"]}
        assert found[layer.OURS]["status"] == found[TWO]["status"] == "ok", found
        assert found[RIVAL]["status"] in ("ok", "unavailable")
        per_value = row["num_bytes"] / torch.Size(row["shape"]).numel()
        assert per_value == {"float32": 32, "bfloat16": 16}[row["dtype"]]
        assert row["verified_channels"] == row["shape"][2]
        assert row["kernels"] == []  # they are a GPU's
    assert result["bars"] == []


Made = tuple[torch.nn.BatchNorm2d, layer.Inputs, Truth]


@pytest.fixture(scope="module")
def made() -> Made:
    inputs = layer.Inputs((6, 8, 4, 5, 5), torch.float32, CPU)
    norm = block.make_norm(4, CPU)
    return norm, inputs, Truth.of(norm, inputs, "float32")


def verify(made: Made, function: Callable[[Tensor], Tensor]) -> None:
    norm, inputs, truth = made
    inputs.prepare()
    contender = block.contender(layer.OURS, norm, inputs, function)
    assert contender.run is not None
    truth.verify(contender, contender.run())


def test_the_truth_spikes_and_has_loss(made: Made) -> None:
    _, (_, (grad,)), truth = made[0], made[1].sets[0], made[2]
    assert 0.1 < truth.true.outputs[0].mean() < 0.9
    assert truth.near_share < 0.1
    assert (grad == 0).float().mean() == pytest.approx(truth.near_share, abs=1e-3)
    verify(made, Block(made[0], lif.neuron()))


class Moved(torch.autograd.Function):
    """The identity, whose gradient is wrong by an offset, as without a part of the statistics'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda norm, x: Block(norm, sf.LIF(0.3, lif.THRESHOLD))(x), "spikes differ of neurons"),
        (lambda norm, x: Block(norm, sf.LIF(lif.DECAY, lif.THRESHOLD))(Moved.apply(x)),
         "gradient of x errs"),
        (lambda norm, x: Block(norm, sf.LIF(lif.DECAY, lif.THRESHOLD,
                                            surrogate=sf.surrogate.Arctan()))(x),
         "gradient of x errs"),
        (lambda norm, x: Block(norm, lif.neuron())(x) / torch.zeros(()), "output is not finite"),
    ],
)  # fmt: skip
def test_what_is_wrong(made: Made, change: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        verify(made, lambda x: change(made[0], x))


def test_gradients_of_the_norm_are_compared(made: Made) -> None:
    norm, inputs, truth = made
    contender = block.contender(layer.OURS, norm, inputs, Block(norm, lif.neuron()))
    inputs.prepare()
    assert contender.run is not None
    right = contender.run()
    right.params = (right.params[0], right.params[1] + 0.1)
    with pytest.raises(AssertionError, match="gradient of the bias errs"):
        truth.verify(contender, right)


def test_bars() -> None:
    def timed(name: str, ms: float, fraction: float) -> dict[str, Any]:
        times = {"device_ms": {"median": ms}, "fraction": {"device_ms": fraction}}
        return {"name": name, "status": "ok"} | times

    row = Row("large", block.SHAPES["large"], "bfloat16", "channels-last")
    assert row.title == "large [32, 100, 64, 56, 56], bfloat16, channels-last"
    found = {"contenders": [timed(layer.OURS, 1.0, 0.8), timed(RIVAL, 1.7, 0.5)]}
    made = block.bars(row, found)
    assert [(b["measured"], b["bar"], b["met"]) for b in made] == [
        (0.8, 0.75, True), (1.7, 1.8, False)
    ]  # fmt: skip
    assert [(b["measured"], b["met"]) for b in block.bars(row, None)] == [(None, False)] * 2
    assert block.bars(Row("late", (1,), "bfloat16", "channels-last"), found) == []
