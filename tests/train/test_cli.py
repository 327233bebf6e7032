"""The command line: complete help, one-line error messages, and restarts by torchrun."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from spikefuse import data, models
from spikefuse.train import cli
from spikefuse.train.choices import NEURONS
from spikefuse.train.cli import main
from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError, describe
from spikefuse.train.parser import GROUPS, make_parser
from tests.processes import finish, torchrun, wait_for
from tests.train.runs import OPTIONS, PLAIN, rows

Spikefuse = Callable[..., int]


def test_help_names_every_option_with_its_default(
    spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spikefuse("train", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for title in GROUPS.values():
        assert f" {title}: --" in text
    for f in fields(TrainConfig):
        if not f.metadata:
            continue  # no option
        described, default = describe(TrainConfig)[f.name]
        assert re.search(rf"--{f.name.replace('_', '-')}\b", text)
        assert described
        assert re.search(rf" {re.escape(described)}(; one of .*)? \(default: {default}\)", text)
    for name in [*data.DATASETS, *models.MODELS, *NEURONS]:
        assert name in text
    for word in (
        "--resume",
        "--out",
        "--config",
        "--device",
        "--data-dir",
        "--download",
        "SPIKEFUSE_DATA",
    ):
        assert word in text
    assert "spikefuse train --resume" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage"),
        (["--help"], "COMMAND"),
        (
            ["eval", "--help"],
            "(default: $SPIKEFUSE_DATA, else see the end of spikefuse train --help)",
        ),
        (["eval", "--help"], "comes with spikefuse, such as digits-conv"),
        (["predict", "--help"], "FILE [FILE ...]"),
        (["convert", "--help"], "sf.from_ann"),
        (["export", "--help"], "--format onnx|pt2|nir"),
        (["--version"], "spikefuse 0."),
    ],
)
def test_other_help(
    spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    if arguments:
        assert spikefuse(*arguments) == 0
        assert words in " ".join(capsys.readouterr().out.split())
    else:
        assert spikefuse() == 2
        assert "arguments are required: COMMAND" in capsys.readouterr().err


def test_help_does_not_import_lightning() -> None:
    code = (
        "import sys; from spikefuse.train.parser import make_parser; make_parser().format_help(); "
        "loaded = {'lightning', 'matplotlib', 'sklearn', 'numba'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


WRONG = [
    (["--epochs", "three"], "argument --epochs: invalid int value: 'three'"),
    (["--colour", "red"], "unrecognized arguments: --colour red (see spikefuse train --help)"),
    (["--epoch", "3"], "unrecognized arguments: --epoch 3, did you mean --epochs? (see spikefuse"),
    (["--batchsize=3"], "unrecognized arguments: --batchsize=3, did you mean --batch-size? (see"),
    (["--learning-rate", "1"], "unrecognized arguments: --learning-rate 1, did you mean --lr?"),
    (["--no-shift"], "unrecognized arguments: --no-shift, did you mean --shift 0?"),
    (["--dat", "shd"], "unrecognized arguments: --dat shd"),
    (["--data", "data/mnist"], "unknown dataset 'data/mnist': for images in a folder add"),
    (["--dataset", "digit"], "unknown dataset 'digit': did you mean digits? choose one of"),
    (["--model", "vgg"], "unknown model 'vgg': did you mean vgg11? choose one of mlp"),
    (["--model", "resnet"], "unknown model 'resnet': did you mean resnet18? choose one of mlp"),
    (["--threshold", "1e39"], "--threshold is 1e+39: expected a number from 1e-37 to 1e+37"),
    (["--threshold", "1e-50"], "--threshold is 1e-50: expected a number from 1e-37 to 1e+37"),
    (["--logger", "wandbb"], "unknown logger 'wandbb': did you mean wandb? choose one of"),
    (["--neuron", "if", "--decay", "0.5"], "--decay is given, but the neuron if has none"),
    (["--dataset", "MNIST"], "unknown dataset 'MNIST': did you mean mnist? choose one of digits"),
    (["--optimizer", "AdamW"], "unknown optimizer 'AdamW': did you mean adamw? choose one of adam"),
    (["-T", "0"], "--num-steps is 0: expected a whole number of at least 1"),
    (["-T", "9" * 20], f"--num-steps is {'9' * 20}: expected a whole number below 2147483648"),
    (["--lr", "9" * 400], "--lr is inf: expected a number"),
    (["--batch-size", "5000"], "--batch-size is 5000: digits has only 1295 training samples"),
    (["--device", "tpu"], "unknown device 'tpu': did you mean cpu? choose one of auto, cpu, cuda"),
    (["--device", "cpu", "--precision", "16"], "--precision is 16, which needs a CUDA GPU"),
    (["--device", "cpu", "--cuda-graph"], "--cuda-graph needs a CUDA GPU: add --no-cuda-graph"),
    (["--device", "cpu", "--sync-batch-norm"], "--sync-batch-norm needs CUDA GPUs: add --no-"),
    (["--config", "none.yaml"], "cannot read config none.yaml: No such file or directory"),
    (["--dataset", "mnist", "--data-dir", "data"], "mnist: train-images-idx3-ubyte.gz is neither"),
    (["--data-dir", "photos"], "--data-dir is given, but digits has no files: remove it, or name"),
    (["--download"], "--download is given, but digits has no files: remove it, or name another"),
    (["--resume", "nothing.ckpt"], "checkpoint nothing.ckpt does not exist: expected last.ckpt"),
    (["--resume", "."], "checkpoint last.ckpt does not exist: expected last.ckpt"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_user_errors_are_one_line_and_create_no_files(
    spikefuse: Spikefuse,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert spikefuse("train", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"spikefuse train: error: {message}")
    assert list(tmp_path.iterdir()) == []


def test_user_errors_without_a_command_and_in_eval(
    spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["eval", "a", "b"], "spikefuse eval: error: unrecognized arguments: b (see spikefuse ev"),
        (["--colour"], "spikefuse: error: the following arguments are required: COMMAND (see s"),
        (["--vers", "train"], "spikefuse: error: unrecognized arguments: --vers, did you mean"),
    ):
        assert spikefuse(*arguments) == 2
        assert capsys.readouterr().err.startswith(message)


def test_data_is_an_alias_of_dataset() -> None:
    arguments = ["train", "--data", "shd", "--data-dir", "files", "--data-ranks", "2"]
    found = make_parser().parse_args(arguments)
    assert (found.dataset, found.data_dir, found.data_ranks) == ("shd", Path("files"), 2)
    assert make_parser().parse_args(["train", "--data=shd"]).dataset == "shd"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu(spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str]) -> None:
    assert spikefuse("train", "--device", "cuda") == 2
    assert "finds no CUDA GPU: choose auto or cpu" in capsys.readouterr().err


def test_a_damaged_data_file(
    spikefuse: Spikefuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / f"{part}-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x03")[:-2])
    assert spikefuse("train", "--dataset", "mnist", "--data-dir", tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "train-images-idx3-ubyte.gz") in line
    assert "damaged" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("package", "missing"), [("lightning.pytorch", "lightning"), ("tqdm", "tqdm")]
)
def test_missing_extra(tmp_path: Path, package: str, missing: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import spikefuse.train.cli as c; c.main()"
    code = code.replace("c.main()", "sys.exit(c.main(['train']))")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert missing in line
    assert line.endswith('is not installed: pip install "spikefuse[train]"')


def test_ctrl_c_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("spikefuse.data.load", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "spikefuse train: interrupted\n"


def test_names_that_are_too_long(
    spikefuse: Spikefuse, capsys: pytest.CaptureFixture[str], small: list[str]
) -> None:
    for arguments in (["--resume", "a" * 300], [*small, "--out", "a" * 300]):
        assert spikefuse("train", *arguments) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "error: [Errno 36] File name too long: 'aaa" in line


def test_more_steps_than_memory(
    spikefuse: Spikefuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = str(2**31 - 1)
    arguments = ["--model", "mlp", "-T", steps, "--device", "cpu", "--encoding", "poisson"]
    assert spikefuse("train", *arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("error: out of memory: lower the batch size or the number of steps")
    assert not list((tmp_path / "runs").iterdir())


def run_in_shell(command: str, folder: Path) -> tuple[int, str]:
    """Return the exit code and the errors of a shell command, in which $0 is the program."""
    program = f"{sys.executable} -m spikefuse"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.replace("$0", program)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_run_goes_on_without_its_output(tmp_path: Path, small: list[str]) -> None:
    options = " ".join([*small, "--model", "mlp", "--epochs", "1", "--no-fuse"])
    assert run_in_shell(f"$0 train {options} --out r | head -1", tmp_path) == (0, "")
    assert (tmp_path / "r" / "result.json").exists()
    # The output of an evaluation is its result, so that it must be written.
    evaluate = "$0 eval r/best.ckpt --device cpu --no-fuse"
    full = "spikefuse eval: error: [Errno 28] No space left on device\n"
    assert run_in_shell(f"{evaluate} > /dev/full", tmp_path) == (1, full)
    assert run_in_shell(f"{evaluate} >&-", tmp_path) == (0, "")
    # A pipe whose reader has gone.
    assert run_in_shell(f"{evaluate} > >(exec <&- >&- 2>&-; sleep 9)", tmp_path) == (1, "")


def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    command = PLAIN, "train", *OPTIONS, "--time-ranks", "2", "--epochs", "3", "--out", "run"
    process = torchrun(2, "--max-restarts", "1", *command, folder=tmp_path)
    wait_for((tmp_path / "run" / "best.ckpt").exists, process)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    output = finish(process)
    # What had been done is not done again.
    assert output.count("epoch 1/3") == output.count("epoch 3/3") == 1
    assert [row["epoch"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_restart_resumes_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resumed(*arguments: str) -> Path | None:
        parsed = cli.make_parser().parse_args(["train", *arguments])
        cli._resume_after_restart(parsed, "last.ckpt")
        return parsed.resume

    out = ("--out", str(tmp_path))
    assert resumed() is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(ConfigError, match="add --out DIR"):
        resumed()
    (tmp_path / "last.ckpt").touch()
    assert resumed(*out) is None  # the first start
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resumed(*out) == tmp_path / "last.ckpt"
    assert resumed("--resume", "other.ckpt") == Path("other.ckpt")


def test_options_are_named_as_typed() -> None:
    for message, expected in (
        ("batch_size is 0: expected a", "--batch-size is 0: expected a"),
        (
            "model is a, but b: remove it, or time_ranks",
            "--model is a, but b: remove it, or --time-ranks",
        ),
        (
            "the model a needs data_dir (x/data_dir/y)",
            "the model a needs --data-dir (x/data_dir/y)",
        ),
        ("config a.yaml: batch_size is 0", "config a.yaml: batch_size is 0"),
    ):
        assert cli._as_typed(message) == expected


def test_names_that_are_not_utf8_are_printed(tmp_path: Path) -> None:
    code = "from spikefuse.train import output as o; o.open_closed_streams(); print('a\\udcff')"
    for encoding, expected in (("utf-8", b"a\xff\n"), ("ascii", b"a\\udcff\n")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-c", code]
        assert subprocess.run(command, env=environment, stdout=-1, check=True).stdout == expected
