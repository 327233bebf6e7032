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


def write_tiny(folder: Path) -> None:
    """The published layout of Tiny-ImageNet, with two training and three validation images."""
    for label, name in enumerate(CLASSES[:2]):
        place = folder / "train" / name
        (place / "images").mkdir(parents=True)
        Image.new("RGB", (64, 64), (100 * label, 9, 200)).save(place / "images" / f"{name}_0.JPEG")
        (place / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t62\t62\n")
    (folder / "val" / "images").mkdir(parents=True)
    rows = []
    for i, label in enumerate((1, 0, 1)):
        image = Image.new("RGB", (64, 64), (100 * label, 9, 50 * i))
        image.save(folder / "val" / "images" / f"val_{i}.JPEG")
        rows.append(f"val_{i}.JPEG\t{CLASSES[label]}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(rows))


@pytest.mark.parametrize(
    "place", ["", "tiny_imagenet", "tiny-imagenet-200", "tiny_imagenet/tiny-imagenet-200"]
)
def test_reads_the_layout_of_tiny_imagenet(tmp_path: Path, place: str) -> None:
    write_tiny(tmp_path / place)
    train, val = data.load("tiny_imagenet", tmp_path)
    assert train.labels.tolist() == [0, 1]
    assert val.labels.tolist() == [1, 0, 1]
    assert val.pixels.shape == (3, 3, 64, 64)
    expected = torch.tensor([[100, 9, 0], [0, 9, 50], [100, 9, 100]])
    assert (val.pixels.float().mean((2, 3)) - expected).abs().max() < 3
    assert (train.pixels[1].float().mean((1, 2)) - torch.tensor([100, 9, 200])).abs().max() < 3


def test_tiny_imagenet_with_validation_folders_is_not_cropped(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    for part in ("train", "val"):
        (tmp_path / part / "n01").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / part / "n01" / "a.png")
    _, val = data.load("tiny_imagenet", tmp_path)
    np.testing.assert_array_equal(val.pixels[0].numpy(), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "it lists no image"),
        ("val_0.JPEG\tn01\nval_1.JPEG\tn09\n", "line 2: expected a file in .*images and one of"),
        ("../val_annotations.txt\tn01\n", "line 1: expected a file"),
        ("val_0.JPEG n01\n", "line 1: expected a file"),
    ],
)
def test_damaged_annotations_are_named(tmp_path: Path, text: str, what: str) -> None:
    write_tiny(tmp_path)
    (tmp_path / "val" / "val_annotations.txt").write_text(text)
    with pytest.raises(data.DataError, match=rf"val_annotations\.txt is damaged \({what}"):
        data.load("tiny_imagenet", tmp_path)


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


def test_other_formats_of_pillow_are_refused(tmp_path: Path) -> None:
    """A file of PostScript would start Ghostscript."""
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", "eps")
    with pytest.raises(data.DataError, match=r"a\.jpg is damaged \(not an image: cannot identify"):
        read_image(tmp_path / "a.jpg", 8)
