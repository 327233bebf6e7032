"""Validation of configurations and its error messages."""

from __future__ import annotations

import inspect

import pytest
import torch

import spikefuse as sf
from spikefuse.train import ConfigError, TrainConfig
from spikefuse.train.choices import NEURONS, SURROGATES, UNITS
from spikefuse.train.conflicts import ignored_neuron

WRONG = [
    ({"dataset": "minst"}, "unknown dataset 'minst': did you mean mnist? choose one of digits, "),
    (
        {"dataset": "./my photos"},
        "unknown dataset './my photos': for images in a folder add --dataset folder --data-dir "
        "'./my photos' (for recordings --dataset events); choose one of",
    ),
    ({"size": 8}, "size is given, but digits has no such option: remove it"),
    ({"grey": True, "dataset": "events"}, "grey is given, but events has no such option: remove"),
    ({"frames": "voxel_grid"}, "frames is voxel_grid, but digits is not event data: remove it"),
    (
        {"dataset": "nmnist", "frames": "voxel_grid"},
        "frames is voxel_grid, but slicing is number: choose time",
    ),
    (
        {"dataset": "nmnist", "slice_events": 5},
        "slice_events is given, but slicing is number: remove it, or choose events",
    ),
    ({"dataset": "nmnist", "slicing": "events"}, "slicing is events, but slice_events is not giv"),
    ({"classes": ("a", "b")}, "classes is given, but digits has its own: remove it"),
    ({"dataset": "folder", "classes": ("a",)}, "classes are ('a',) and shape is None: damaged"),
    ({"dataset": "folder", "classes": ["a"]}, "classes is ['a']: expected a tuple"),
    ({"model": "perceiver"}, "unknown model 'perceiver': choose one of mlp, conv, resnet18"),
    ({"neuron": "LIF"}, "unknown neuron 'LIF': "),
    ({"neuron": "relu", "dataset": "nmnist"}, "dataset is nmnist, but the neuron relu does no"),
    (
        {"neuron": "relu", "encoding": "poisson"},
        "encoding is poisson, but the neuron relu does not",
    ),
    (
        {"neuron": "qcfs", "num_steps": 4},
        "num_steps is 4, but the neuron qcfs does not spike",
    ),
    (
        {"neuron": "relu", "model": "recurrent"},
        "model is recurrent, but the neuron relu does",
    ),
    ({"neuron": "relu", "threshold": 2.0}, "threshold is 2, but the neuron relu does not spike: r"),
    ({"neuron": "relu", "rate_penalty": 1.0}, "rate_penalty is given, but the neuron relu does no"),
    ({"neuron": "qcfs", "reset": "soft"}, "reset is given, but the neuron qcfs takes none: remov"),
    ({"encoding": 3}, "unknown encoding 3: choose one of direct, poisson"),
    (
        {"dataset": "nmnist", "encoding": "poisson"},
        "encoding is poisson, but nmnist has no images: remove it",
    ),
    ({"precision": "64"}, "unknown precision '64': choose one of 32, bf16, 16"),
    ({"num_steps": 0}, "num_steps is 0: expected a whole number of at least 1"),
    ({"num_steps": 2.0}, "num_steps is 2.0: expected a whole number"),
    ({"epochs": True}, "epochs is True: expected a whole number"),
    ({"epochs": "3"}, "epochs is '3': expected a whole number"),
    ({"lr": 0.0}, "lr is 0.0: expected a positive number"),
    ({"lr": float("nan")}, "lr is nan: expected a number"),
    ({"decay": 1.5}, "decay is 1.5: expected a number from 0 to 1"),
    ({"decay": 0.5, "neuron": "if"}, "decay is given, but the neuron if has none: remove it"),
    (
        {"decay": 0.5, "neuron": "adlif", "model": "recurrent", "dataset": "shd"},
        "decay is given, but the neuron adlif learns its own in recurrent: remove it",
    ),
    ({"decay": 1.0, "neuron": "plif"}, "decay is 1.0: expected a number between 0 and 1 for plif"),
    ({"decay": 0.5, "neuron": "qif"}, "decay is given, but the neuron qif has none: remove it"),
    (
        {"neuron": "gatedlif", "threshold": 1.0},
        "threshold is 1.0: expected a number between 0 and 1 for gatedlif",
    ),
    ({"neuron": "li"}, "unknown neuron 'li': did you mean lif? choose one of lif, if, plif, "),
    ({"threshold": -1}, "threshold is -1: expected a positive number"),
    ({"memory": "bit"}, "unknown memory 'bit': did you mean bits? choose one of save-all, recom"),
    ({"model": ["mlp"]}, "unknown model ['mlp']: choose one of mlp"),
    ({"dataset": {}}, "unknown dataset {}: choose one of digits"),
    ({"encoding": b"x" * 500}, "unknown encoding b'xxx"),
    ({"dataset": "events", "sensor": (346, 260)}, "sensor is (346, 260): expected a string"),
    ({"lr": [1]}, "lr is [1]: expected a number"),
    ({"lr": 10**400}, "lr is a number of 1329 bits: expected a number"),
    ({"lr": -(10**5000)}, "lr is a number of 16610 bits: expected a number"),
    ({"num_steps": 10**20}, f"num_steps is {10**20}: expected a whole number below 2147483648"),
    ({"num_steps": 10**5000}, "num_steps is a number of 16610 bits: expected a whole number below"),
    ({"seed": 10**400}, "seed is a number of 1329 bits: expected a whole number from 0 to"),
    ({"seed": -1}, "seed is -1: expected a whole number from 0 to"),
    ({"num_steps": 1, "batch_size": 1}, "num_steps and batch_size are both 1: "),
    ({"cuda_graph": 1}, "cuda_graph is 1: expected true or false"),
    ({"clip": 0.0}, "clip is 0.0: expected a positive number"),
    ({"tbptt": 0}, "tbptt is 0: expected a whole number of at least 1"),
    ({"tbptt": 1, "neuron": "relu"}, "tbptt is given, but the neuron relu does not spike: remove"),
    ({"tbptt": 9, "num_steps": 4}, "tbptt is 9: expected at most num_steps, 4"),
    ({"decay_all": True}, "decay_all is given, but weight_decay is 0: set it, or remove d"),
    ({"warmup": 20}, "warmup is 20: expected fewer than epochs, 20"),
    ({"step_epochs": 3}, "step_epochs is given, but schedule is constant: choose step"),
    (
        {"schedule": "linear"},
        "unknown schedule 'linear': choose one of constant, cosine, one-cycle",
    ),
    ({"ema": 1.0}, "ema is 1.0: expected a number above 0 and below 1"),
    ({"patience": 0}, "patience is 0: expected a whole number of at least 1"),
    ({"rate_penalty": -1.0}, "rate_penalty is -1.0: expected a number of at least 0"),
    ({"rate_penalty": 0.1, "neuron": "ternarylif"}, "rate_penalty is given, but the spikes of te"),
    (
        {"rate_penalty": 0.1, "model": "event-mlp", "encoding": "poisson"},
        "rate_penalty is given, but event-mlp has activity_weight: remove it",
    ),
    ({"cutout": 8}, "cutout is 8: expected less than the 8 rows or columns of digits"),
    ({"cutmix": 1.0, "batch_size": 1}, "cutmix is given, but batch_size is 1: remove it"),
    ({"label_smoothing": 1.0}, "label_smoothing is 1, which leaves nothing to learn"),
    ({"accumulate": 33}, "accumulate is 33: expected at most batch_size, 32"),
    (
        {"accumulate": 32, "tbptt": 7},
        "accumulate is 32 and tbptt 7, which leaves one step of one example: batch normalization",
    ),
    (
        {"cuda_graph": True, "precision": "16"},
        "cuda_graph is given, but the loss scaling of precision 16",
    ),
    ({"surrogate": "sigmod"}, "unknown surrogate 'sigmod': did you mean sigmoid? choose one of"),
    ({"surrogate": "erf", "neuron": "integerlif"}, "surrogate is given, but the neuron integerlif"),
    ({"reset": "soft", "neuron": "integerlif"}, "reset is given, but the neuron integerlif takes"),
    ({"reset": "none"}, "unknown reset 'none': choose one of hard, soft"),
    ({"slicing": "number"}, "slicing is given, but digits is not event data"),
    ({"slice_us": 5}, "slice_us is given, but digits is not event data"),
    (
        {"dataset": "nmnist", "slice_us": 5},
        "slice_us is given, but slicing is number: remove it, or choose duration",
    ),
    (
        {"dataset": "shd", "model": "mlp", "slicing": "time", "slice_us": 5},
        "slice_us is given, but slicing is time: remove it, or choose duration",
    ),
    (
        {"dataset": "nmnist", "slicing": "duration"},
        "slicing is duration, but nmnist has no default duration: set slice_us",
    ),
    ({"slicing": "halves"}, "unknown slicing 'halves': choose one of number, events, "),
    ({"dataset": "shd"}, "model is conv, but shd is one-dimensional: choose mlp or recurrent"),
    ({"dataset": "shd", "shift": 1}, "shift is given, but shd has no rows and columns"),
    ({"dataset": "shd", "flip": True}, "flip is given, but shd has no rows and columns"),
    ({"dataset": "shd", "model": "mlp", "cutmix": 1.0}, "cutmix is given, but shd has no rows and"),
    ({"dataset": "shd", "model": "mlp", "erase": 0.5}, "erase is given, but shd has no rows and"),
    ({"dataset": "nmnist", "erase": 0.5}, "erase is given, but nmnist has no images: remove it"),
    ({"drop_events": True}, "drop_events is given, but digits is not event data: remove it"),
    (
        {"dataset": "nmnist", "model": "event-mlp", "drop_events": True},
        "drop_events is given, but event-mlp reads packed frames: remove it",
    ),
    ({"mixup": -0.5}, "mixup is -0.5: expected a number of at least 0"),
    ({"shift": 9}, "shift is 9: expected a whole number from 0 to 8"),
]


