"""Foreign and damaged checkpoints, and invalid ways to resume."""

from __future__ import annotations

import copy
import errno
import io
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spikefuse.data import DATASETS, DataError
from spikefuse.data import load as load_data
from spikefuse.train import DataModule, TrainConfig
from spikefuse.train.batches import EvalBatches
from spikefuse.train.checkpoint import KEY, LOCK, load, locked
from spikefuse.train.cli import main
from spikefuse.train.fields import ConfigError
from tests.data.readers import limited_memory

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
    assert "the weights in other.ckpt do not fit the model conv: they are of another model" in line


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
    content["spikefuse"]["config"] |= {"memory": "auto", "memory_budget": 2.0}
    torch.save(content, "old.ckpt")
    assert spikefuse("eval", "old.ckpt") == 0
    assert spikefuse("train", "--resume", "old.ckpt") == 2
    assert "old.ckpt comes with spikefuse, was converted, or was saved" in capsys.readouterr().err


def test_resume_without_best_checkpoint(
    spikefuse: Spikefuse, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(trained / "last.ckpt", "last.ckpt")
    assert spikefuse("train", "--resume", "last.ckpt", "--epochs", "3") == 2
    assert "best.ckpt is missing: resume a run in the folder" in capsys.readouterr().err


def test_resume_with_other_examples(
    spikefuse: Spikefuse,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Such as after files of a dataset were deleted."""
    before = (trained / "last.ckpt").read_bytes()
    train, test = load_data("digits")
    monkeypatch.setattr(DataModule, "load", lambda self: (train[:700], test))
    assert spikefuse("train", "--resume", trained / "last.ckpt", "--epochs", "3") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has done 20 steps in 2 epochs, but digits now has 4 batches: restore the exam" in line
    assert (trained / "last.ckpt").read_bytes() == before


@pytest.mark.parametrize("command", [["eval"], ["train", "--resume"]])
def test_a_changed_bit_of_a_weight_is_noticed(
    spikefuse: Spikefuse, trained: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    content = bytearray((trained / "last.ckpt").read_bytes())
    weight = torch.load(trained / "last.ckpt", weights_only=True)["state_dict"]["net.net.1.weight"]
    content[content.index(weight.numpy().tobytes()) + 2] ^= 0x40
    Path("changed.ckpt").write_bytes(content)
    assert not torch.equal(
        torch.load("changed.ckpt", weights_only=True)["state_dict"]["net.net.1.weight"], weight
    )
    assert spikefuse(*command, "changed.ckpt") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoint changed.ckpt: it is damaged: the checksum of" in line


def test_changed_bytes_never_change_what_is_loaded(tmp_path: Path, trained: Path) -> None:
    whole, path = (trained / "best.ckpt").read_bytes(), tmp_path / "changed.ckpt"
    rng, intact = random.Random(0), load(trained / "best.ckpt")
    refused = 0
    for _ in range(150):
        content = bytearray(whole)
        content[rng.choice((rng.randrange(len(whole)), -rng.randrange(1, 4000)))] ^= (
            1 << rng.randrange(8)
        )
        path.write_bytes(content)
        try:
            found = load(path)
        except ConfigError as error:
            refused += "changed.ckpt" in str(error)
            continue
        assert (found.config, found.history) == (intact.config, intact.history)
        torch.testing.assert_close(found.weights, intact.weights, rtol=0, atol=0)
    assert refused > 75  # dates and padding of the archive have no checksum


def test_compressed_content_is_refused(tmp_path: Path) -> None:
    """A checkpoint has no compressed entries, which could expand to any size."""
    saved, path = io.BytesIO(), tmp_path / "small.ckpt"
    torch.save({"state_dict": {"w": torch.zeros(1 << 20)}}, saved)
    with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for entry in archive.infolist():
            out.writestr(entry.filename, archive.read(entry))
    with pytest.raises(ConfigError, match=r"small\.ckpt is damaged"):
        load(path)


def test_earlier_versions_ignored_the_encoding_of_event_data(tmp_path: Path) -> None:
    config = TrainConfig(dataset="shd", model="mlp").to_dict() | {"encoding": "poisson"}
    content = {KEY: {"config": config, "history": []}, "state_dict": {}}
    torch.save(content, tmp_path / "old.ckpt")
    assert load(tmp_path / "old.ckpt").config.encoding == "direct"


def test_earlier_versions_accepted_options_without_effect(tmp_path: Path) -> None:
    config = TrainConfig(num_steps=4).to_dict() | {"tbptt": 9, "decay_all": True}
    content = {KEY: {"config": config, "history": []}, "state_dict": {}}
    torch.save(content, tmp_path / "old.ckpt")
    assert load(tmp_path / "old.ckpt").config == TrainConfig(num_steps=4)


EVENTS = {"dataset": "shd", "model": "event-mlp"}


@pytest.mark.parametrize(
    ("used", "unused"),
    [
        (EVENTS, {"overflow": "raise", "activity_weight": 2.0}),
        ({"neuron": "relu", "num_steps": 1}, {"tbptt": 1}),
    ],
)
def test_options_that_later_versions_refuse(
    tmp_path: Path, used: dict[str, Any], unused: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="remove it"):
        TrainConfig(**used, **unused)
    config = TrainConfig(**used).to_dict() | unused
    content = {KEY: {"config": config, "history": []}, "state_dict": {}}
    torch.save(content, tmp_path / "old.ckpt")
    assert load(tmp_path / "old.ckpt").config == TrainConfig(**used)


SIZE = b"\x8a\x05\0\0\0\0\1"  # 4 Gi
BYTES = b"\x80\x02cbuiltins\nbytearray\n" + SIZE + b"\x85R."
CLAIMS = {
    "bytearray": (BYTES, "data.pkl"),
    "tensor": (b"\x80\x02ctorch\nTensor\n" + SIZE + b"\x85R.", "data.pkl"),
    "new tensor": (b"\x80\x02ctorch\nTensor\n" + SIZE + b"\x85\x81.", "data.pkl"),
    "name of other letters": (BYTES, "DATA.PKL"),
}


def archive_with(pickled: bytes, name: str) -> bytes:
    """Return an archive of torch.save with another pickle."""
    saved, changed = io.BytesIO(), io.BytesIO()
    torch.save({}, saved)
    with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(changed, "w") as out:
        for entry in archive.infolist():
            wanted = entry.filename.endswith("data.pkl")
            other = entry.filename.replace("data.pkl", name)
            out.writestr(other, pickled if wanted else archive.read(entry))
    return changed.getvalue()


@pytest.mark.parametrize("kind", CLAIMS)
@pytest.mark.parametrize("before", [b"", BYTES])  # PyTorch reads what begins as a plain pickle
def test_claimed_bytes_are_not_allocated(tmp_path: Path, kind: str, before: bytes) -> None:
    """PyTorch lets a checkpoint call bytearray and torch.Tensor, with any size."""
    path = tmp_path / "small.ckpt"
    path.write_bytes(before + archive_with(*CLAIMS[kind]))
    with limited_memory(), pytest.raises(ConfigError, match=r"small\.ckpt is damaged") as error:
        load(path)
    assert not isinstance(error.value.__cause__, MemoryError)


def test_every_reader_sees_the_same_archive(tmp_path: Path, trained: Path) -> None:
    whole, path = (trained / "last.ckpt").read_bytes(), tmp_path / "other.ckpt"
    twice = io.BytesIO(whole)
    with zipfile.ZipFile(twice, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data.pkl", BYTES)
    locator = len(whole) - 42
    directory = whole[:locator] + whole[locator - 56 : locator] + whole[locator:]
    for content in (BYTES + whole, whole + whole, whole + b"\0", twice.getvalue(), directory):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"other\.ckpt is damaged"):
            load(path)


OTHERS: list[Any] = [None, 3, -1.5, "text", [1], {"a": 1}, {1: [2]}, torch.ones(2), 10**5000]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all entries of nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    inner = [places(v, (*path, k)) for k, v in items if isinstance(v, dict | list)]
    return [(*path, k) for k, _ in items] + [found for part in inner for found in part]


@pytest.mark.parametrize("command", ["eval", "resume"])
def test_entries_of_other_types(
    spikefuse: Spikefuse,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    """Each is read, or refused in one line, and leaves the run as it was."""
    whole, rng = torch.load(trained / "last.ckpt", weights_only=True), random.Random(command)
    chosen = [(path, other) for path in places(whole) for other in OTHERS]
    own = [(path, other) for path, other in chosen if path[0] == "spikefuse" and len(path) < 3]
    assert len(chosen) > 1000
    chosen = rng.sample(chosen, 14) + rng.sample(own, 8)  # others for each command
    shutil.copyfile(trained / "best.ckpt", "best.ckpt")
    refused = 0
    for path, other in chosen:
        content = copy.deepcopy(whole)
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = other
        torch.save(content, "last.ckpt")
        if command == "eval":
            code = spikefuse("eval", "last.ckpt", "--device", "cpu")
        else:
            code = spikefuse("train", "--resume", "last.ckpt", "--device", "cpu")
        errors = capsys.readouterr().err
        if code:  # PyTorch may warn before
            assert errors.splitlines()[-1].startswith("spikefuse "), (path, other)
        refused += code != 0
    assert refused > 5


def test_a_run_is_resumed_by_one_process_at_a_time(
    spikefuse: Spikefuse,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    before = (run / "last.ckpt").read_bytes()
    hold = (
        "import sys; from pathlib import Path; from spikefuse.train.checkpoint import locked\n"
        "with locked(Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        (run / ".last.ckpt.other.partial").touch()  # being written by the other process
        resume = ["train", "--resume", run / "last.ckpt", "--epochs", "3", "--device", "cpu"]
        assert spikefuse(*resume) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{run} is in use by process {other.pid} on " in line
        assert line.endswith(": wait for its end, or stop it")
        assert (run / "last.ckpt").read_bytes() == before
        assert (run / ".last.ckpt.other.partial").exists()
        other.kill()
    assert (run / LOCK).exists()
    assert spikefuse(*resume) == 0
    assert not (run / LOCK).exists()
    assert not list(run.glob(".*.partial"))


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ConfigError, match="is in use by"), locked(tmp_path):
        pass
    with locked(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["training", "test"])
def test_a_damaged_example_names_what_was_saved(
    spikefuse: Spikefuse,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small: list[str],
    part: str,
) -> None:
    """Images of folders are read when their batch is due."""
    original, calls = EvalBatches._fetch, []

    def damaged(self: EvalBatches, rows: Any) -> Any:
        calls.append(rows)
        # An epoch of 10 batches and 2 of the validation; the test begins after both.
        if len(calls) > {"training": 14, "test": 24}[part]:
            raise DataError("a.png is damaged: remove it")
        return original(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(EvalBatches, "_fetch", damaged)
        assert spikefuse("train", *small, "--model", "mlp", "--out", "run") == 2
        last = "a.png is damaged: remove it; saved run/last.ckpt: continue with --resume run/last."
        assert last in capsys.readouterr().err
        assert spikefuse("train", "--resume", "run/last.ckpt", "--device", "cpu") == 2
        assert last in capsys.readouterr().err  # and the checkpoint is not blamed
    assert spikefuse("train", "--resume", "run/last.ckpt", "--device", "cpu") == 0


def test_a_full_disk_names_what_was_saved(
    spikefuse: Spikefuse,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small: list[str],
) -> None:
    """What the run has saved before remains, and can be resumed."""
    original, calls = shutil.copyfile, []

    def full(*paths: Path) -> None:
        calls.append(paths)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(paths[1]))
        original(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        monkeypatch.setitem(DATASETS, "own", DATASETS["digits"])
        options = ["--dataset", "own", "--model", "mlp", "--epochs", "4", "--out", "run"]
        assert spikefuse("train", *small, *options, "--data-dir", "my data") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: [Errno 28] No space left on device" in line
    command = "--resume run/last.ckpt --device cpu --data-dir 'my data'"
    assert line.endswith(f"; saved run/last.ckpt: continue with {command}")
    assert not [path.name for path in Path("run").iterdir() if path.name.startswith(".")]
    assert spikefuse("train", "--resume", "run/last.ckpt", "--device", "cpu") == 0
