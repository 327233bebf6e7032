"""Google Speech Commands from synthetic files in its published format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import spikefuse as sf
from spikefuse import data
from spikefuse.data.sound import Sound
from spikefuse.data.speech_commands import CLASSES, LISTS
from tests.data.writing import wav_bytes

# Recordings of each word: the first validates, the second is for the test.
COUNT = 4


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKEFUSE_CACHE_DIR", str(tmp_path / "cache"))


def samples(label: int, take: int) -> np.ndarray:
    """A tone whose pitch is the word, 0.2 seconds long and more."""
    n = np.arange(3200 + 500 * take)
    noise = np.random.default_rng(COUNT * label + take).normal(0, 20, len(n))
    return (8000 * np.sin(2 * np.pi * 150 * 1.1**label * n / 16_000) + noise).astype(np.int16)


def name(label: int, take: int) -> str:
    return f"{CLASSES[label]}/{0xABC0 + take:08x}_nohash_{take % 2}.wav"


def write(folder: Path) -> None:
    """Write <word>/<speaker>_nohash_<n>.wav, both lists, and a folder that is no word."""
    for label, word in enumerate(CLASSES):
        (folder / word).mkdir(parents=True)
        for take in range(COUNT):
            (folder / name(label, take)).write_bytes(wav_bytes(samples(label, take)))
    for take, file in enumerate(LISTS):
        (folder / file).write_text("".join(f"{name(i, take)}\n" for i in range(len(CLASSES))))
    (folder / "_background_noise_").mkdir()
    (folder / "_background_noise_" / "white_noise.wav").write_bytes(bytes(100))


@pytest.mark.parametrize("place", ["speech_commands", "speech_commands_v0.02"])
def test_reads_the_published_layout(tmp_path: Path, place: str) -> None:
    write(tmp_path / place)
    parts = data.load("speech_commands", tmp_path)
    takes = [[2, 3], [0], [1]]  # for training, validation and the test
    for part, own in zip(parts, takes, strict=True):
        assert part.labels.tolist() == [label for label in range(35) for _ in own]
        assert part.pixels.shape == (35 * len(own), 100, 40)
        expected = [Sound(samples(34, take)).levels(100, 10_000, 8) for take in own]
        np.testing.assert_array_equal(part.pixels[-len(own) :].numpy(), np.stack(expected))
    short, *_ = data.load("speech_commands", tmp_path, num_steps=10, dt=20_000)
    torch.testing.assert_close(short.pixels, parts[0].pixels[:, :20:2])


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"speech_commands: validation_list\.txt is .*tensorf"):
        data.load("speech_commands", tmp_path)
    write(tmp_path)
    path = tmp_path / name(7, 2)
    good = path.read_bytes()
    path.write_bytes(good[:-9])
    with pytest.raises(data.DataError, match=rf"{path.name} is damaged \(it ends after 4195 of 42"):
        data.load("speech_commands", tmp_path)
    path.write_bytes(wav_bytes(samples(7, 2), rate=8000))
    with pytest.raises(data.DataError, match=rf"{path.name} has 1 channels of 16 bits at 8000 Hz"):
        data.load("speech_commands", tmp_path)
    path.write_bytes(good)
    with pytest.raises(data.DataError, match="by is 'number', but sounds have no events"):
        data.load("speech_commands", tmp_path, by="number")
    assert not list((tmp_path / "cache" / "frames").glob("*valid*"))
    for take in range(COUNT):
        (tmp_path / name(7, take)).unlink()
    with pytest.raises(data.DataError, match=r"no \.wav file in .*five: get the dataset from"):
        data.load("speech_commands", tmp_path)


@pytest.mark.parametrize(
    ("lists", "what"),
    [
        (["bed/x.wav\n", ""], r"validation_list\.txt is damaged \(line 1: expected word/file"),
        (["../a.wav\n", ""], r"validation_list\.txt is damaged \(line 1: expected word/file"),
        ([f"{name(1, 0)}\n\n", ""], r"validation_list\.txt is damaged \(line 2: expected word"),
        ([f"{name(1, 0)}\n", f"{name(1, 0)}\n"], r"testing_list\.txt is damaged .*listed twice"),
        (["", name(1, 0)], r"validation_list\.txt is damaged \(it lists no recording"),
        ([name(1, 0), "\0\xff"], r"testing_list\.txt is damaged \(line 1: expected word/file"),
        (
            ["\n".join(name(i, t) for i in range(35) for t in range(3)),
             "\n".join(name(i, 3) for i in range(35))],
            "list all recordings",
        ),
    ],
)  # fmt: skip
def test_damaged_lists_are_named(tmp_path: Path, lists: list[str], what: str) -> None:
    write(tmp_path)
    for file, content in zip(LISTS, lists, strict=True):
        (tmp_path / file).write_text(content)
    with pytest.raises(data.DataError, match=what):
        data.load("speech_commands", tmp_path)


def test_training_and_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from spikefuse.train.cli import main

    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data")
    options = "-T 10 --slice-us 20000 --epochs 20 --batch-size 35 --lr 0.01 --device cpu --out run"
    command = ["train", "--dataset", "speech_commands", "--model", "mlp", *options.split()]
    assert main([*command, "--data-dir", "data"]) == 0
    assert json.loads(Path("run/result.json").read_text())["test_accuracy"] > 0.5
    assert "10 time steps, frames, on cpu" in capsys.readouterr().out
    (tmp_path / "long.wav").write_bytes(wav_bytes(np.ones(16_001, np.int16)))
    files = ["data/yes", "long.wav"]
    assert main(["predict", "run/best.ckpt", *files, "--device", "cpu", "--csv"]) == 1
    output = capsys.readouterr()
    assert [line.split(",")[0] for line in output.out.splitlines()[1:]] == [
        str(path) for path in sorted(Path("data/yes").iterdir())
    ]
    assert "long.wav has 16001 samples: expected 1 to 16000, one second; cut it" in output.err


def test_networks_get_levels_from_0_to_1() -> None:
    from spikefuse.train import ConfigError, TrainConfig, batches

    config = TrainConfig(dataset="speech_commands", model="mlp")
    assert config.num_steps == 100
    pixels = torch.randint(256, (3, 100, 40), dtype=torch.uint8)
    pixels[0, 0] = 255
    x = batches.encode(pixels, config)
    assert isinstance(x, torch.Tensor)
    torch.testing.assert_close(x, pixels.transpose(0, 1) / 255)
    assert sf.data.DATASETS["shd"].scale == 1
    with pytest.raises(ConfigError, match="drop_events is given, but speech_commands holds levels"):
        TrainConfig(dataset="speech_commands", model="mlp", drop_events=True)
    with pytest.raises(ConfigError, match="slicing is number, but speech_commands has no events"):
        TrainConfig(dataset="speech_commands", model="mlp", slicing="number")
    with pytest.raises(ConfigError, match="event-mlp reads events, but speech_commands holds lev"):
        TrainConfig(dataset="speech_commands", model="event-mlp")
