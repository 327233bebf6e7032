"""Image folders, a user's own or those of ImageNet; images are decoded when indexed.

Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", IJCV 115(3), 2015. Le and
Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS 231N, 2015.
"""

from __future__ import annotations

import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spikefuse.data.dataset import Dataset
from spikefuse.data.files import DataError, check_regular, find_folder, not_installed
from spikefuse.data.frames import whole_number
from spikefuse.data.images import Images, Index, check_index
from spikefuse.data.listing import list_files

PAGE = "https://www.image-net.org/download.php"
TINY_PAGE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
ENDINGS = {".jpeg", ".jpg", ".png", ".bmp", ".webp", ".pgm", ".ppm", ".gif", ".tif", ".tiff"}
# Formats of Pillow that are read, whatever the name of a file: others start programs (EPS).
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")
# Shorter side before the crop, relative to the crop.
MARGIN = 256 / 224
MAX_ASPECT = 100


@dataclass(frozen=True)
class ImageFolder:
    """Labelled image files; only names and labels are in memory.

    Example::

        from pathlib import Path

        files = Path("a.png"), Path("b.png")
        photos = sf.data.ImageFolder(files, torch.tensor([0, 1]), (3, 64, 64))
        pixels = photos[:1].pixels  # of a.png, which is read now

    Args:
        files: one per image.
        labels: int64 `[N]`.
        shape: of a decoded image, (channels, rows, columns), as many columns as rows.
        margin: as in `read_image`.
    """

    files: tuple[Path, ...]
    labels: Tensor
    shape: tuple[int, int, int]
    margin: float = MARGIN

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Index) -> Images:
        """Decode the chosen images, using one thread per core."""
        check_index(index)
        rows = torch.arange(len(self))[index.cpu() if isinstance(index, Tensor) else index]
        pixels = torch.empty((len(rows), *self.shape), dtype=torch.uint8)
        channels, size, _ = self.shape

        def decode(i: int) -> None:
            image = read_image(self.files[int(rows[i])], size, channels, self.margin)
            pixels[i] = torch.from_numpy(image)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(decode, range(len(rows))))
        return Images(pixels, self.labels[rows])

    @property
    def pixels(self) -> Tensor:
        return self[:].pixels

    @property
    def nbytes(self) -> int:
        return len(self) * (math.prod(self.shape) + 8)

    def to(self, device: torch.device, non_blocking: bool = False) -> Images:
        return self[:].to(device, non_blocking)


def image_folder(
    path: str | os.PathLike[str],
    size: int = 64,
    grey: bool = False,
    seed: int = 0,
    margin: float = 1.0,
) -> Dataset:
    """Describe the images in a folder, with the names of its subfolders as classes.

    Example::

        photos = sf.data.image_folder("photos", size=64)
        training, test = sf.data.load(photos)

    The folder holds one folder per class, or `train` with `val`, `test` or both, which hold one
    each. Without these, a fifth of each class, rounded, is drawn by `seed` for the test; without
    `test`, `val` is. In place of folders per class, `labels.csv` may have columns file and label,
    which its first row names. Images are decoded when they are indexed. Transparency is dropped,
    and 16 bits per channel are divided by 256, also where only 12 are used.

    Args:
        path: of the folder.
        size: rows and columns of an image, which is scaled so that its shorter side fits, and
            cropped at the centre.
        grey: read one channel; else, read RGB.
        seed: of the split.
        margin: shorter side before the crop, relative to the crop.

    Returns:
        The description, whose `classes` are in alphabetical order. `load` returns `ImageFolder`s.

    Raises:
        DataError: the folder is missing, has fewer than two classes or a class without images, its
            parts differ in classes or lie beside other folders, `size` is not positive, or Pillow
            is not installed.

    Warns:
        UserWarning: files in folders of classes have other endings, files are beside these, or a
            table leaves out files or has a single file of most classes.
    """
    size = whole_number("size", size)
    if size < 1:
        raise DataError(f"size is {size}: expected at least 1")
    classes, parts = list_files(Path(path).expanduser(), ENDINGS, seed)
    _pillow()  # fail early
    shape = (1 if grey else 3, size, size)

    def read(directory: Path, download: bool, **_: Any) -> tuple[ImageFolder, ...]:
        return tuple(
            ImageFolder(part.paths, torch.from_numpy(part.labels), shape, margin) for part in parts
        )

    options = {"size": size, "grey": grey, "margin": margin}
    return Dataset(shape, classes, read, transform=options)


def published(name: str, page: str, unpacked: str, directory: Path, **options: Any) -> Dataset:
    """Describe a dataset with folders `train` and `val`, as `image_folder` does.

    Tiny-ImageNet, whose test images have no labels, has those for validation in `val/images` with
    their classes in `val/val_annotations.txt`.

    Args:
        name, page, unpacked: as for `find_folder`.
        directory: contains `train` and `val`, or a folder `name` or `unpacked` with both.

    Raises:
        DataError: a folder is missing, the annotations are damaged, or as for `image_folder`.
    """
    folder = find_folder(name, ("train", "val"), directory, page, unpacked)
    with warnings.catch_warnings(action="ignore"):  # of tables of boxes beside the images
        return image_folder(folder, **options)


imagenet = partial(published, "imagenet", PAGE, "")
tiny_imagenet = partial(published, "tiny_imagenet", TINY_PAGE, "tiny-imagenet-200")


def read_image(path: Path, size: int, channels: int = 3, margin: float = MARGIN) -> np.ndarray:
    """Read an image, scale its shorter side to `size * margin`, and crop the centre.

    Args:
        path: a JPEG, PNG, BMP, WebP, PPM, GIF or TIFF file, with 8 or 16 bits per channel. Values
            of PPM and PGM files are scaled by the largest value that the file states.
        size: rows and columns of the result.
        channels: 3 for RGB, 1 for grey.
        margin: shorter side before the crop, relative to the crop.

    Returns:
        uint8 `[channels, size, size]`.

    Raises:
        DataError: the file is missing, damaged, of another format or type, or its sides differ by
            more than a factor of 100.
    """
    pillow = _pillow()
    try:
        check_regular(path)
        with pillow.open(path, formats=FORMATS) as image:
            if max(image.size) > MAX_ASPECT * min(image.size):  # would take gigabytes when scaled
                raise DataError(
                    f"{path} has {image.width} columns and {image.height} rows: expected a longer "
                    f"side of at most {MAX_ASPECT} times the shorter: crop it, or remove it"
                )
            scale = size * margin / min(image.size)
            width, height = (max(size, round(side * scale)) for side in image.size)
            mode = "L" if channels == 1 else "RGB"
            image.draft(mode, (width, height))  # decodes large JPEGs at reduced size
            # Pillow reads 16 bits of these formats in mode I, and scales PPM to the full range.
            has_16_bits = image.mode == "I" and image.format in ("PPM", "PNG")
            if image.mode.startswith("I;16") or has_16_bits:  # which Pillow would clip to 8 bits
                image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            elif image.mode in ("I", "F"):
                raise DataError(
                    f"{path} has pixels of another type than bytes and 16 bits without sign, such "
                    "as 32 bits: convert it to one of these, or remove it"
                )
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
