"""The script for accuracy over time: its data, and runs that continue from checkpoints."""

from __future__ import annotations

import io
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks import accuracy, record


def test_jpeg_images_are_decoded_in_order(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    files, expected = [], []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "jpeg")
        files.append(file.getvalue())
        expected.append(np.asarray(Image.open(file)))
    offsets = np.cumsum([0, *map(len, files)])
    content = np.frombuffer(b"".join(files), np.uint8)
    labels = np.array([3, 1, 2], np.uint8)
    np.savez(tmp_path / "a.npz", jpeg=content, offsets=offsets, labels=labels)
    images = accuracy.decode(tmp_path / "a.npz")
    assert images.labels.dtype == torch.int64
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
        patch.delattr(accuracy.Run, "measure")  # a complete run is not measured again
        complete = record.read(accuracy.main(options))
    assert complete["rows"] == again
    assert list(complete["settings"]["profile"].values()) == [profile]
    with pytest.raises(SystemExit, match=r"relu-0\.pt has other settings"):
        accuracy.main([*options, "--lr", "0.1"])


def test_a_network_that_cannot_be_made_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str, args: Namespace) -> None:
        raise AttributeError("of a dependency")

    monkeypatch.setattr(accuracy, "make_network", broken)
    options = ["--quick", "--device", "cpu", "--names", "spikingjelly", "--out", str(tmp_path)]
    result = record.read(accuracy.main(options))
    assert result["rows"] == []
    reason = "AttributeError: of a dependency"
    assert result["left_out"] == [{"row": "spikingjelly", "reason": reason}]


def test_first_epochs_of_one_time_step(tmp_path: Path) -> None:
    options = ["--quick", "--device", "cpu", "--names", "spikefuse", "--early", "1"]
    path = accuracy.main([*options, "--out", str(tmp_path), "--name", "early"])
    assert path.name.startswith("early-")
    result = record.read(path)
    assert [row["T"] for row in result["rows"]] == [1, 2]
    (profile,) = result["settings"]["profile"].values()
    assert list(profile["ms"]) == [*accuracy.PARTS, "evaluation"]
    assert profile["augmented_images_per_s"] > 0


def test_a_limit_of_time_needs_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        accuracy.main(["--seconds", "9"])
    assert "--seconds needs --checkpoints" in capsys.readouterr().err
