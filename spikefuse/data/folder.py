"""Image folders with one subfolder per class, as in ImageNet; images are decoded when indexed.

Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", IJCV 115(3), 2015.
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

from spikefuse.data.files import DataError, class_files, find_folder, not_installed
from spikefuse.data.images import Images, Index

PAGE = "https://www.image-net.org/download.php"
MAX_CLASSES = 1000
ENDINGS = {".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm"}
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
    """

    files: tuple[Path, ...]
    labels: Tensor
    size: int

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Index) -> Images:
        """Decode the chosen images, using one thread per core."""
        rows = torch.arange(len(self))[index.cpu() if isinstance(index, Tensor) else index]
        pixels = torch.empty((len(rows), 3, self.size, self.size), dtype=torch.uint8)

        def decode(i: int) -> None:
            pixels[i] = torch.from_numpy(read_image(self.files[int(rows[i])], self.size))

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
    if size < 1:
        raise DataError(f"size is {size}: expected at least 1")
    folder = find_folder("imagenet", ("train", "val"), directory, PAGE)
    train, val = folder / "train", folder / "val"
    classes = _classes(train)
    if odd := sorted(set(_classes(val)) ^ set(classes)):
        raise DataError(
            f"imagenet: {odd[0]} is a class in only one of {train} and {val}: both need the same "
            "folders"
        )
    _pillow()  # fail early
    return _image_folder(train, classes, size), _image_folder(val, classes, size)


def _classes(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not names:
        raise DataError(
            f"imagenet: {folder} has no folder per class: move its images into folders named after "
            "their class, such as n01440764"
        )
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"imagenet: {folder} has {len(names)} folders: expected at most {MAX_CLASSES} classes"
        )
    return names


def _image_folder(folder: Path, classes: list[str], size: int) -> ImageFolder:
    files, labels = class_files(folder, classes, ENDINGS, "every class needs at least one image")
    return ImageFolder(files, torch.tensor(labels), size)


def read_image(path: Path, size: int, channels: int = 3, margin: float = MARGIN) -> np.ndarray:
    """Read an image, scale its shorter side to `size * margin`, and crop the centre.

    Args:
        path: a file in a format of Pillow, with 8 or 16 bits per channel.
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
        with pillow.open(path) as image:
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
    except FileNotFoundError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
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
        raise not_installed("imagenet", "Pillow", "images") from error
    return Image
