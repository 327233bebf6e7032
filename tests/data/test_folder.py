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
    (tmp_path / place / "test" / "images").mkdir(parents=True)  # without labels
    (tmp_path / place / "test" / "images" / "test_0.JPEG").write_bytes(b"")
    train, val = data.load("tiny_imagenet", tmp_path)
    assert train.labels.tolist() == [0, 1]
    assert val.labels.tolist() == [1, 0, 1]
    assert val.pixels.shape == (3, 3, 64, 64)
    expected = torch.tensor([[100, 9, 0], [0, 9, 50], [100, 9, 100]])
    assert (val.pixels.float().mean((2, 3)) - expected).abs().max() < 3
    assert (train.pixels[1].float().mean((1, 2)) - torch.tensor([100, 9, 200])).abs().max() < 3


def test_tiny_imagenet_with_validation_folders_is_not_cropped(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    for place in ("train/n01", "val/n01", "train/n02", "val/n02"):
        (tmp_path / place).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / place / "a.png")
    _, val = data.load("tiny_imagenet", tmp_path)
    np.testing.assert_array_equal(val.pixels[0].numpy(), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", " lists no file"),
        ("val_0.JPEG\tn01\nval_1.JPEG\tn09\n", ", line 2: 'n09' is not a class of training, su"),
        ("../val_annotations.txt\tn01\n", ", line 1: '../val_annotations.txt' is not a file in"),
        ("val_0.JPEG n01\n", ", line 1: 'val_0.JPEG n01' is not a file in .*, or name the columns"),
    ],
)
def test_damaged_annotations_are_named(tmp_path: Path, text: str, what: str) -> None:
    write_tiny(tmp_path)
    (tmp_path / "val" / "val_annotations.txt").write_text(text)
    with pytest.raises(data.DataError, match=rf"val_annotations\.txt{what}"):
        data.load("tiny_imagenet", tmp_path)


