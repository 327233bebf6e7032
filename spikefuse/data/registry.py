"""The data sets by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spikefuse.data.digits import load_digits
from spikefuse.data.errors import DataError
from spikefuse.data.files import default_directory
from spikefuse.data.images import Images
from spikefuse.data.mnist import load_fashion_mnist, load_mnist

DIGITS = tuple("0123456789")
CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


@dataclass(frozen=True)
class Dataset:
    """What is known of a data set before it is read.

    Args:
        shape: of one image, (C, H, W).
        classes: name of each label.
        read: (directory, download) to (training images, test images).
    """

    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    read: Callable[[Path, bool], tuple[Images, Images]]


DATASETS: dict[str, Dataset] = {
    "digits": Dataset((1, 8, 8), DIGITS, load_digits),
    "mnist": Dataset((1, 28, 28), DIGITS, load_mnist),
    "fashion_mnist": Dataset((1, 28, 28), CLOTHES, load_fashion_mnist),
}


def load(
    name: str, directory: str | Path | None = None, download: bool = False
) -> tuple[Images, Images]:
    """Training and test images of a data set.

    Args:
        name: one of `DATASETS`.
        directory: where its files lie, or are put by a download; by default $SPIKEFUSE_DATA, or
            else a folder in the user's cache.
        download: fetch the files that are missing, with checksum and progress bar.

    Raises:
        DataError: no such data set; a file is missing or damaged; the download failed.
    """
    if name not in DATASETS:
        raise DataError(f"unknown data set {name!r}: choose one of {', '.join(DATASETS)}")
    place = default_directory() if directory is None else Path(directory).expanduser()
    return DATASETS[name].read(place, download)
