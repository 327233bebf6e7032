"""Trained networks loaded from checkpoints, the command `predict`, and evaluation."""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

import spikefuse as sf
from benchmarks import record
from spikefuse import isolated
from spikefuse.data import DATASETS, DataError, Dataset, Frames, Slicing, to_frames
from spikefuse.data.nmnist import read_nmnist
from spikefuse.train import predict
from spikefuse.train.batches import encode
from spikefuse.train.checkpoint import KEY, PRETRAINED
from spikefuse.train.cli import main
from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError
from spikefuse.train.predict import device_of, evaluate, threads
from spikefuse.train.processes import Processes
from spikefuse.train.training_module import TrainingModule
from tests.data.readers import speech
from tests.data.writing import nmnist_bytes, random_columns, wav_bytes

Spikefuse = Callable[..., int]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    assert main(["train", *small, "--model", "mlp", "--out", str(directory)]) == 0
    return directory / "best.ckpt"


@pytest.fixture
def images(tmp_path: Path) -> torch.Tensor:
    """Write five test images below photos/; they are returned too."""
    pixels = sf.data.load("digits")[1][:5].pixels
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for i, image in enumerate(pixels):
        Image.fromarray(image[0].numpy()).save(tmp_path / "photos" / "more" / f"{i}.png")
    return pixels


def save(path: Path, **settings: object) -> Path:
    """Save an untrained checkpoint."""
    module = TrainingModule(TrainConfig(**settings))
    entry = {"config": module.config.to_dict(), "history": [], "step": 0}
    torch.save({KEY: entry, "state_dict": module.state_dict()}, path)
    return path


def test_a_batch_is_moved_to_the_network(trained: Path, images: torch.Tensor) -> None:
    # The first neuron, behind a layer with weights, refuses the device.
    with pytest.raises(ValueError, match="no kernels for device 'meta'"):
        sf.load(trained).to("meta")(images)


