"""Foreign and damaged checkpoints, and invalid ways to resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spikefuse.train.checkpoint import load, replacing
from spikefuse.train.cli import main

Spikefuse = Callable[..., int]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    assert main(["train", *small, "--model", "mlp", "--out", str(directory)]) == 0
    return directory


def test_load(trained: Path) -> None:
    loaded = load(trained / "last.ckpt")
    assert loaded.config.model == "mlp"
    assert [row["epoch"] for row in loaded.history] == [1, 2]


FOREIGN: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("hello"),
    "empty": lambda path: path.write_bytes(b""),
    "weights of something else": lambda path: torch.save({"w": torch.ones(3)}, path),
    "a tensor": lambda path: torch.save(torch.ones(3), path),
    "code": lambda path: torch.save({"spikefuse": print}, path),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("command", [["eval"], ["train", "--resume"]])
def test_files_that_are_no_checkpoints(
    spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str], kind: str, command: list[str]
) -> None:
    FOREIGN[kind](Path("foreign.ckpt"))
    assert spikefuse(*command, "foreign.ckpt") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "foreign.ckpt is damaged or not a checkpoint of spikefuse: expected last.ckpt" in line


@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_truncated(
    spikefuse: Spikefuse, trained: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    whole = (trained / "last.ckpt").read_bytes()
    Path("part.ckpt").write_bytes(whole[: int(share * len(whole))])
    assert spikefuse("eval", "part.ckpt") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "part.ckpt is damaged or not a checkpoint" in line


@pytest.mark.parametrize("command", [["eval"], ["train", "--resume"]])
def test_weights_of_another_network(
    spikefuse: Spikefuse, trained: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    content = torch.load(trained / "last.ckpt", weights_only=True)
    content["spikefuse"]["config"]["model"] = "conv"
    torch.save(content, "other.ckpt")
    assert spikefuse(*command, "other.ckpt") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the weights in other.ckpt do not fit the model conv" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lr", "0.5"], "lr is 0.5, but {path} was trained with 0.001: remove it"),
        (["--out", "x"], "out is given with resume: a resumed run continues in its own folder"),
        (["--epochs", "1"], "epochs is 1: {path} has done 2 already"),
    ],
)
def test_settings_that_a_resumed_run_cannot_change(
    spikefuse: Spikefuse,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    path = trained / "last.ckpt"
    assert spikefuse("train", "--resume", path, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(path=path) in line


def test_checkpoint_of_an_earlier_version(
    spikefuse: Spikefuse, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = torch.load(trained / "last.ckpt", weights_only=True)
    del content["spikefuse"]["step"]
    torch.save(content, "old.ckpt")
    assert spikefuse("eval", "old.ckpt") == 0
    assert spikefuse("train", "--resume", "old.ckpt") == 2
    assert "old.ckpt was saved by an earlier version of spikefuse" in capsys.readouterr().err


def test_resume_without_best_checkpoint(
    spikefuse: Spikefuse, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(trained / "last.ckpt", "last.ckpt")
    assert spikefuse("train", "--resume", "last.ckpt", "--epochs", "3") == 2
    assert "best.ckpt is missing: resume a run in the folder" in capsys.readouterr().err


def test_replacing_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise RuntimeError
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "new")]
