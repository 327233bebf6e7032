"""The command `export`: what other programs compute from its files is what the network computes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import spikefuse as sf
from spikefuse.nn.encode import direct
from spikefuse.train.checkpoint import KEY
from spikefuse.train.config import TrainConfig
from spikefuse.train.training_module import TrainingModule

Spikefuse = Callable[..., int]
Captured = pytest.CaptureFixture[str]


def save(path: Path, **settings: object) -> sf.train.predict.TrainedNetwork:
    """Save an untrained checkpoint, whose neurons fire, and load it."""
    module = TrainingModule(TrainConfig(**{"num_steps": 2, "fuse": False, **settings}))
    entry = {"config": module.config.to_dict(), "history": [], "step": 0}
    torch.save({KEY: entry, "state_dict": module.state_dict()}, path)
    return sf.load(path)


def test_one_step(spikefuse: Spikefuse, tmp_path: Path, capsys: Captured) -> None:
    """For another batch size; ONNX is in the page docs/export.md, names in tests/transforms."""
    net = save(tmp_path / "best.ckpt", model="mlp", neuron="rateif", threshold=0.3)
    assert spikefuse("export", tmp_path, "--format", "pt2", "--step") == 0
    assert "input   net.3.v: float32 [batch, 256], at rest 0.5\n" in capsys.readouterr().out
    step = torch.export.load("best-step.pt2").module()
    x, states = torch.rand(5, 1, 8, 8), [torch.full((5, 256), v) for v in (0.5, 0.0, 0.5, 0.0)]
    for expected in net.net(direct(x, 3)).detach():
        y, *states = step(x, *states)
        torch.testing.assert_close(y, expected)


def test_a_whole_network(spikefuse: Spikefuse, tmp_path: Path, capsys: Captured) -> None:
    net = save(tmp_path / "best.ckpt", model="mlp", threshold=0.3)
    assert spikefuse("export", tmp_path / "best.ckpt", "--format=pt2", "-o", "net") == 0
    text = "wrote net\ninput   inputs: uint8 [batch, 1, 8, 8]\noutput  predictions: float32 [batch"
    assert text in capsys.readouterr().out
    images = sf.data.load("digits")[1][:5].pixels
    assert torch.equal(torch.export.load("net").module()(images), net(images))


@torch.no_grad()
def test_weights_in_int8(spikefuse: Spikefuse, tmp_path: Path) -> None:
    net = save(tmp_path / "best.ckpt", model="conv", threshold=0.3)
    assert spikefuse("export", tmp_path, "--format=pt2", "--int8") == 0
    program = torch.export.load(tmp_path / "best-int8.pt2")
    assert sum(p.dtype == torch.int8 for p in program.state_dict.values()) == 3
    images = sf.data.load("digits")[1][:5].pixels
    expected = sf.quantize(net.net, direct(images / 255, 2), states=None)(direct(images / 255, 2))
    assert torch.equal(program.module()(images), expected.mean(0))


def test_nir(spikefuse: Spikefuse, tmp_path: Path) -> None:
    pytest.importorskip("nir", reason="needs the extra nir")
    net = save(tmp_path / "best.ckpt", model="conv", threshold=0.3, num_steps=4)
    assert spikefuse("export", tmp_path, "--format", "nir", "--dt", "0.5") == 0
    assert spikefuse("export", "digits-conv", "--format", "nir") == 0  # of the package
    assert Path("digits-conv.nir").exists()
    x = torch.rand(4, 3, 1, 8, 8)
    same = sf.Temporal(sf.from_nir(tmp_path / "best.nir", dt=0.5))
    torch.testing.assert_close(same(x), net.net(x))


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, ("nir", "--step"), "--step is given, but NIR describes neurons without steps: rem"),
        ({}, ("nir", "--int8"), "--int8 is given, but weights in NIR are floats: remove it"),
        ({}, ("pt2", "--dt", "1"), "--dt is given, but pt2 has no time constants: remove it"),
        ({}, ("nir", "--dt", "-1"), "exported as nir: dt is -1.0: expected a positive finite"),
        ({"encoding": "poisson"}, ("onnx",), "Poisson spikes, which cannot be exported: add --ste"),
        (
            {"model": "event-mlp", "encoding": "poisson"},
            ("pt2", "--step"),
            "exported as pt2: 'net.0' is a EventLinear, whose lists",
        ),
        ({"neuron": "alif"}, ("nir",), "- '3' (ALIF): NIR has no such neuron: use sf.LIF"),
        ({}, ("onnx",), 'error: onnxscript is not installed: pip install "spikefuse[onnx]"'),
    ],
)
def test_refusals(
    spikefuse: Spikefuse,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    options: tuple[str, ...],
    message: str,
) -> None:
    """One message, and no file; ONNX does as if onnxscript were not installed."""
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    save(tmp_path / "best.ckpt", **{"model": "mlp", **settings})
    assert spikefuse("export", tmp_path, "--format", *options) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"]


@pytest.mark.parametrize("command", [("export", "--format", "pt2"), ("convert",)])
def test_where_no_file_can_be(
    spikefuse: Spikefuse, tmp_path: Path, capsys: Captured, command: tuple[str, ...]
) -> None:
    save(tmp_path / "best.ckpt", model="mlp", num_steps=1, neuron="relu")
    name, *options = command
    for out, message in (
        (tmp_path, f"{tmp_path} is a folder: give --out the name of a file"),
        (tmp_path / "a" / "b", f"there is no folder {tmp_path}/a for b: make it, or set --out"),
    ):
        assert spikefuse(name, tmp_path, *options, "-o", out) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["best.ckpt"]
