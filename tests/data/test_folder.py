"""Image folders, decoded when they are indexed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from spikefuse import data
from spikefuse.data.folder import read_image

CLASSES = ("n01", "n02", "n03")


def write(folder: Path, ending: str = ".JPEG") -> None:
    """Write two images per class and part, whose colour encodes class and number."""
    for part in ("train", "val"):
        for label, name in enumerate(CLASSES):
            (folder / part / name).mkdir(parents=True)
            for i in range(2):
                image = Image.new("RGB", (50 + 20 * i, 40), (80 * label, 100 * i, 7))
                image.save(folder / part / name / f"{i}{ending}")


@pytest.mark.parametrize("ending", [".JPEG", ".png"])
def test_reads_class_folders(tmp_path: Path, ending: str) -> None:
    write(tmp_path / "imagenet", ending)
    train, val = data.load("imagenet", tmp_path, size=24)
    assert isinstance(train, data.ImageFolder)
    assert train.labels.tolist() == val.labels.tolist() == [0, 0, 1, 1, 2, 2]
    batch = train[torch.tensor([5, 0, 3])]
    assert isinstance(batch, data.Images)
    assert batch.pixels.shape == (3, 3, 24, 24)
    assert batch.pixels.dtype == torch.uint8
    assert batch.labels.tolist() == [2, 0, 1]
    expected = torch.tensor([[160, 100, 7], [0, 0, 7], [80, 100, 7]])
    assert (batch.pixels.float().mean((2, 3)) - expected).abs().max() < 3
    assert torch.equal(train[4:].labels, torch.tensor([2, 2]))
    assert torch.equal(train[train.labels == 1].labels, torch.tensor([1, 1]))


def test_images_are_decoded_when_they_are_indexed(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "train" / "n02" / "1.JPEG"
    path.write_bytes(path.read_bytes()[:200])
    train, _ = data.load("imagenet", tmp_path, size=16)
    assert len(train[:3]) == 3
    with pytest.raises(data.DataError, match=r"1\.JPEG is damaged .*not an image"):
        train[3:]


def test_a_split_stays_on_disk(tmp_path: Path) -> None:
    write(tmp_path)
    train, _ = data.load("imagenet", tmp_path, size=16)
    rest, part = data.split(train, 0.5, seed=0)
    for path in (tmp_path / "train" / "n01").iterdir():
        path.unlink()
    assert rest.labels.tolist() == part.labels.tolist() == [0, 1, 2]
    assert part[1:].pixels.shape == (2, 3, 16, 16)


def test_center_crop_at_the_usual_scale(tmp_path: Path) -> None:
    """A shorter side of 256 is not scaled for 224: the crop begins at 16."""
    pixels = np.random.default_rng(0).integers(0, 256, (256, 300, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png", 224)
    np.testing.assert_array_equal(image, pixels[16:240, 38:262].transpose(2, 0, 1))


def test_grey_images_become_colour(tmp_path: Path) -> None:
    Image.new("L", (30, 20), 99).save(tmp_path / "a.png")
    assert (read_image(tmp_path / "a.png", 8) == 99).all()


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    Image.fromarray(np.full((9, 9), 99 * 256 + 5, np.uint16)).save(tmp_path / "a.png")
    assert (read_image(tmp_path / "a.png", 8) == 99).all()
    Image.fromarray(np.full((9, 9), 0.5, np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(data.DataError, match=r"a\.tiff is damaged .*32 bits, expected 8 or 16"):
        read_image(tmp_path / "a.tiff", 8)


def test_grey_results_without_a_margin(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (28, 30), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png", 28, channels=1, margin=1.0)
    np.testing.assert_array_equal(image, pixels[None, :, 1:29])


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"imagenet: train is neither in .*image-net\.org"):
        data.load("imagenet", tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    with pytest.raises(data.DataError, match=r"train has no folder per class"):
        data.load("imagenet", tmp_path)
    (tmp_path / "train" / "n01").mkdir()
    (tmp_path / "val" / "n01").mkdir()
    with pytest.raises(data.DataError, match=r"no .*\.jpeg .*file in .*n01: every class needs"):
        data.load("imagenet", tmp_path)
    (tmp_path / "val" / "n02").mkdir()
    with pytest.raises(data.DataError, match=r"n02 is a class in only one of"):
        data.load("imagenet", tmp_path)
    for i in range(1001):
        (tmp_path / "train" / f"m{i:04}").mkdir()
    with pytest.raises(data.DataError, match=r"has 1002 folders: expected at most 1000 classes"):
        data.load("imagenet", tmp_path)
    with pytest.raises(data.DataError, match=r"cannot read .*nothing"):
        read_image(tmp_path / "nothing", 8)


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(data.DataError, match=r'pip install "spikefuse\[images\]"'):
        data.load("imagenet", tmp_path)