def test_images_are_decoded_when_they_are_indexed(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "train" / "n02" / "1.JPEG"
    path.write_bytes(path.read_bytes()[:200])
    train, _ = data.load("imagenet", tmp_path, size=16)
    assert len(train[:3]) == 3
    with pytest.raises(data.DataError, match=r"1\.JPEG is damaged .*not an image"):
        train[3:]


def test_images_of_all_formats_that_are_read_are_found(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for ending in ("bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "TIF", "tiff", "webp"):
            Image.new("L", (4, 4), 99).save(tmp_path / name / f"a.{ending}")
    train, test = data.load(data.image_folder(tmp_path, size=4))
    assert len(train) + len(test) == 2 * 10


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    """Such as copies that Jupyter makes, and files of macOS."""
    write_photos(tmp_path, 5)
    copies = ".ipynb_checkpoints/0-checkpoint.png", "more/.copies/0.png", "._0.png"
    for hidden in (*copies, ".DS_Store", "Thumbs.db", "desktop.ini"):
        (tmp_path / "cat" / hidden).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cat" / hidden).write_bytes(b"")
    train, test = data.load(data.image_folder(tmp_path, size=8))
    assert len(train.pixels) + len(test.pixels) == 3 * 5


def test_files_of_other_endings_are_said(tmp_path: Path) -> None:
    write_photos(tmp_path, 2, ("train", "test"))
    for name in ("train/cat/a.heic", "train/dog/b.heic", "test/fox/more/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    what = r"skipped 3 of .*, such as .*cat/a\.heic: only those that end in \.bmp, .*, \.webp are"
    with pytest.warns(UserWarning, match=what) as warned:
        parts = data.load(data.image_folder(tmp_path, size=8))
    assert [len(part) for part in parts] == [6, 6]
    assert [warning.filename for warning in warned] == [__file__]


def test_files_beside_the_folders_of_classes_are_said(tmp_path: Path) -> None:
    write_photos(tmp_path, 5, ("",))
    for name in ("0.png", "._1.png", "README.txt"):
        (tmp_path / name).write_bytes((tmp_path / "cat" / "0.png").read_bytes())
    what = r"skipped 1 of .*, such as .*/0\.png: no folder of a class has them, and no table of"
    with pytest.warns(UserWarning, match=what):
        parts = data.load(data.image_folder(tmp_path, size=8))
    assert sum(len(part) for part in parts) == 3 * 5


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
    for dtype in (np.float32, np.int32, np.int16):
        Image.fromarray(np.full((9, 9), 1, dtype)).save(tmp_path / "a.tiff")
        with pytest.raises(data.DataError, match=r"a\.tiff has pixels of another type .* convert"):
            read_image(tmp_path / "a.tiff", 8)


@pytest.mark.parametrize("maximum", [15, 255, 256, 1023, 4095, 65535])
@pytest.mark.parametrize("name", ["a.pgm", "a.ppm"])
def test_grey_pgm_of_all_depths(tmp_path: Path, name: str, maximum: int) -> None:
    values = np.linspace(0, maximum, 64).round().reshape(8, 8)
    content = values.astype(np.uint8 if maximum < 256 else ">u2").tobytes()
    (tmp_path / name).write_bytes(b"P5\n8 8\n%d\n" % maximum + content)
    image = read_image(tmp_path / name, 8, channels=1, margin=1.0)
    assert np.abs(image[0] - values * 255 / maximum).max() <= 1


def test_very_long_images_are_refused(tmp_path: Path) -> None:
    Image.new("L", (505, 5)).save(tmp_path / "a.png")
    with pytest.raises(
        data.DataError, match=r"a\.png has 505 columns and 5 rows: expected a longer"
    ):
        read_image(tmp_path / "a.png", 8)


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
    for part, name in (("train", "n01"), ("val", "n01"), ("train", "n02"), ("val", "n03")):
        (tmp_path / part / name).mkdir()
        with pytest.raises(data.DataError, match=r"no .*\.jpeg .*file in .*n01: add one, or rem"):
            data.load("imagenet", tmp_path)
    for place in tmp_path.glob("*/*"):
        Image.new("L", (3, 3)).save(place / "a.png")
    with pytest.raises(data.DataError, match=r"n02 is a class in only one of"):
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


def write_photos(folder: Path, count: int, parts: tuple[str, ...] = ("",)) -> None:
    """Write images of three classes, whose red encodes the class and green the number."""
    for part in parts:
        for label, name in enumerate(("cat", "dog", "fox")):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                image = Image.new("RGB", (20, 16), (100 * label, i, 0))
                image.save(folder / part / name / f"{i}.png")


def test_a_folder_of_ones_own_is_split_by_seed(tmp_path: Path) -> None:
    write_photos(tmp_path, 10)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "cat" / "._0.png").touch()  # as macOS writes
    photos = data.image_folder(tmp_path, size=8)
    assert photos.classes == ("cat", "dog", "fox")
    assert photos.shape == (3, 8, 8)
    train, test = data.load(photos)
    assert train.labels.bincount().tolist() == [8, 8, 8]
    assert test.labels.bincount().tolist() == [2, 2, 2]
    numbers = [part.pixels[:, 1, 0, 0] + 10 * part.labels for part in (train, test)]
    assert torch.cat(numbers).sort().values.tolist() == list(range(30))
    again, other = (data.load(data.image_folder(tmp_path, 8, seed=seed))[1] for seed in (0, 1))
    assert torch.equal(again.pixels, test.pixels)
    assert not torch.equal(other.pixels, test.pixels)


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        (("training", "test"), [6, 6]),
        (("Testing", "Training"), [6, 6]),
        (("TEST", "Train", "val"), [6, 6, 6]),
        (("train", "valid", "test"), [6, 6, 6]),
        (("train",), [5, 1]),
    ],
)
def test_folders_of_parts(tmp_path: Path, parts: tuple[str, ...], sizes: list[int]) -> None:
    write_photos(tmp_path, 2, parts)
    loaded = data.load("folder", tmp_path, size=8)
    assert [len(part) for part in loaded] == sizes


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        (("train", "test", "pred"), r"has pred beside train, test: move pred elsewhere, or rename"),
        (("Train", "train"), r"has train beside Train: move"),
    ],
)
def test_other_folders_beside_parts(tmp_path: Path, parts: tuple[str, ...], what: str) -> None:
    write_photos(tmp_path, 2, parts)
    with pytest.raises(data.DataError, match=what):
        data.image_folder(tmp_path)
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in tmp_path.glob("*/*/*")]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    assert data.image_folder(tmp_path).classes == ("cat", "dog", "fox")