@pytest.mark.parametrize(("values", "message"), WRONG)
def test_wrong_values(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**values)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_round_trip() -> None:
    config = TrainConfig(neuron="plif", decay=0.3, seed=5)
    assert TrainConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="unknown setting 'colour'"):
        TrainConfig.from_dict({"colour": "red"})


def test_event_datasets_have_their_own_defaults() -> None:
    config = TrainConfig(dataset="nmnist")
    assert (config.num_steps, config.shift) == (32, 1)
    assert config.transform() == {"num_steps": 32}
    config = TrainConfig(dataset="shd", model="mlp", num_steps=20, slicing="duration", slice_us=9)
    assert (config.num_steps, config.shift) == (20, 0)
    assert config.transform() == {"num_steps": 20, "by": "duration", "dt": 9}
    assert config.make_network()(torch.zeros(20, 2, 700)).shape == (20, 2, 20)
    assert TrainConfig().num_steps == 8
    assert TrainConfig().transform() == {}


@pytest.mark.parametrize("name", NEURONS)
def test_neurons_get_their_parameters(name: str) -> None:
    has_decay = "decay" in inspect.signature(NEURONS[name]).parameters
    decay = 0.25 if has_decay else None
    neuron = TrainConfig(neuron=name, threshold=0.75, decay=decay).make_neuron()
    assert type(neuron) is NEURONS[name]
    assert isinstance(neuron, sf.Neuron)
    values = neuron.values()
    expected = {"threshold": 0.75} | ({"decay": 0.25} if has_decay else {})
    found = {key: torch.as_tensor(values[key]).detach().item() for key in expected}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", UNITS)
