"""Load trained networks from checkpoints, and classify files with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from spikefuse.data import DataError, read_file
from spikefuse.data.registry import file_endings
from spikefuse.train import batches, checkpoint
from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError
from spikefuse.train.optimize import readout
from spikefuse.train.seeding import Purpose, reseed


class TrainedNetwork(nn.Module):
    """A trained network with the preprocessing of its training, for uint8 inputs of its dataset.

    Images are divided by 255 and encoded over T time steps, directly or by Poisson spikes, as in
    training. Event frames are passed as counts, spectra of sounds as levels from 0 to 1. The logits
    are the mean of the outputs over time or, after training with the loss "last", the last output.
    Nothing is augmented. Poisson spikes are drawn from PyTorch's default generator.

    Attributes:
        net: the network without preprocessing, a `Temporal` `[T, B, ...] -> [T, B, classes]`.
        classes: name of each class, in the order of the logits.
        config: settings of the run.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.config, self.net = config, config.make_network()
        self.classes = config.data.classes

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the logits of a batch, float32 `[B, classes]`; `softmax(1)` gives probabilities.

        The batch is moved to the device of the network.

        Args:
            inputs: uint8 images `[B, C, H, W]`, from 0 to 255, or uint8 event frames `[B, T, ...]`,
                such as the `pixels` of a dataset's batch, or `read(path)`.

        Raises:
            ValueError: `inputs` have another dtype or shape.
        """
        dataset = self.config.data
        before = ("B", "T") if dataset.kind == "events" else ("B",)
        fits = inputs.ndim == len(before) + len(dataset.shape)
        if not fits or inputs.shape[len(before) :] != dataset.shape or inputs.dtype != torch.uint8:
            shape = ", ".join(map(str, (*before, *dataset.shape)))
            raise ValueError(
                f"inputs are {inputs.dtype} {list(inputs.shape)}: expected torch.uint8 [{shape}], "
                f"as {self.config.dataset} has; other inputs can be passed to .net, encoded"
            )
        inputs = inputs.to(next(self.net.parameters()).device)
        return readout(self.net(batches.encode(inputs, self.config)), self.config.loss)

    def read(self, path: str | os.PathLike[str]) -> Tensor:
        """Read all examples in a file as a batch for `forward`, on the CPU.

        See `spikefuse.data.read_file` for the formats, and for how an image is scaled.

        Raises:
            DataError: the file is missing or damaged.
        """
        return torch.from_numpy(np.stack(list(self.examples(Path(path)))))

    def examples(self, path: Path) -> Iterator[np.ndarray]:
        """Read the examples in a file one by one."""
        return read_file(self.config.data, path, **self.config.transform())


def load(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    model: str | None = None,
    dataset: str | None = None,
) -> TrainedNetwork:
    """Load a network that `spikefuse train` has trained, in evaluation mode.

    Example::

        net = sf.load("runs/digits-conv-1/best.ckpt")
        logits = net(net.read("three.png"))

    The settings in the checkpoint rebuild the network; no code in the file is executed. If the run
    had your own model or dataset, name it again: a file could name any module, and importing a
    module executes it.

    Args:
        path: `best.ckpt` or `last.ckpt` of a run, or its folder, for `best.ckpt`.
        device: where the network goes; "auto" is CUDA if available.
        model: your own model, "module:builder", found from the working directory.
        dataset: your own dataset, "module:dataset".

    Raises:
        ConfigError: a `ValueError` that names the file: it is missing, damaged, not a checkpoint of
            spikefuse, or saved by a newer version; it has a model or dataset that is not given; or
            there is no such device.
    """
    device = find_device(device)
    file = checkpoint.in_folder(Path(path).expanduser(), checkpoint.BEST)
    loaded = checkpoint.load(file, {"model": model, "dataset": dataset})
    with torch.random.fork_rng(devices=[]):  # the initial weights are overwritten
        network = TrainedNetwork(loaded.config)
    checkpoint.load_weights(network, loaded)
    return network.to(device).eval()


def find_device(device: str | torch.device) -> torch.device:
    """Return a device; "auto" is CUDA if available.

    Raises:
        ConfigError: there is no CUDA GPU, and the device is one.
    """
    cuda = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and not cuda:
        raise ConfigError("device is cuda, but PyTorch finds no CUDA GPU: choose auto or cpu")
    return device


class Prediction(NamedTuple):
    """One class of one example; `file` ends in [i] if the file has several examples."""

    file: str
    label: str
    probability: float


def find_files(network: TrainedNetwork, paths: Iterable[Path]) -> list[Path]:
    """Replace folders by the files in them, recursively; folders without any are not replaced."""
    endings, files = file_endings(network.config.data), []
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() else []
        files += [p for p in inside if p.suffix.lower() in endings and p.is_file()] or [path]
    return files


def read_examples(
    network: TrainedNetwork, files: Iterable[Path], report: Callable[[str], None]
) -> Iterator[tuple[str, Tensor]]:
    """Read the examples of files with their names, and report files that cannot be read."""
    for path in files:
        try:
            if path.is_dir():
                endings = ", ".join(sorted(file_endings(network.config.data)))
                raise DataError(f"{path} has no file that ends in {endings}")
            examples = network.examples(path)
            first = list(islice(examples, 2))
            for i, example in enumerate(chain(first, examples)):
                yield f"{path}[{i}]" if len(first) > 1 else str(path), torch.from_numpy(example)
        except (DataError, OSError) as error:
            report(str(error))


def classify(
    network: TrainedNetwork, examples: Iterator[tuple[str, Tensor]], batch_size: int, top: int
) -> Iterator[Prediction]:
    """Yield the `top` most probable classes of each example, the most probable first.

    Poisson spikes depend on the seed of the run, the batch size and the position of an example.
    """
    for number in count():
        batch = list(islice(examples, batch_size))
        if not batch:
            return
        reseed(network.config.seed, Purpose.EVALUATION, number)
        with torch.no_grad():
            logits = network(torch.stack([example for _, example in batch]))
        chosen = logits.softmax(1).topk(min(top, len(network.classes)))
        rows = zip(batch, chosen.values.tolist(), chosen.indices.tolist(), strict=True)
        for (name, _), probabilities, labels in rows:
            for probability, label in zip(probabilities, labels, strict=True):
                yield Prediction(name, network.classes[label], probability)
