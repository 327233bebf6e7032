"""Images in one folder per class, as ImageNet is laid out, decoded where they are indexed.

Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", IJCV 115(3), 2015.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.data.errors import DataError
from spikefuse.data.files import damaged, find_folder
from spikefuse.data.images import Images, Index

PAGE = "https://www.image-net.org/download.php"
MAX_CLASSES = 1000
ENDINGS = {".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm"}
# The shorter side before the crop, relative to the crop: 256 for 224.
MARGIN = 256 / 224


@dataclass(frozen=True)
class ImageFolder:
    """Labelled image files, of which only names and labels are in memory.

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
        """The chosen images, decoded by one thread per core."""
        rows = torch.arange(len(self))[index.cpu() if isinstance(index, Tensor) else index]
        pixels = torch.empty((len(rows), 3, self.size, self.size), dtype=torch.uint8)

        def decode(place: int) -> None:
            image = read_image(self.files[int(rows[place])], self.size)
            pixels[place] = torch.from_numpy(image)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for _ in threads.map(decode, range(len(rows))):
                pass
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
    """Training and validation images of ImageNet, or of any set laid out like it.

    Args:
        directory: holds `train` and `val`, each with one folder per class, or a folder imagenet
            that does.
        download: must be False: ImageNet is given to registered users only.
        size: rows and columns of an image.

    Returns:
        Two `ImageFolder`s. The label of a class is its place in the order of the names.

    Raises:
        DataError: a folder is missing, the two have other classes or too many, or Pillow is not
            installed.
    """
    if size < 1:
        raise DataError(f"size is {size}: expected at least 1")
    folder = find_folder("imagenet", ("train", "val"), directory, PAGE)
    train, val = folder / "train", folder / "val"
    classes = _classes(train)
    if (found := _classes(val)) != classes:
        odd = sorted(set(found) ^ set(classes))[0]
        raise DataError(
            f"imagenet: {odd} is a class in only one of {train} and {val}: both need one folder "
            "per class, named alike"
        )
    return _part(train, classes, size), _part(val, classes, size)


def _classes(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not names:
        raise DataError(
            f"imagenet: {folder} has no folder per class: sort its images into folders named by "
            "class, such as n01440764"
        )
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"imagenet: {folder} has {len(names)} folders: expected at most {MAX_CLASSES} classes"
        )
    return names


def _part(folder: Path, classes: list[str], size: int) -> ImageFolder:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = _images((folder / name).iterdir())
        if not found:
            raise DataError(f"imagenet: {folder / name} holds no image")
        files += found
        labels += [label] * len(found)
    _pillow()  # an early check
    return ImageFolder(tuple(files), torch.tensor(labels), size)


def _images(entries: Iterable[Path]) -> list[Path]:
    return sorted(path for path in entries if path.suffix.lower() in ENDINGS)


def read_image(path: Path, size: int) -> np.ndarray:
    """One image: its shorter side scaled to `size * 256 / 224`, then the middle `size` x `size`.

    Returns:
        uint8 `[3, size, size]`, RGB.

    Raises:
        DataError: the file is missing or damaged, or Pillow is not installed.
    """
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            scale = size * MARGIN / min(image.size)
            width, height = (max(size, round(side * scale)) for side in image.size)
            image.draft("RGB", (width, height))  # a large JPEG is decoded at a fraction of its size
            image = image.convert("RGB").resize((width, height), pillow.Resampling.BILINEAR)
    except FileNotFoundError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise damaged(path, f"no image: {error}") from error
    left, top = (width - size) // 2, (height - size) // 2
    crop = image.crop((left, top, left + size, top + size))
    return np.asarray(crop).transpose(2, 0, 1).copy()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "images in folders are read by Pillow, which is not installed: pip install "
            '"spikefuse[images]"'
        ) from error
    return Image
