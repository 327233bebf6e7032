"""The data module splits the examples of a dataset, or takes those published for validation."""

from __future__ import annotations

import pytest
import torch

from spikefuse import data
from spikefuse.train import ConfigError, DataModule, TrainConfig

CONFIG = TrainConfig(model="mlp", num_steps=2, batch_size=256, epochs=2)


def test_the_data_module_splits_as_the_command_does() -> None:
    examples = DataModule(CONFIG)
    examples.setup("fit")
    rest, test = data.load("digits")
    assert len(examples.training) + len(examples.validation) == len(rest)
    assert torch.equal(examples.test.pixels, test.pixels)
    before = examples.training
    examples.setup("test")
    assert examples.training is before
    inputs, labels = next(iter(examples.train_dataloader()))
    assert (inputs.dtype, inputs.shape, labels.shape) == (torch.uint8, (256, 1, 8, 8), (256,))
    with pytest.raises(ConfigError, match="batch_size is 9999: digits has only 1295 training"):
        DataModule(TrainConfig(batch_size=9999)).setup()


def test_too_few_examples_to_hold_some_out(monkeypatch: pytest.MonkeyPatch) -> None:
    train_part, test = data.load("digits")
    for count, held_out in ((30, 3), (4, 0)):
        part = train_part[:count]
        monkeypatch.setattr(DataModule, "load", lambda self, part=part: (part, test))
        examples = DataModule(TrainConfig(batch_size=4))
        if held_out:
            examples.setup()
            assert (len(examples.training), len(examples.validation)) == (27, held_out)
        else:
            with pytest.raises(data.DataError, match="digits has 4 training examples, too few to"):
                examples.setup()


def test_published_validation_examples_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    train_part, test = data.load("digits")
    parts = train_part[:300], train_part[300:340], test
    monkeypatch.setattr(DataModule, "load", lambda self: parts)
    examples = DataModule(CONFIG)
    examples.setup()
    assert (len(examples.training), len(examples.validation)) == (300, 40)
    assert torch.equal(examples.training.pixels, parts[0].pixels)
    assert torch.equal(examples.test.labels, test.labels)
    wrong = data.Images(parts[1].pixels, parts[1].labels + 10)
    monkeypatch.setattr(DataModule, "load", lambda self: (parts[0], wrong, test))
    with pytest.raises(data.DataError, match="has read validation labels from 10 to 19"):
        DataModule(CONFIG).setup()