def test_a_class_may_be_called_test(tmp_path: Path) -> None:
    write_photos(tmp_path, 5)
    (tmp_path / "fox").rename(tmp_path / "Test")
    assert data.image_folder(tmp_path).classes == ("Test", "cat", "dog")


def test_grey_images_of_a_folder(tmp_path: Path) -> None:
    write_photos(tmp_path, 2)
    photos = data.image_folder(tmp_path, size=8, grey=True)
    train, _ = data.load(photos)
    assert train.pixels.shape[1:] == photos.shape == (1, 8, 8)
    (image,) = data.read_file(photos, tmp_path / "fox" / "0.png")
    assert image.shape == (1, 8, 8)
    assert image[0, 0, 0] == 60  # 0.299 of 200


def test_labels_in_a_table(tmp_path: Path) -> None:
    write_photos(tmp_path, 5)
    rows = [f"{path.relative_to(tmp_path)},the {path.parent.name}" for path in tmp_path.glob("*/*")]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows]))
    photos = data.image_folder(tmp_path, size=8)
    assert photos.classes == ("the cat", "the dog", "the fox")
    for part in data.load(photos):
        assert torch.equal(part.pixels[:, 0, 0, 0], 100 * part.labels.byte())


@pytest.mark.parametrize(
    ("header", "row"),
    [
        (["file,camera,label"], "{0},left,{1}"),
        (["File,Label"], "{0},{1}"),
        (["label, file, camera"], "{1}, {0}"),
        ([], "{0}, {1} ,left"),
    ],
)
def test_columns_of_a_table(tmp_path: Path, header: list[str], row: str) -> None:
    write_photos(tmp_path, 5)
    paths = tmp_path.glob("*/*")
    rows = [row.format(path.relative_to(tmp_path), path.parent.name) for path in paths]
    (tmp_path / "labels.csv").write_text("\n".join([*header, *rows]))
    assert data.image_folder(tmp_path, size=8).classes == ("cat", "dog", "fox")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_blank_lines_and_encodings_of_a_table(tmp_path: Path, encoding: str) -> None:
    write_photos(tmp_path, 5)
    rows = [f"{path.relative_to(tmp_path)},für {path.parent.name}" for path in tmp_path.glob("*/*")]
    lines = ["", "file,label", *rows[:4], "", ",", "  ", *rows[4:], "", ""]
    (tmp_path / "labels.csv").write_text("\n".join(lines), encoding)
    assert data.image_folder(tmp_path).classes == ("für cat", "für dog", "für fox")
    (tmp_path / "labels.csv").write_text("\n\ncat/0.png,cat\ncat/9.png,cat\n", encoding)
    with pytest.raises(data.DataError, match=r"line 4: 'cat/9\.png' is not a file"):
        data.image_folder(tmp_path)


def test_a_table_that_is_not_text(tmp_path: Path) -> None:
    write_photos(tmp_path, 1)
    (tmp_path / "labels.csv").write_bytes(b"file,label\ncat/0.png," + b"a" * 200_000)
    with pytest.raises(data.DataError, match=r"labels\.csv is not a table of text .*: correct it$"):
        data.image_folder(tmp_path)


