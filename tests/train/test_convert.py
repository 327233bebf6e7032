"""The command `convert`: its checkpoint computes nearly what the network of ReLUs computes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import spikefuse as sf
from spikefuse.train.checkpoint import KEY, load
from spikefuse.train.cli import main

Spikefuse = Callable[..., int]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relu") / "run"
    options = "train --neuron relu --model conv --epochs 2 --device cpu --no-fuse --out"
    assert main([*options.split(), str(folder)]) == 0
    return folder


@torch.no_grad()
def outputs(path: Path) -> torch.Tensor:
    """The logits of the test images."""
    return sf.load(path)(sf.data.load("digits")[1].pixels)


def test_a_converted_checkpoint(spikefuse: Spikefuse, run: Path, capsys: Captured) -> None:
    files = [path.name for path in run.iterdir()]
    options = "-T 24 --per-channel --share 0.999 --samples 200 -o spiking.ckpt"
    assert spikefuse("convert", run, *options.split()) == 0
    text = capsys.readouterr().out
    expected, y = outputs(run / "best.ckpt"), outputs(Path("spiking.ckpt"))
    assert (y - expected).norm() < 0.1 * expected.norm()
    assert re.search(r"neuron +threshold +clipped +rate +error\n2 +\d.*\n6 +\d", text)
    labels = sf.data.load("digits")[1].labels
    shares = [100 * (z.argmax(1) == labels).double().mean() for z in (y, expected)]
    shown = [f"accuracy {share:.2f} %" for share in shares]
    assert f"24        {shown[0]}\noriginal  {shown[1]}\nwrote spiking.ckpt" in text
    steps = re.findall(r"^(\d+) +accuracy", text, re.M)
    assert steps == ["1", "2", "4", "8", "16", "24"]
    assert spikefuse("eval", "spiking.ckpt", "--device", "cpu") == 0
    assert f"test {shown[0]}" in capsys.readouterr().out
    assert [path.name for path in run.iterdir()] == files
    thresholds = {name: v.shape for name, v in load(Path("spiking.ckpt")).weights.items()}
    assert thresholds["net.net.2.threshold"] == (32,)


def test_refusals(spikefuse: Spikefuse, run: Path, capsys: Captured) -> None:
    assert spikefuse("convert", run, "-T", "2", "-o", "spiking.ckpt") == 0
    for command, message in (
        (
            ("convert", "spiking.ckpt"),
            "of spiking.ckpt spikes: train one with --neuron relu or",
        ),
        (
            ("train", "--resume", "spiking.ckpt"),
            "spiking.ckpt comes with spikefuse, was converted, or",
        ),
        (("convert", run, "-T", "0"), "--num-steps is 0: expected a whole number of at least 1"),
        (("convert", run, "--share", "2"), "cannot be converted: --num-steps, share are 8, 2.0: "),
        (("export", "spiking.ckpt", "--format", "nir"), "- '2' (RateIF): NIR has no such neuron"),
    ):
        assert spikefuse(*command) == 2
        assert message in capsys.readouterr().err
    content = torch.load("spiking.ckpt", weights_only=True)
    content[KEY]["config"]["neuron"] = "lif"
    torch.save(content, "other.ckpt")
    assert spikefuse("eval", "other.ckpt") == 2
    assert "converted is given, but the neuron lif is not" in capsys.readouterr().err
