"""Accuracy over time, of images and spoken digits: data, networks, and runs that continue."""

from __future__ import annotations

import io
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import spikefuse as sf
from benchmarks import accuracy, record, spoken_digits
from benchmarks.spoken_digits import DELAYS, FEED_FORWARD, OURS
from spikefuse.train.seeding import Purpose, reseed


def test_jpeg_images_are_decoded_in_order(tmp_path: Path) -> None:
    files, expected = [], []
    for image in np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "jpeg")
        files.append(file.getvalue())
        expected.append(np.asarray(Image.open(file)))
    content = np.frombuffer(b"".join(files), np.uint8)
    offsets, labels = np.cumsum([0, *map(len, files)]), np.array([3, 1, 2], np.uint8)
    np.savez(tmp_path / "a.npz", jpeg=content, offsets=offsets, labels=labels)
    images = accuracy.decode(tmp_path / "a.npz")
    assert images.labels.tolist() == [3, 1, 2]
    np.testing.assert_array_equal(images.pixels.numpy(), np.stack(expected).transpose(0, 3, 1, 2))


def test_a_run_continues_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(name: str, args: Namespace) -> tuple[nn.Module, accuracy.Call]:
        net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
        return net, lambda images, steps: net(images).unsqueeze(0)

    monkeypatch.setattr(accuracy, "make_network", small)
    options = ["--quick", "--device", "cpu", "--names", "relu", "--out", str(tmp_path)]
    whole = record.read(accuracy.main(options))["rows"]
    assert [row["epoch"] for row in whole] == [1, 2]
    options += ["--checkpoints", str(tmp_path / "checkpoints")]
    train = accuracy.Run.train

    def interrupted(self: accuracy.Run) -> record.Any:
        if len(self.rows) == 1:
            raise KeyboardInterrupt
        return train(self)

    with monkeypatch.context() as patch:
        patch.setattr(accuracy.Run, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            accuracy.main(options)
    (first,) = record.read(accuracy.main([*options, "--seconds", "1e-6"]))["rows"]
    result = record.read(accuracy.main(options))
    again, (profile,) = result["rows"], result["settings"]["profile"].values()
    assert again[0] == first
    assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in whole], rel=1e-4)
    with monkeypatch.context() as patch:
        patch.delattr(accuracy.ImageRun, "measure")  # a complete run is not measured again
        complete = record.read(accuracy.main(options))
    assert complete["rows"] == again
    assert list(complete["settings"]["profile"].values()) == [profile]
    with pytest.raises(SystemExit, match=r"relu-0\.pt has other settings"):
        accuracy.main([*options, "--lr", "0.1"])
    with pytest.raises(SystemExit):
        accuracy.main(["--seconds", "9"])  # without --checkpoints


def test_first_epochs_of_one_time_step(tmp_path: Path) -> None:
    options = ["--quick", "--device", "cpu", "--names", "spikefuse", "--early", "1"]
    path = accuracy.main([*options, "--cutmix", "1", "--out", str(tmp_path), "--name", "early"])
    assert path.name.startswith("early-")
    result = record.read(path)
    assert [row["T"] for row in result["rows"]] == [1, 2]
    (profile,) = result["settings"]["profile"].values()
    assert list(profile["ms"]) == [*accuracy.PARTS, "evaluation"]
    assert profile["augmented_images_per_s"] > 0


def test_networks_for_spoken_digits_differ_in_feedback_alone() -> None:
    nets = {}
    for name in (OURS, FEED_FORWARD):
        reseed(0, Purpose.WEIGHTS)
        nets[name] = spoken_digits.make_network(name, [8, 8], 5)
    kinds = [type(m) for m in nets[OURS].modules() if isinstance(m, sf.Neuron | sf.Recurrent)]
    others = [type(m) for m in nets[FEED_FORWARD].modules() if isinstance(m, sf.Neuron)]
    assert kinds == [*[sf.Recurrent, sf.DelayedResetLIF] * 2, sf.LI]
    assert others == [*[sf.DelayedResetLIF] * 2, sf.LI]
    first, second = (nets[name].net.state_dict() for name in (OURS, FEED_FORWARD))
    assert torch.equal(first["2.weight"], second["2.weight"])  # of the first linear layer


def test_rates_of_hidden_neurons(tmp_path: Path) -> None:
    names = [OURS, spoken_digits.C_SILIF, spoken_digits.ADLIF]
    options = ["--quick", "--device", "cpu", "--names", *names, "--epochs", "1"]
    result = record.read(spoken_digits.main([*options, "--out", str(tmp_path)]))
    assert {row["name"] for row in result["rows"] if 0 < row["spikes"] < 1} >= {OURS}
    sizes = {row["name"]: row["parameters"] for row in result["rows"]}
    oscillators, adaptive = sizes[spoken_digits.C_SILIF], sizes[spoken_digits.ADLIF]
    assert oscillators == adaptive  # four values a neuron
    assert sizes[OURS] == adaptive + sum(n * n - 4 * n for n in result["settings"]["hidden"])


def test_networks_with_and_without_delays_are_of_the_same_size() -> None:
    names = FEED_FORWARD, DELAYS
    nets = [spoken_digits.make_network(name, [24, 24], 5) for name in names]
    plain, delayed = map(spoken_digits.size_of, nets)
    assert 0.9 * plain < delayed <= plain
    layers = [m for m in nets[1].modules() if isinstance(m, sf.DelayedLinear)]
    assert [m.in_features for m in layers] == [140, layers[0].out_features, layers[1].out_features]
