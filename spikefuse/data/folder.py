"""Image folders with one subfolder per class, as in ImageNet; images are decoded when indexed.

Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", IJCV 115(3), 2015. Le and
Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS 231N, 2015.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.data.files import (
    DataError,
    check_regular,
    class_files,
    damaged,
    find_folder,
    not_installed,
    read_bytes,
)
from spikefuse.data.images import Images, Index

PAGE = "https://www.image-net.org/download.php"
MAX_CLASSES = 1000
TINY_PAGE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_CLASSES = 200
# Lists the classes of the validation images, which are in one folder; and its most bytes.
ANNOTATIONS, ANNOTATION_BYTES = "val_annotations.txt", 1 << 24
ENDINGS = {".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm"}
# Formats of Pillow that are read, whatever the name of a file: others start programs (EPS).
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")
# Shorter side before the crop, relative to the crop.
MARGIN = 256 / 224
MAX_ASPECT = 100


@dataclass(frozen=True)
class ImageFolder:
    """Labelled image files; only names and labels are in memory.

    Args:
        files: one per image.
        labels: int64 `[N]`.
        size: rows and columns of a decoded image.
        margin: as in `read_image`.
    """

    files: tuple[Path, ...]
    labels: Tensor
    size: int
    margin: float = MARGIN

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Index) -> Images:
        """Decode the chosen images, using one thread per core."""
        rows = torch.arange(len(self))[index.cpu() if isinstance(index, Tensor) else index]
        pixels = torch.empty((len(rows), 3, self.size, self.size), dtype=torch.uint8)

        def decode(i: int) -> None:
            image = read_image(self.files[int(rows[i])], self.size, margin=self.margin)
            pixels[i] = torch.from_numpy(image)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(decode, range(len(rows))))
        return Images(pixels, self.labels[rows])

    @property
    def pixels(self) -> Tensor:
        return self[:].pixels

    @property
    def nbytes(self) -> int:
        return len(self) * (3 * self.size**2 + 8)

    def to(self, device: torch.device, non_blocking: bool = False) -> Images:
        return self[:].to(device, non_blocking)


def load_imagenet(
    directory: Path, download: bool, size: int = 224
) -> tuple[ImageFolder, ImageFolder]:
    """Load training and validation images of ImageNet, or of any dataset with its layout.

    Args:
        directory: contains `train` and `val`, each with one folder per class, or a folder imagenet
            with both.
        download: ignored: only registered users can download ImageNet.
        size: rows and columns of an image.

    Returns:
        Two `ImageFolder`s. Labels number the classes in alphabetical order.

    Raises:
        DataError: a folder is missing, the two differ in classes or have too many, or Pillow is
            not installed.
    """
    folder = find_folder("imagenet", ("train", "val"), directory, PAGE)
    return _load("imagenet", folder, MAX_CLASSES, size, MARGIN)


def load_tiny_imagenet(
    directory: Path, download: bool, size: int = 64
) -> tuple[ImageFolder, ImageFolder]:
    """Load training and validation images of Tiny-ImageNet, whose test images have no labels.

    The images of a class are in `train/<class>/images`, and those for validation in `val/images`
    with their classes in `val/val_annotations.txt`, or as in `load_imagenet`.

    Args:
        directory: contains `train` and `val`, or a folder tiny_imagenet or tiny-imagenet-200 with
            both.
        download: ignored: the archive has no published checksum.
        size: rows and columns of an image; all have 64.

    Returns:
        As `load_imagenet`, with images that are scaled to `size` without a margin.

    Raises:
        DataError: as for `load_imagenet`, or the annotations are damaged.
    """
    folder = find_folder(
        "tiny_imagenet", ("train", "val"), directory, TINY_PAGE, "tiny-imagenet-200"
    )
    return _load("tiny_imagenet", folder, TINY_CLASSES, size, 1.0)


def _load(
    name: str, folder: Path, max_classes: int, size: int, margin: float
) -> tuple[ImageFolder, ImageFolder]:
    if size < 1:
        raise DataError(f"size is {size}: expected at least 1")
    train, val = folder / "train", folder / "val"
    classes = _classes(name, train, max_classes)
    if (val / ANNOTATIONS).is_file():
        held_out = _annotated(val, classes)
    else:
        if odd := sorted(set(_classes(name, val, max_classes)) ^ set(classes)):
            raise DataError(
                f"{name}: {odd[0]} is a class in only one of {train} and {val}: both need the same "
                "folders"
            )
        held_out = _in_folders(val, classes)
    _pillow()  # fail early
    files, labels = _in_folders(train, classes)
    training = ImageFolder(files, torch.tensor(labels), size, margin)
    return training, ImageFolder(held_out[0], torch.tensor(held_out[1]), size, margin)


def _classes(name: str, folder: Path, max_classes: int) -> list[str]:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not names:
        raise DataError(
            f"{name}: {folder} has no folder per class: move its images into folders named after "
            "their class, such as n01440764"
        )
    if len(names) > max_classes:
        raise DataError(
            f"{name}: {folder} has {len(names)} folders: expected at most {max_classes} classes"
        )
    return names


def _in_folders(folder: Path, classes: list[str]) -> tuple[tuple[Path, ...], list[int]]:
    inner = (f"{name}/images" for name in classes)
    paths = [i if (folder / i).is_dir() else n for i, n in zip(inner, classes, strict=True)]
    return class_files(folder, paths, ENDINGS, "every class needs at least one image")


def _annotated(folder: Path, classes: list[str]) -> tuple[tuple[Path, ...], list[int]]:
    """Read a list of rows with a file in `images`, its class, and further columns, in tabs."""
    path, images = folder / ANNOTATIONS, folder / "images"
    lines = read_bytes(path, ANNOTATION_BYTES).decode(errors="replace").splitlines()
    present = {entry.name for entry in images.iterdir()} if images.is_dir() else set()
    numbers = {name: label for label, name in enumerate(classes)}
    files, labels = [], []
    for number, line in enumerate(lines, 1):
        file, name = (*line.split("\t"), "", "")[:2]
        if file not in present or name not in numbers:
            raise damaged(
                path, f"line {number}: expected a file in {images} and one of the training classes"
            )
        files.append(images / file)
        labels.append(numbers[name])
    if not files:
        raise damaged(path, "it lists no image")
    return tuple(files), labels


def read_image(path: Path, size: int, channels: int = 3, margin: float = MARGIN) -> np.ndarray:
    """Read an image, scale its shorter side to `size * margin`, and crop the centre.

    Args:
        path: a JPEG, PNG, BMP, WebP, PPM, GIF or TIFF file, with 8 or 16 bits per channel.
        size: rows and columns of the result.
        channels: 3 for RGB, 1 for grey.
        margin: shorter side before the crop, relative to the crop.

    Returns:
        uint8 `[channels, size, size]`.

    Raises:
        DataError: the file is missing or damaged, or Pillow is not installed.
    """
    pillow = _pillow()
    try:
        check_regular(path)
        with pillow.open(path, formats=FORMATS) as image:
            if max(image.size) > MAX_ASPECT * min(image.size):  # would take gigabytes when scaled
                raise ValueError(f"its size is {image.size}")
            scale = size * margin / min(image.size)
            width, height = (max(size, round(side * scale)) for side in image.size)
            mode = "L" if channels == 1 else "RGB"
            image.draft(mode, (width, height))  # decodes large JPEGs at reduced size
            if image.mode.startswith("I;16"):  # which Pillow would clip to 8 bits
                image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            elif image.mode in ("I", "F"):
                raise ValueError("its pixels have 32 bits, expected 8 or 16")
            image = image.convert(mode).resize((width, height), pillow.Resampling.BILINEAR)
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders may raise anything
        raise DataError(
            f"{path} is damaged (not an image: {error}): replace or remove it"
        ) from error
    left, top = (width - size) // 2, (height - size) // 2
    crop = np.asarray(image.crop((left, top, left + size, top + size)))
    return crop.reshape(size, size, channels).transpose(2, 0, 1).copy()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise not_installed("an image file", "Pillow", "images") from error
    return Image