def test_neurons_have_their_own_defaults(name: str) -> None:
    config = TrainConfig(neuron=name)
    made = config.make_neuron()
    if name in NEURONS:
        assert isinstance(made, sf.Neuron)
        default = NEURONS[name]()
        assert isinstance(default, sf.Neuron)
        torch.testing.assert_close(made.values(), default.values())
    assert not list(ignored_neuron(TrainConfig(neuron="lif", threshold=1.0)))
    assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", SURROGATES)
def test_binary_neurons_take_every_surrogate(name: str) -> None:
    for neuron in NEURONS:
        if neuron in ("integerlif", "stochasticlif"):  # which have derivatives of their own
            continue
        made = TrainConfig(neuron=neuron, surrogate=name).make_neuron()
        assert type(made.surrogate) is SURROGATES[name]


def test_resets() -> None:
    neuron = TrainConfig(neuron="lif", reset="soft", detach_reset=True).make_neuron()
    assert (neuron.reset, neuron.detach_reset) == ("soft", True)
    assert TrainConfig(neuron="adlif").make_neuron().reset == "soft"
    assert TrainConfig(neuron="clif", detach_reset=True).make_neuron().detach_reset
    for given, expected in ((None, True), (False, False)):
        delayed = TrainConfig(neuron="delayedresetlif", detach_reset=given).make_neuron()
        assert delayed.detach_reset is expected


def test_neurons_are_the_spiking_models() -> None:
    assert list(NEURONS)[:4] == ["lif", "if", "plif", "alif"]
    models = {
        n for n, kind in vars(sf).items() if inspect.isclass(kind) and hasattr(kind, "states")
    }
    without_threshold = {"li", "neuron", "shorttermplasticity", "slidingpsn"}
    assert set(NEURONS) == {name.lower() for name in models} - without_threshold


def test_memory_sets_the_policy_of_the_network():
    assert TrainConfig().make_network().memory == sf.memory.Recompute()
    assert TrainConfig(memory="save-all").make_network().memory == sf.memory.SaveAll()
    assert TrainConfig(memory="checkpoint").make_network().memory == sf.memory.Checkpoint()


def test_models_that_do_not_suit_a_size() -> None:
    config = TrainConfig(dataset="folder", size=2, shape=(3, 2, 2), classes=("cat", "dog"))
    with pytest.raises(ConfigError, match=r"model is conv, but folder does not .* at least \(4, 4"):
        config.make_network()


def test_replaced_settings() -> None:
    """Defaults follow the other settings; what was given stays, also after reading files."""
    config = TrainConfig(schedule="step", epochs=30)
    assert config.replaced(epochs=3) == TrainConfig(schedule="step", epochs=3)
    assert config.replaced(step_epochs=5, epochs=3).step_epochs == 5
    digits = TrainConfig().data
    config = TrainConfig(dataset="folder", num_steps=2).with_files_of(digits)
    assert (config.classes, config.shape) == (digits.classes, digits.shape)
    assert config.replaced(optimizer="adamw").weight_decay == 0.01
    assert config.replaced(dataset="nmnist", classes=None, shape=None).num_steps == 2
    one_cycle = config.replaced(schedule="one-cycle", epochs=6)
    assert (one_cycle.warmup, one_cycle.epochs) == (pytest.approx(1.8), 6)