def test_a_table_beside_parts(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_photos(tmp_path / part, 5)
    paths = tmp_path.glob("*/*/*")
    rows = [f"{path.relative_to(tmp_path)},a {path.parent.name}" for path in paths]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    assert data.image_folder(tmp_path, size=8).classes == ("a cat", "a dog", "a fox")


def test_a_class_named_file_in_the_first_row(tmp_path: Path) -> None:
    write_photos(tmp_path, 5)
    paths = tmp_path.glob("*/*")
    rows = [
        f"{path.relative_to(tmp_path)},{('file', 'other')[i % 2]}" for i, path in enumerate(paths)
    ]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    assert data.image_folder(tmp_path, size=8).classes == ("file", "other")


def test_a_table_without_labels(tmp_path: Path) -> None:
    write_photos(tmp_path, 1)
    (tmp_path / "labels.csv").write_text("file,breed\ncat/0.png,a\ndog/0.png,b\n")
    with pytest.raises(data.DataError, match=r"line 1: expected a column label among file, breed"):
        data.image_folder(tmp_path)


@pytest.mark.parametrize(
    ("header", "found"),
    [("filename,class", "'filename', 'class'"), ("file;label", "one column, 'file;label'")],
)
def test_a_table_with_other_columns(tmp_path: Path, header: str, found: str) -> None:
    write_photos(tmp_path, 1)
    (tmp_path / "labels.csv").write_text(f"{header}\ncat/0.png,a\ndog/0.png,b\n")
    expected = "name the columns file and label, with commas between: found"
    with pytest.raises(
        data.DataError, match=rf"line 1: .* is not a file .*, or {expected} {found}$"
    ):
        data.image_folder(tmp_path)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("cat/no.png,the cat", r"'cat/no\.png' is not a file in .*: correct it"),
        (
            "fox/0.png,the fox",
            r"'fox/0\.png' is listed before, as 'the fox': remove one of the rows",
        ),
        (
            "./fox/0.png,the dog",
            r"'\./fox/0\.png' is listed before, as 'the fox': remove one of the rows",
        ),
    ],
)
def test_wrong_rows_of_a_table(tmp_path: Path, row: str, what: str) -> None:
    """A file that is listed twice could be trained on and tested."""
    write_photos(tmp_path, 1)
    table = "file,label", "fox/0.png,the fox", "dog/0.png,the dog", row
    (tmp_path / "labels.csv").write_text("\n".join(table))
    for describe in (data.image_folder, data.event_folder):
        with pytest.raises(data.DataError, match=rf"labels\.csv, line 4: {what}$"):
            describe(tmp_path)


