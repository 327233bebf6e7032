"""Train a network of your own with Lightning: its network, data, loss and optimizer.

python examples/own_network.py --epochs 10
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

import spikefuse as sf
from spikefuse.data import Examples, Images
from spikefuse.train import DataModule, TrainConfig, TrainingModule


class NoisyDigits(DataModule):
    """The digits of scikit-learn, with noise on the training images."""

    def load(self) -> tuple[Examples, ...]:
        train, test = super().load()
        noise = torch.randint(0, 32, train.pixels.shape, dtype=torch.uint8)
        return Images(train.pixels // 8 * 7 + noise, train.labels), test


class OwnModule(TrainingModule):
    def make_network(self) -> sf.Temporal:
        """Two convolutions with a shortcut around the second."""
        return sf.fuse(sf.Temporal(Net()))

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The squared distance of the mean output to the one-hot class."""
        return F.mse_loss(outputs.mean(0), F.one_hot(labels, 10).float())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RAdam(self.parameters(), lr=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(  # recorded steps need constant momentum
            optimizer, 1e-2, steps, cycle_momentum=False
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Net(nn.Module):
    """For one time step: `[B, 1, 8, 8]` to `[B, 10]`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.neuron1, self.neuron2 = sf.LIF(), sf.LIF()
        self.head = nn.Linear(16 * 8 * 8, 10)

    def forward(self, x: Tensor) -> Tensor:
        first = self.neuron1(self.norm1(self.conv1(x)))
        second = self.neuron2(self.norm2(self.conv2(first)) + first)
        y: Tensor = self.head(second.flatten(1))
        return y


def main(epochs: int, folder: str) -> dict[str, float]:
    """Train, and return the metrics of the test."""
    config = TrainConfig(dataset="digits", num_steps=4, batch_size=64, epochs=epochs)
    best = ModelCheckpoint(monitor="val_accuracy", mode="max")
    trainer = pl.Trainer(
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=[best, EarlyStopping(monitor="val_accuracy", mode="max", patience=5)],
        devices=1,
    )
    data = NoisyDigits(config)
    trainer.fit(OwnModule(config), datamodule=data)
    module = OwnModule.load_from_checkpoint(best.best_model_path, config=config)
    return dict(trainer.test(module, datamodule=data)[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default=".")
    main(**vars(parser.parse_args()))
