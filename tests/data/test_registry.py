"""The registry describes every dataset consistently."""

from __future__ import annotations

import pytest

from spikefuse import data


def test_an_unknown_name() -> None:
    with pytest.raises(data.DataError, match="unknown dataset 'minst': choose one of digits"):
        data.load("minst")


@pytest.mark.parametrize("name", data.DATASETS)
def test_shape_and_classes(name: str) -> None:
    dataset = data.DATASETS[name]
    numbers = {"imagenet": 1000, "dvs_gesture": 11, "shd": 20, "ssc": 35}
    numbers |= {"cifar100": 100, "cifar100_coarse": 20, "tiny_imagenet": 200, "ncaltech101": 101}
    numbers |= {"speech_commands": 35, "folder": 0, "events": 0}
    assert len(set(dataset.classes)) == len(dataset.classes) == numbers.get(name, 10)
    assert len(dataset.shape) == (1 if name in ("shd", "ssc", "speech_commands") else 3)
    if dataset.kind == "events":
        own = {"sensor", "size", "seed"} if name == "events" else set()
        slicing = {k: v for k, v in dataset.transform.items() if k not in own}
        assert vars(data.Slicing(**slicing)) == slicing


@pytest.mark.parametrize(
    ("name", "option", "options"),
    [
        ("mnist", "num_steps", "none"),
        ("nmnist", "steps", "by, num_steps, .*, content"),
    ],
)
def test_an_unknown_option(name: str, option: str, options: str) -> None:
    with pytest.raises(data.DataError, match=f"has no option '{option}': .* {options}$"):
        data.load(name, "nowhere", **{option: 3})
