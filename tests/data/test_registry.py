"""Every registered data set has what the registry promises."""

from __future__ import annotations

import pytest

from spikefuse import data


def test_an_unknown_name() -> None:
    with pytest.raises(data.DataError, match="unknown data set 'minst': choose one of digits"):
        data.load("minst")


@pytest.mark.parametrize("name", data.DATASETS)
def test_shape_and_classes(name: str) -> None:
    dataset = data.DATASETS[name]
    assert len(dataset.shape) == 3
    assert len(set(dataset.classes)) == len(dataset.classes) == 10
