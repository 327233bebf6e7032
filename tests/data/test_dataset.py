"""The description of a dataset."""

from __future__ import annotations

import pytest

from spikefuse.data import DataError, Dataset


def test_names_of_classes() -> None:
    def read(*_: object) -> tuple[()]:
        return ()

    with pytest.raises(DataError, match="classes is empty: name each label, or each value"):
        Dataset((1, 2, 2), (), read)
    with pytest.raises(ValueError, match="classes has 'cat' twice: give each class a name"):
        Dataset((1, 2, 2), ("dog", "cat", "fox", "cat"), read)
    described = Dataset((1, 2, 2), (), read, describe=lambda directory: described)
    assert described.classes == ()
