"""Load trained networks, apply them to files and evaluate them, without Lightning."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spikefuse import isolated
from spikefuse.data import DataError, Examples, read_file
from spikefuse.data.files import files_below
from spikefuse.data.registry import file_endings
from spikefuse.train import batches, checkpoint, own
from spikefuse.train.batches import EvalBatches
from spikefuse.train.checkpoint import LoadedRun
from spikefuse.train.config import RunOptions, TrainConfig
from spikefuse.train.fields import ConfigError
from spikefuse.train.output import progress
from spikefuse.train.processes import Processes
from spikefuse.train.seeding import Purpose, reseed
from spikefuse.train.tasks import Totals

DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}
# Input values per CPU thread and training step (time steps × batch × input size).
VALUES_PER_THREAD = 1 << 15


class TrainedNetwork(nn.Module):
    """A trained network with the preprocessing of its training, for inputs of its dataset.

    Images are divided by 255 and encoded over T time steps, directly or by Poisson spikes, as in
    training. Event frames are passed as counts, spectra of sounds as levels from 0 to 1, series as
    they are. The predictions are the mean of the outputs over time, after training with the loss
    "last" the last output, or of sequences the output of each step. Nothing is augmented. Poisson
    spikes are drawn from PyTorch's default generator.

    Attributes:
        net: the network without preprocessing, a `Temporal` `[T, B, ...] -> [T, B, classes]`.
        classes: name of each class, or of each value, in the order of the outputs.
        config: settings of the run.
        task: what the run has learned.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.config, self.task, self.net = config, config.make_task(), config.make_network()
        self.classes = config.data.classes

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the predictions of a batch, float32, on the device of the network.

        They are logits `[B, classes]`, of which `softmax(1)` gives probabilities, or values
        `[B, K]`; of sequences, either for each step, `[B, T, ...]`.

        Args:
            inputs: uint8 images `[B, C, H, W]`, from 0 to 255, uint8 event frames or float32 series
                `[B, T, ...]` of any T, such as the `pixels` of a dataset's batch, or `read(path)`.

        Raises:
            ValueError: `inputs` have another dtype or shape.
        """
        dataset, dtype = self.config.data, self.config.example[0]
        before = ("B",) if dataset.kind == "images" else ("B", "T")
        fits = inputs.ndim == len(before) + len(dataset.shape)
        if not fits or inputs.shape[len(before) :] != dataset.shape or inputs.dtype != dtype:
            shape = ", ".join(map(str, (*before, *dataset.shape)))
            raise ValueError(
                f"inputs are {inputs.dtype} {list(inputs.shape)}: expected {dtype} [{shape}], "
                f"as {self.config.dataset} has; other inputs can be passed to .net, encoded"
            )
        inputs = inputs.to(next(self.net.parameters()).device)
        return self.task.predict(self.net(batches.encode(inputs, self.config)))

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
        path: `best.ckpt` or `last.ckpt` of a run, or its folder, for `best.ckpt`; or the name of a
            network that comes with spikefuse, such as "digits-conv", see docs/models.md.
        device: where the network goes; "auto" is CUDA if available.
        model: your own model, "module:builder", found from the working directory.
        dataset: your own dataset, "module:dataset".

    Raises:
        ConfigError: a `ValueError` that names the file: it is missing, damaged, not a checkpoint of
            spikefuse, or saved by a newer version; it has a model or dataset that is not given; or
            there is no such device.
    """
    device = find_device(device)
    loaded = checkpoint.load(Path(path).expanduser(), {"model": model, "dataset": dataset})
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


def device_of(name: str, precision: str, processes: Processes) -> torch.device:
    """Return the device of this process.

    Raises:
        ConfigError: there is none for each process, or it does not compute in this precision.
    """
    device = find_device(name)
    if device.type == "cpu":
        if precision == "16":
            raise ConfigError("precision is 16, which needs a CUDA GPU: choose bf16 or 32")
        return device
    if processes.count == 1:
        return torch.device("cuda", torch.cuda.current_device())
    if processes.local_count > torch.cuda.device_count():
        raise ConfigError(
            f"{processes.local_count} processes on this machine, but {torch.cuda.device_count()} "
            "GPUs: start fewer with torchrun, or choose --device cpu"
        )
    return torch.device("cuda", processes.local_rank)


def find_files(network: TrainedNetwork, paths: Iterable[Path]) -> list[Path]:
    """Replace folders by the files in them, recursively; folders without any are not replaced."""
    endings = file_endings(network.config.data)
    return [file for path in paths for file in files_below(path, endings) or [path]]