def test_absolute_paths_in_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the folder is called."""
    photos, link = tmp_path / "photos", tmp_path / "link"
    write_photos(photos, 5)
    link.symlink_to(photos)
    monkeypatch.chdir(photos)
    rows = [f"{path},{path.parent.name}" for path in sorted(photos.glob("*/*"))]
    rows[0] = "cat/0.png,cat"
    (photos / "labels.csv").write_text("\n".join(rows))
    for folder in (photos, link, Path("../photos"), Path("../link"), Path()):
        assert len(data.load(data.image_folder(folder, size=8))[1]) == 3
    (photos / "labels.csv").write_text("\n".join([*rows, f"{photos / 'cat' / '0.png'},dog"]))
    with pytest.raises(data.DataError, match=r"0\.png' is listed before, as 'cat'"):
        data.image_folder("../photos")
    for outside in (tmp_path / "a.png", photos / ".." / "photos" / "cat" / "0.png"):
        (tmp_path / "a.png").touch()
        (photos / "labels.csv").write_text("\n".join([*rows, f"{outside},cat"]))
        with pytest.raises(data.DataError, match=r"png' is not a file in \.\./photos"):
            data.image_folder("../photos")


def test_errors_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"nowhere is not a folder: expected one"):
        data.image_folder(tmp_path / "nowhere")
    with pytest.raises(data.DataError, match=r"size is '64': expected a whole number"):
        data.image_folder(tmp_path, size="64")
    with pytest.raises(data.DataError, match=r"has no folder per class: .* or list them in labels"):
        data.image_folder(tmp_path)
    (tmp_path / "cat").mkdir()
    Image.new("L", (3, 3)).save(tmp_path / "cat" / "a.png")
    with pytest.raises(data.DataError, match=r"has one class, cat: expected several"):
        data.image_folder(tmp_path)
    with pytest.raises(data.DataError, match=r"size is 0: expected at least 1"):
        data.image_folder(tmp_path, size=0)
    with pytest.raises(data.DataError, match=r"folder is a dataset of your own .* set data_dir"):
        data.load("folder")
    with pytest.raises(data.DataError, match=r"unknown dataset 'photos': .*image_folder"):
        data.load("photos")
    (tmp_path / "cat").rename(tmp_path / "test")
    with pytest.raises(data.DataError, match=r"has test, but no folder train: add it"):
        data.image_folder(tmp_path)


def test_one_table_for_all_parts(tmp_path: Path) -> None:
    """Images that it names in a folder of the test are not trained on."""
    rows = []
    for part, count in (("Test", 4), ("train", 6), ("valid", 2)):
        (tmp_path / part).mkdir()
        for i in range(count):
            Image.new("L", (4, 4)).save(tmp_path / part / f"{i}.png")
            rows.append(f"{part}/{i}.png,{'ab'[i % 2]}")
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows]))
    parts = data.load(data.image_folder(tmp_path, size=4))
    assert [{path.parent.name for path in part.files} for part in parts] == [
        {"train"},
        {"valid"},
        {"Test"},
    ]
    assert [part.labels.tolist() for part in parts] == [[0, 1] * 3, [0, 1], [0, 1] * 2]

    Image.new("L", (4, 4)).save(tmp_path / "beside.png")  # a table of no parts
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows, "beside.png,a"]))
    assert [len(part) for part in data.load(data.image_folder(tmp_path, size=4))] == [11, 2]

    (tmp_path / "beside.png").unlink()
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows[1:], "Test/0.png,c"]))
    with pytest.raises(data.DataError, match=r"labels\.csv: c is a class of no file in train"):
        data.image_folder(tmp_path, size=4)


@pytest.mark.parametrize("name", ["test", "Val"])
def test_a_table_that_leaves_out_a_part(tmp_path: Path, name: str) -> None:
    """Otherwise the test would be drawn from the files for training, although there is a part."""
    write_photos(tmp_path, 5, ("train", name))
    rows = [f"train/{kind}/{i}.png,{kind}" for kind in ("cat", "dog") for i in range(5)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows]))
    what = rf"labels\.csv names no file in {name}: add the files of {name}, or move {name} elsewhe"
    with pytest.raises(data.DataError, match=what):
        data.image_folder(tmp_path)


def test_files_that_a_table_leaves_out_are_said(tmp_path: Path) -> None:
    write_photos(tmp_path, 5, ("train", "test"))
    (tmp_path / "notes.txt").touch()
    parts = [path.relative_to(tmp_path) for path in sorted(tmp_path.glob("*/*/*"))]
    rows = [f"{path},{path.parent.name}" for path in parts[:-3]]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows]))
    what = r"skipped 3 of .*, such as .*train/fox/2\.png: the table of labels does not name them$"
    with pytest.warns(UserWarning, match=what) as warned:
        found = data.load(data.image_folder(tmp_path, size=8))
    assert [len(part) for part in found] == [12, 15]
    assert [warning.filename for warning in warned] == [__file__]


def write_table(folder: Path, labels: list[str]) -> None:
    """Write a table of images with these labels."""
    folder.mkdir()
    for i in range(len(labels)):
        Image.new("L", (4, 4)).save(folder / f"{i}.png")
    rows = [f"{i}.png,{label}" for i, label in enumerate(labels)]
    (folder / "labels.csv").write_text("\n".join(["file,label", *rows]))


def test_labels_that_are_values(tmp_path: Path) -> None:
    write_table(tmp_path / "fractions", [f"{0.5 * i:.1f}" for i in range(1, 31)])
    what = r"labels\.csv are numbers, such as 0\.5, and each of the 30 would be a class: .* --task"
    with pytest.raises(data.DataError, match=what):
        data.image_folder(tmp_path / "fractions")
    write_table(tmp_path / "mixed", ["0.5", "sharp", "1e400"] * 3)
    assert data.image_folder(tmp_path / "mixed").classes == ("0.5", "1e400", "sharp")
    write_table(tmp_path / "digits", [str(i % 10) for i in range(30)])
    assert data.image_folder(tmp_path / "digits").classes == tuple("0123456789")
    write_table(tmp_path / "whole", ["1.0", "2.0", "1.0", "2.0", "3"])
    assert data.image_folder(tmp_path / "whole").classes == ("1.0", "2.0", "3")


def test_labels_of_single_files_are_said(tmp_path: Path) -> None:
    write_table(tmp_path / "ages", [str(i % 20) for i in range(25)])
    what = r"15 of the 20 labels in .*labels\.csv have a single file, such as '5': a class needs"
    with pytest.warns(UserWarning, match=what) as warned:
        data.image_folder(tmp_path / "ages")
    assert [warning.filename for warning in warned] == [__file__]
