"""The script for accuracy on spoken digits: its networks, rows and table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import spikefuse as sf
from benchmarks import record, spoken_digits, tables
from benchmarks.spoken_digits import (
    FEED_FORWARD,
    NAMES,
    OURS,
    SNNTORCH,
    SNNTORCH_GRAPH,
    make_network,
)
from spikefuse.train.seeding import Purpose, reseed


def test_rows_of_every_network(tmp_path: Path) -> None:
    options = ["--quick", "--device", "cpu", "--seeds", "0", "3", "--out", str(tmp_path)]
    result = record.read(spoken_digits.main(options))
    missing = {entry["row"] for entry in result["left_out"]}
    assert {SNNTORCH_GRAPH} <= missing <= {SNNTORCH, SNNTORCH_GRAPH}
    trained = [name for name in NAMES if name not in missing]
    rows = [(row["seed"], row["name"], row["epoch"]) for row in result["rows"]]
    assert rows == [(seed, name, epoch) for seed in (0, 3) for name in trained for epoch in (1, 2)]
    for row in result["rows"]:
        assert 0 <= row["accuracy"] <= 1
        assert row["examples_per_s"] > 0
        assert not row["graph"]
    losses = [row["loss"] for row in result["rows"]]
    assert len(set(losses)) > len(losses) / 2  # seeds and networks differ


def test_networks_differ_in_feedback_alone() -> None:
    nets = {}
    for name in (OURS, FEED_FORWARD):
        reseed(0, Purpose.WEIGHTS)
        nets[name] = make_network(name, [8, 8], 5)
    layers = {
        name: [type(m) for m in net.modules() if isinstance(m, sf.Neuron | sf.Recurrent)]
        for name, net in nets.items()
    }
    assert layers == {
        OURS: [*[sf.Recurrent, sf.DelayedResetLIF] * 2, sf.LI],
        FEED_FORWARD: [*[sf.DelayedResetLIF] * 2, sf.LI],
    }
    first, second = (nets[name].net.state_dict() for name in (OURS, FEED_FORWARD))
    assert torch.equal(first["2.weight"], second["2.weight"])  # of the first linear layer


def test_the_table_has_the_last_epoch_and_the_speed_without_compilation() -> None:
    rows = [
        {"name": OURS, "seed": seed, "epoch": epoch, "accuracy": accuracy, "seconds": seconds,
         "examples_per_s": round(100 / seconds)}
        for seed, epoch, accuracy, seconds in (
            (0, 1, 0.3, 9.0), (0, 2, 0.5, 2.0), (1, 1, 0.2, 8.0), (1, 2, 0.6, 1.0), (1, 3, 0.7, 4.0)
        )
    ]  # fmt: skip
    settings = {"data": "x", "hidden": [8, 9], "epochs": 3, "batch": 4, "dtype": "float32"}
    text = "\n".join(tables.spoken_digits({"rows": rows, "settings": settings}))
    assert "hidden layers of 8 and 9, 3 epochs, batches of 4" in text
    assert "| spikefuse | 50.0%, 70.0% | 2.00 | 50 |" in text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="shd_test_10ms"):
        spoken_digits.main(["--device", "cpu", "--data-dir", str(tmp_path), "--out", str(tmp_path)])