def read_examples(
    network: TrainedNetwork, files: Iterable[Path], report: Callable[[str], None]
) -> Iterator[tuple[str, Tensor]]:
    """Read the examples of files with their names, and report files that cannot be read."""
    with isolated.one_process():
        for path in files:
            try:
                if path.is_dir():
                    endings = ", ".join(sorted(file_endings(network.config.data)))
                    raise DataError(f"{path} has no file that ends in {endings}")
                examples = network.examples(path)
                first = list(islice(examples, 2))
                for i, example in enumerate(chain(first, examples)):
                    name = f"{path}[{i}]" if len(first) > 1 else str(path)
                    expected = network.config.data.shape
                    if (shape := example.shape[-len(expected) :]) != expected:
                        raise DataError(
                            f"{name} has the shape {list(shape)}, and the examples of the run "
                            f"{list(expected)}: is it of another sensor?"
                        )
                    yield name, torch.from_numpy(example)
            except DataError as error:
                report(str(error))
            except Exception as error:  # of a user's own reader
                report(f"{path}: {type(error).__name__}: {' '.join(str(error).split())}")


def predict(
    network: TrainedNetwork, examples: Iterator[tuple[str, Tensor]], batch_size: int, top: int
) -> Iterator[tuple[Any, ...]]:
    """Yield each of the `Task.rows` of each example, behind the name of the example.

    Poisson spikes depend on the seed of the run, the batch size and the position of an example.
    """
    for number in count():
        batch = list(islice(examples, batch_size))
        if not batch:
            return
        reseed(network.config.seed, Purpose.EVALUATION, number)
        with torch.no_grad():
            predictions = network(torch.stack([example for _, example in batch])).cpu()
        for (name, _), prediction in zip(batch, predictions, strict=True):
            for row in network.task.rows(prediction, network.classes, top):
                yield name, *row


# Evaluation


def evaluate_checkpoint(loaded: LoadedRun, options: RunOptions) -> dict[str, float]:
    """Return the loss and the metrics of a checkpoint on the test examples of its dataset.

    Processes that torchrun started share each batch; all of them return the same.

    Warns:
        UserWarning: the dataset has other training examples than the run.

    Raises:
        ConfigError, DataError: a setting or a file is invalid.
    """
    processes = Processes.started()
    device = device_of(options.device, loaded.config.precision, processes)
    with processes.connected(device):
        with processes.local_main_first():
            config, parts = batches.load_examples(loaded.config, options.data_dir, options.download)
        own.check_examples(config, parts)
        before, now = loaded.labels, batches.checksums(parts)
        if processes.main and before is not None and before[0] != now[0]:
            warnings.warn(
                f"the training examples of {config.dataset}, or their labels, have changed since "
                "the run: where the test is drawn from all examples, the run may have learned some "
                "of it",
                stacklevel=2,
            )
        network = TrainedNetwork(config)
        checkpoint.load_weights(network, loaded)
        return evaluate(network.net.to(device), parts[-1], config, device, processes)


def evaluate(
    net: nn.Module,
    examples: Examples,
    config: TrainConfig,
    device: torch.device,
    processes: Processes,
) -> dict[str, float]:
    """Return the loss and the metrics of a network on examples, in evaluation mode.

    All processes of the run must call this.

    Args:
        net: the `Temporal`, on the device.
    """
    net.eval()
    task, precision = config.make_task(), config.precision
    totals = Totals(task)
    steps = EvalBatches(examples, config.batch_size, device, config.on_events)
    autocast = torch.autocast(device.type, DTYPES[precision], enabled=precision != "32")
    with threads(config), torch.no_grad(), autocast:
        for index, (inputs, labels) in enumerate(progress(steps, "test", processes.main)):
            reseed(config.seed, Purpose.EVALUATION, index)
            share = processes.share(len(labels))
            # The last batch may have fewer samples than there are processes.
            if len(labels[share]):
                outputs = net(batches.encode(inputs, config, share))
                totals.add(task.predict(outputs), labels[share])
    return totals.reduced(processes, device).mean()


@contextlib.contextmanager
def threads(config: TrainConfig) -> Iterator[None]:
    """Limit the number of CPU threads to the work of a step.

    Small steps gain little from more threads. On a busy machine, where threads wait for each other,
    they become many times slower.
    """
    before = torch.get_num_threads()
    values = config.num_steps * config.batch_size * math.prod(config.data.shape)
    torch.set_num_threads(max(1, min(before, values // VALUES_PER_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