def test_a_loaded_network_computes_as_in_evaluation(
    spikefuse: Spikefuse, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = torch.random.get_rng_state()
    net = sf.load(trained)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert isinstance(net.net, sf.Temporal)
    assert not any(m.training for m in net.modules())
    assert net.classes == tuple("0123456789")
    _, test = sf.data.load("digits")
    with torch.no_grad():
        logits = net(test.pixels)
    assert logits.shape == (359, 10)
    accuracy = (logits.argmax(1) == test.labels).double().mean()
    assert spikefuse("eval", trained, "--device", "cpu") == 0
    assert f"test accuracy {100 * accuracy:.2f} %" in capsys.readouterr().out


def test_inputs_are_bytes_of_the_dataset(trained: Path) -> None:
    net = sf.load(str(trained))
    for wrong in (torch.rand(2, 1, 8, 8), torch.zeros(1, 8, 8, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"expected torch.uint8 \[B, 1, 8, 8\], as digits"):
            net(wrong)


def test_poisson_inputs_and_events(tmp_path: Path) -> None:
    """Networks of every kind of input take what `read` returns."""
    columns = random_columns(400, (34, 34), 0)
    (tmp_path / "a.bin").write_bytes(nmnist_bytes(columns))
    (tmp_path / "a.h5").write_bytes(speech())
    Image.new("RGB", (40, 30), (255, 0, 0)).save(tmp_path / "a.png")
    (tmp_path / "a.wav").write_bytes(wav_bytes(np.arange(9000)))
    for name, settings, shape in (
        ("a.png", {"dataset": "cifar10", "encoding": "poisson", "model": "mlp"}, (1, 3, 32, 32)),
        ("a.bin", {"dataset": "nmnist", "model": "mlp"}, (1, 32, 2, 34, 34)),
        ("a.bin", {"dataset": "nmnist", "model": "event-mlp"}, (1, 32, 2, 34, 34)),
        ("a.h5", {"dataset": "shd", "model": "mlp", "num_steps": 20}, (3, 20, 700)),
        ("a.h5", {"dataset": "shd", "model": "recurrent", "num_steps": 20}, (3, 20, 700)),
        ("a.wav", {"dataset": "speech_commands", "model": "mlp"}, (1, 100, 40)),
    ):
        net = sf.load(save(tmp_path / "a.ckpt", **settings))
        inputs = net.read(tmp_path / name)
        assert inputs.shape == shape
        with torch.no_grad():
            assert net(inputs).shape == (shape[0], len(net.classes))
    expected = to_frames(read_nmnist(tmp_path / "a.bin"), Slicing("number", 32, bits=4))
    net = sf.load(save(tmp_path / "a.ckpt", dataset="nmnist", model="mlp"))
    np.testing.assert_array_equal(net.read(tmp_path / "a.bin")[0], expected)
    with pytest.raises(DataError, match=r"a\.png is not a file of nmnist: .* ends in \.bin"):
        net.read(tmp_path / "a.png")


def test_errors_of_load(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint .*none\.ckpt does not exist: expected"):
        sf.load(tmp_path / "none.ckpt")
    torch.save({"w": torch.ones(3)}, tmp_path / "other.ckpt")
    with pytest.raises(ConfigError, match=r"other\.ckpt is damaged or not a checkpoint of spikef"):
        sf.load(tmp_path / "other.ckpt")
    content = torch.load(trained, weights_only=True)
    content[KEY] = {"format": content[KEY]["format"] + 1, "version": "7.0"}
    torch.save(content, tmp_path / "new.ckpt")
    with pytest.raises(ConfigError, match=r"new\.ckpt: it was saved by spikefuse 7\.0, .*upgrade"):
        sf.load(tmp_path / "new.ckpt")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_networks_that_come_with_spikefuse(images: torch.Tensor, tmp_path: Path) -> None:
    """Their files are those that were measured, and their names stand for them."""
    (result,) = record.RESULTS.glob("pretrained-*.json")
    rows = {row["row"]: row for row in record.read(result)["rows"]}
    files = {path.stem: path.read_bytes() for path in PRETRAINED.iterdir()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert hashes == {name: row["sha256"] for name, row in rows.items()}
    test = sf.data.load("digits")[1]
    right = (sf.load("digits-conv")(test.pixels).argmax(1) == test.labels).float().mean()
    assert right == pytest.approx(rows["digits-conv"]["accuracy"], abs=0.01)
    assert main(["predict", "digits-conv", str(tmp_path / "photos")]) == 0
    with pytest.raises(ConfigError, match=r"does not exist: .* or one of digits-conv"):
        sf.load("digits-con")


def test_load_without_a_gpu(trained: Path) -> None:
    with pytest.raises(ConfigError, match="finds no CUDA GPU: choose auto or cpu"):
        sf.load(trained, "cuda")


def test_predict(
    spikefuse: Spikefuse,
    trained: Path,
    images: torch.Tensor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["predict", trained, "photos", "--device", "cpu", "--batch-size", "2"]
    with torch.no_grad():
        probabilities, labels = sf.load(trained)(images).softmax(1).topk(3)
    assert spikefuse(*arguments) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["file", "class", "probability"]
    for i, line in enumerate(lines):
        file, label, probability = line.split()
        assert (file, label) == (f"photos/more/{i}.png", str(int(labels[i, 0])))
        assert float(probability) == pytest.approx(float(probabilities[i, 0]), abs=1e-4)
    assert len(lines) == 5

    assert spikefuse(*arguments, "--csv", "--top", "3") == 0
    table = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["class"] for row in table] == [str(int(k)) for k in labels.flatten()]
    assert spikefuse(*arguments, "--json", "--top", "3") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [{k: str(v) for k, v in row.items()} for row in rows] == table


def test_values_are_shown_at_their_own_scale(
    spikefuse: Spikefuse, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ".npy", lambda path, num_steps: iter(np.load(path)[None])
    names = "small", "large"
    waves = Dataset((1,), names, lambda *_: (), "series", {"num_steps": 4}, files)
    monkeypatch.setitem(DATASETS, "waves", waves)
    save(Path("a.ckpt"), dataset="waves", model="mlp", task="regression")
    np.save("a.npy", np.ones((4, 1), np.float32))
    values = torch.tensor([[1.25e-7, -3.5e9]])
    monkeypatch.setattr(predict.TrainedNetwork, "forward", lambda *_: values)
    assert spikefuse("predict", "a.ckpt", "a.npy", "--device", "cpu") == 0
    rows = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    assert rows == [["name", "value"], ["small", "1.25e-07"], ["large", "-3.5e+09"]]


def test_predictions_and_evaluation_need_no_extra(
    trained: Path, images: torch.Tensor, tmp_path: Path
) -> None:
    code = "; ".join((
        "import sys",
        "sys.modules.update(dict.fromkeys(('tqdm', 'lightning', 'matplotlib', 'tensorboard')))",
        "from spikefuse.train.cli import main",
        f"assert main(['eval', {str(trained.parent)!r}]) == 0",
        f"sys.exit(main(['predict', {str(trained)!r}, {str(tmp_path / 'photos')!r}]))",
    ))  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 7), done.stderr


def test_files_that_cannot_be_read_are_reported(
    spikefuse: Spikefuse,
    trained: Path,
    images: torch.Tensor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("photos/bad.png").write_text("hello")
    Path("empty").mkdir()
    assert spikefuse("predict", trained, "none.png", "photos", "empty", "--device", "cpu") == 1
    output, errors = capsys.readouterr()
    assert len(output.splitlines()) == 1 + len(images)
    none, bad, empty = errors.splitlines()
    assert none == "spikefuse predict: error: cannot read none.png: No such file or directory"
    assert bad.startswith("spikefuse predict: error: photos/bad.png is damaged (not an image")
    assert empty.startswith("spikefuse predict: error: empty has no file that ends in .bmp, ")


def test_errors_of_a_users_own_reader_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(path: Path, num_steps: int) -> Any:
        yield np.loadtxt(path, dtype=np.float32, ndmin=2)

    transform = {"num_steps": 2}
    own = Dataset((1,), ("a", "b"), pytest.fail, "series", transform, files=(".txt", read))
    monkeypatch.setitem(DATASETS, "own", own)
    path = save(tmp_path / "a.ckpt", dataset="own", model="mlp", num_steps=2)
    for name, text in (("bad", "0\nhello"), ("good", "0\n1"), ("short", "0")):
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "link.txt").symlink_to("nowhere")
    files = [str(tmp_path / f"{name}.txt") for name in ("bad", "link", "short", "good")]
    assert main(["predict", str(path), *files]) == 1
    output, errors = capsys.readouterr()
    assert len(output.splitlines()) == 1 + 1
    bad, link, short = errors.splitlines()
    assert bad.startswith(f"spikefuse predict: error: {files[0]}: ValueError: could not convert")
    assert link.startswith(f"spikefuse predict: error: {files[1]}: FileNotFoundError: ")
    assert short.startswith(f"spikefuse predict: error: {files[2]} holds float32 [1, 1]: expected")


def test_several_examples_in_a_file_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(speech())
    net = sf.load(save(tmp_path / "a.ckpt", dataset="shd", model="mlp", num_steps=5))
    examples = predict.read_examples(net, [tmp_path / "a.h5"], pytest.fail)
    assert [name for name, _ in examples] == [f"{tmp_path / 'a.h5'}[{i}]" for i in range(3)]


def test_one_process_reads_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is damaged does not end it."""
    starts, start = [], isolated._start
    monkeypatch.setattr(isolated, "_start", lambda: starts.append(start()) or starts[-1])
    for name in "ac":
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file.update({column: [1, 0] for column in "xypt"})
    (tmp_path / "b.h5").write_bytes(b"no HDF5")
    settings = {"classes": ("clap", "wave"), "shape": (2, 30, 40), "sensor": "40x30"}
    path = save(tmp_path / "a.ckpt", dataset="events", model="mlp", num_steps=5, **settings)
    assert main(["predict", str(path), str(tmp_path)]) == 1
    output, errors = capsys.readouterr()
    assert len(output.splitlines()) == 1 + 2
    assert "b.h5 cannot be read (not an HDF5 file" in errors
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.ckpt", "a.png"], "checkpoint none.ckpt does not exist: expected last.ckpt"),
        (["none.ckpt"], "the following arguments are required: FILE (see spikefuse predict"),
        (["none.ckpt", "a.png", "--top", "0"], "top is 0: expected a whole number of at least 1"),
    ],
)
def test_wrong_options(
    spikefuse: Spikefuse,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert spikefuse("predict", *arguments) == 2
    assert capsys.readouterr().err.startswith(f"spikefuse predict: error: {message}")


def test_predictions_have_the_names_of_the_folders(
    tmp_path: Path, images: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"classes": ("a cat", "a dog"), "shape": (1, 6, 6), "size": 6, "grey": True}
    path = save(tmp_path / "a.ckpt", dataset="folder", model="mlp", **settings)
    assert main(["predict", str(path), str(tmp_path / "photos"), "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert {row["class"] for row in rows} <= {"a cat", "a dog"}
    assert len(rows) == 5


def test_a_recording_of_another_sensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported, and the other files are read."""
    monkeypatch.chdir(tmp_path)
    settings = {"classes": ("a", "b"), "shape": (2, 6, 8), "sensor": "8x6", "num_steps": 2}
    path = save(tmp_path / "a.ckpt", dataset="events", model="mlp", **settings)
    Path("a.csv").write_text("x,y,p,t\n1,2,1,0\n7,5,0,9\n")
    header, event = b"#!AER-DAT2.0\r\n# of a DVS128\r\n", 2 << 8 | 3 << 1 | 1
    Path("b.aedat").write_bytes(header + event.to_bytes(4, "big") + (5).to_bytes(4, "big"))
    assert main(["predict", str(path), "b.aedat", "a.csv", "--csv", "--top", "1"]) == 1
    out, err = capsys.readouterr()
    assert "b.aedat has the shape [2, 128, 128], and the examples of the run [2, 6, 8]" in err
    assert [row["file"] for row in csv.DictReader(out.splitlines())] == ["a.csv"]


CPU = torch.device("cpu")


class Counted(torch.nn.Module):
    """Outputs are counts of the events of each row, so that the busiest row is the class."""

    def forward(self, x: Any) -> torch.Tensor:
        return x.to_dense().flatten(2).unflatten(2, (5, 16)).sum(-1)


def test_packed_frames_and_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the processes of a batch, one of which has no sample of the last one."""
    torch.manual_seed(0)
    bits = torch.rand(7, 3, 5, 16) < 0.5
    labels = torch.randint(5, (7,))
    powers = 2 ** torch.arange(8)
    packed = (bits.flatten(2).unflatten(2, (-1, 8)) * powers).sum(-1).byte()

    def read(directory: Path, download: bool, **_: Any) -> tuple[Frames, ...]:
        raise AssertionError

    rows = Dataset((1, 5, 16), tuple("abcde"), read, "events", {"num_steps": 3, "bits": 1})
    monkeypatch.setitem(DATASETS, "rows", rows)
    config = TrainConfig(dataset="rows", model="event-mlp", batch_size=3)
    frames = Frames(packed, labels, (1, 5, 16), 1)
    counts = bits.sum(-1).sum(1) / 3
    expected = {
        "loss": torch.nn.functional.cross_entropy(counts, labels).item(),
        "accuracy": (counts.argmax(1) == labels).float().mean().item(),
    }
    found = evaluate(Counted(), frames, config, CPU, Processes())
    assert found == pytest.approx(expected)
    dense = encode(frames.pixels, config).to_dense()
    assert torch.equal(dense, encode(packed, config).to_dense())

    sums = []
    monkeypatch.setattr(Processes, "sum", lambda self, values: sums.append(values) or values)
    for rank in range(2):
        evaluate(Counted(), frames, config, CPU, Processes(rank, 2))
    *total, ignored, num = sum(sums)
    assert (ignored, num) == (0, 7)
    assert [float(x) / 7 for x in total] == pytest.approx([*expected.values()])


def test_devices_and_threads(monkeypatch: pytest.MonkeyPatch, own_threads: None) -> None:
    assert device_of("cpu", "bf16", Processes()) == CPU
    with pytest.raises(ConfigError, match="precision is 16, which needs a CUDA GPU"):
        device_of("cpu", "16", Processes())
    monkeypatch.setattr(predict, "VALUES_PER_THREAD", 1000)
    torch.set_num_threads(4)
    config = TrainConfig(num_steps=4, batch_size=10)  # 4 * 10 * 64 values
    with threads(config):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 4
