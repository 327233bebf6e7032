"""Handwritten digits that come with scikit-learn: 1797 images of 8 x 8 pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from spikefuse.data.errors import DataError
from spikefuse.data.images import Examples, Images, split

TEST_FRACTION = 0.2
# Fixed, so that every run, whatever its seed, holds out the same test images.
TEST_SEED = 0
LEVELS = 16  # pixels are published as 0 to 16


def load_digits(directory: Path, download: bool) -> tuple[Examples, Examples]:
    """Training and test images; the test split is a stratified fifth, the same in every run.

    The images come with scikit-learn, so both arguments are ignored.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, 1998 (its test part).
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError(
            'digits comes with scikit-learn, which is not installed: pip install "spikefuse[train]"'
        ) from error
    values, labels = datasets.load_digits(return_X_y=True)
    pixels = np.rint(values * (255 / LEVELS)).astype(np.uint8).reshape(-1, 1, 8, 8)
    images = Images(torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)))
    return split(images, TEST_FRACTION, TEST_SEED)
