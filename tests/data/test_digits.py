"""The digits of scikit-learn, as this library splits them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from sklearn import datasets

from spikefuse import data


def test_digits_equal_those_of_scikit_learn() -> None:
    train, test = data.load("digits")
    values, labels = datasets.load_digits(return_X_y=True)
    assert len(train) + len(test) == len(labels)
    assert train.pixels.dtype == torch.uint8
    assert train.pixels.shape[1:] == data.DATASETS["digits"].shape
    assert train.pixels.max() == 255
    published = {(v.astype(int).tobytes(), y) for v, y in zip(values, labels, strict=True)}
    for images in (train, test):
        levels = np.rint(images.pixels.flatten(1).numpy() * (16 / 255)).astype(int)
        ours = zip(levels, images.labels.numpy(), strict=True)
        assert all((v.tobytes(), y) in published for v, y in ours)


def test_the_test_split_never_changes() -> None:
    test = data.load("digits")[1]
    assert test.labels.bincount().tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    weights = torch.arange(1, test.pixels.numel() + 1).view_as(test.pixels) % 8191
    assert int((test.pixels * weights).sum()) == 6880201012


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(data.DataError, match=r'pip install "spikefuse\[train\]"'):
        data.load("digits")
