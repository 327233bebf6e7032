"""Handwritten digits from scikit-learn: 1797 images of 8 x 8 pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from spikefuse.data.files import not_installed
from spikefuse.data.images import Examples, Images, split

TEST_FRACTION = 0.2
# Fixed, so that runs with any seed hold out the same test images.
TEST_SEED = 0
LEVELS = 16  # pixels are published as 0 to 16


def load_digits(directory: Path, download: bool) -> tuple[Examples, Examples]:
    """Load training and test images; the test set is a fixed, stratified fifth.

    The images are part of scikit-learn, so both arguments are ignored.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, 1998 (its test part).
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise not_installed("digits", "scikit-learn", "train") from error
    values, labels = datasets.load_digits(return_X_y=True)
    pixels = np.rint(values * (255 / LEVELS)).astype(np.uint8).reshape(-1, 1, 8, 8)
    images = Images(torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)))
    return split(images, TEST_FRACTION, TEST_SEED)
