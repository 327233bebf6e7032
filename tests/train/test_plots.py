"""The raster shows what the network computes."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest
import torch
from torch import nn

import spikefuse as sf
from spikefuse.data import DATASETS, Dataset
from spikefuse.train import plots
from spikefuse.train.config import TrainConfig
from spikefuse.train.plots import plot_curves, plot_raster, record_example
from spikefuse.train.training_module import TrainingModule

pytestmark = pytest.mark.usefixtures("drawn")


def test_record_sees_every_layer() -> None:
    module = TrainingModule(TrainConfig(num_steps=5, threshold=0.3)).eval()
    pixels = torch.randint(0, 256, (1, 1, 8, 8), dtype=torch.uint8)
    x, spikes, output = record_example(module, pixels)
    assert x.shape == (5, 1, 8, 8)
    assert {name: s.shape for name, s in spikes.items()} == {
        "2": (5, 32, 8, 8),
        "6": (5, 64, 4, 4),
    }
    for layer in spikes.values():
        assert set(layer.unique().tolist()) == {0.0, 1.0}
    with torch.no_grad():
        assert torch.equal(output.mean(0), module(pixels)[0])
    assert not any(n._forward_hooks for n in module.net.neurons().values())
    plain = TrainingModule(TrainConfig(num_steps=5, threshold=0.3, fuse=False)).eval()
    for name, layer in record_example(plain, pixels)[1].items():
        assert torch.equal(layer, spikes[name])


def test_names_without_a_font(tmp_path: Path) -> None:
    settings = {"dataset": "folder", "classes": ("日本", "b"), "shape": (1, 4, 4), "grey": True}
    module = TrainingModule(TrainConfig(model="mlp", num_steps=2, fuse=False, **settings)).eval()
    pixels = torch.randint(0, 256, (1, 1, 4, 4), dtype=torch.uint8)
    plot_raster(module, pixels, torch.tensor(0), tmp_path / "raster.png")


@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_raster_of_any_depth(tmp_path: Path, model: str) -> None:
    module = TrainingModule(TrainConfig(num_steps=3, model=model)).eval()
    path = tmp_path / "raster.png"
    plot_raster(module, torch.full((1, 1, 8, 8), 200, dtype=torch.uint8), torch.tensor(3), path)
    assert matplotlib.image.imread(path).std() > 0.01


def test_potentials_have_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = TrainingModule(TrainConfig(num_steps=3, model="mlp")).eval()
    layers = {"0": torch.tensor([[1.0, -1.0], [0.0, 0.0]]), "1": torch.tensor([[-0.3]])}
    example = torch.zeros(3, 1, 8, 8), layers, torch.zeros(3, 10)
    monkeypatch.setattr(plots, "record_example", lambda *_: example)
    shown = []
    monkeypatch.setattr(plots, "raster", lambda x, axes, title: shown.append(title))
    plot_raster(module, torch.zeros(1), torch.tensor(3), tmp_path / "raster.png")
    assert shown == ["0: 2 neurons, 50.0 % firing", "1: 1 neuron, potentials"]


def test_a_silent_readout_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(TrainingModule):
        def make_network(self) -> sf.Temporal:
            return sf.Temporal(nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False), sf.LI()))

    module, shown = Own(TrainConfig(num_steps=3)).eval(), []
    monkeypatch.setattr(plots, "raster", lambda x, axes, title: shown.append(title))
    plot_raster(
        module, torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.tensor(3), tmp_path / "raster.png"
    )
    assert shown == ["2: 10 neurons, potentials"]


@pytest.mark.parametrize(("loss", "predicted"), [("mean", 1), ("last", 2)])
def test_the_predicted_class_is_that_of_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, predicted: int
) -> None:
    module = TrainingModule(TrainConfig(num_steps=2, model="mlp", loss=loss)).eval()
    output = torch.zeros(2, 10)
    output[0, 1], output[1, 2] = 3.0, 1.0
    example = torch.zeros(2, 1, 8, 8), {}, output
    monkeypatch.setattr(plots, "record_example", lambda *_: example)
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    plot_raster(module, torch.zeros(1), torch.tensor(3), tmp_path / "raster.png")
    assert figures[0].get_suptitle() == f"class: 3, predicted: {predicted}"
    (image,) = figures[0].axes[1].images
    assert int(image.get_array()[:, -1].argmax()) == predicted
    last = "output (its last step is the prediction)"
    assert figures[0].axes[1].get_title() == {"last": last}.get(loss, "running mean of the output")


@pytest.mark.parametrize("loss", ["mean", "every", "last"])
def test_values_end_in_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    waves = Dataset((1,), ("rate",), lambda *_: (), "series", {"num_steps": 3})
    monkeypatch.setitem(DATASETS, "waves", waves)
    config = TrainConfig(dataset="waves", task="regression", model="mlp", loss=loss)
    module = TrainingModule(config).eval()
    output = torch.tensor([[4.0], [1.0], [1.0]])
    monkeypatch.setattr(plots, "record_example", lambda *_: (torch.zeros(3, 1), {}, output))
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    plot_raster(module, torch.zeros(1), torch.tensor([2.0]), tmp_path / "raster.png")
    values, target = figures[0].axes[1].lines
    assert values.get_ydata()[-1] == module.task.predict(output[:, None]).item()
    assert [*target.get_ydata()] == [2.0, 2.0, 2.0]
    shown = "output (its last step is the prediction)", "running mean of the output"
    assert figures[0].axes[1].get_title() == f"{shown[loss != 'last']}, and target (dashed)"
    assert figures[0].axes[0].get_ylabel() == "units"


def test_curves_of_a_single_epoch(tmp_path: Path) -> None:
    names = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")
    plot_curves([{"epoch": 1, **dict.fromkeys(names, 0.5)}], tmp_path / "curves.png")
    assert matplotlib.image.imread(tmp_path / "curves.png").std() > 0.01
