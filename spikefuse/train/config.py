"""The settings of a training run, and how it runs; both are options of the command line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from spikefuse.data import DATASETS, Dataset
from spikefuse.data.frames import CONTENTS, SLICINGS, Slicing
from spikefuse.events.candidates import with_candidates
from spikefuse.graph.fuse import fuse
from spikefuse.memory.policies import POLICIES
from spikefuse.models import MODELS
from spikefuse.neurons.firing import RESETS
from spikefuse.nn import Temporal
from spikefuse.train import choices, own
from spikefuse.train.choices import EVENT_MODEL
from spikefuse.train.conflicts import find_conflicts
from spikefuse.train.converted import spiking
from spikefuse.train.fields import (
    AT_LEAST_ONE,
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    ConfigError,
    between,
    check_fields,
    option,
    up_to,
)
from spikefuse.train.tasks import CRITERIA, TASKS, Task

DEVICES = ("auto", "cpu", "cuda")


def _without_effect(values: dict[str, Any]) -> Iterator[str]:
    """Yield the settings that had no effect in earlier versions, and are refused now."""
    if values.get("weight_decay") == 0:
        yield "decay_all"
    exceeds_sequence = (values.get("tbptt") or 0) > (values.get("num_steps") or math.inf)
    if exceeds_sequence or values.get("neuron") in choices.ACTIVATIONS:
        yield "tbptt"
    dataset = own.REGISTRIES["dataset"].get(str(values.get("dataset")))
    if dataset is not None and dataset.kind != "images":
        yield "encoding"
    if values.get("capacity") is None:
        yield from ("overflow", "activity_weight")


@dataclass(frozen=True)
class TrainConfig:
    """All settings that determine the result of a run.

    Example::

        config = sf.train.TrainConfig(dataset="mnist", model="resnet18", num_steps=4)
        net = config.make_network()  # a Temporal

    Args:
        dataset: dataset, or module:dataset for your own.
        model: network architecture, or module:builder for your own.
        task: what targets are: a class or values of each example, or a target for each time step.
        neuron: neuron model, or relu or qcfs for spikefuse convert.
        decay: factor that multiplies the membrane potential at every step (plif: its initial
            value); by default the neuron's own.
        threshold: firing threshold; by default the neuron's own.
        surrogate: surrogate derivative of the spike; by default the neuron's own.
        reset: potential after a spike: hard sets it to 0, soft subtracts the threshold; by default
            the neuron's own.
        detach_reset: stop gradients through the reset; by default the neuron's own; yes for event
            models.
        size: rows and columns of an image or frame; folder, events, imagenet and tiny_imagenet; by
            default the dataset's own; events: the sensor's.
        grey: read images in grey; folder, imagenet and tiny_imagenet.
        sensor: events: columns and rows of the camera, such as 346x260; by default the files' own.
        num_steps: number of time steps; by default 8; for event data, the dataset's own; of relu
            and qcfs 1.
        encoding: image encoding; direct repeats the image at every step, poisson draws random
            spikes.
        slicing: how events are cut into frames: equal numbers of events, frames of --slice-events
            events, equal shares of the recording's time, or frames of --slice-us microseconds; by
            default the dataset's own.
        slice_us: microseconds per frame, with --slicing duration; by default the dataset's own.
        slice_events: events per frame, with --slicing events; by default none.
        frames: what frames of events hold: counts, how recent the last event is (time_surface), or
            with --slicing time events shared by the two nearest frames (voxel_grid).
        capacity: event-mlp: largest fraction of a layer's neurons whose spikes are used in one
            step; by default no limit.
        overflow: event-mlp: what to do with spikes above the capacity: drop them, compute the layer
            densely, or raise an error.
        activity: event-mlp: scale the initial weights so that this fraction of neurons fires per
            step; by default half the capacity, or 0.01.
        activity_weight: event-mlp: weight of the penalty on activity above half the capacity; by
            default 1.
        epochs: passes over the training examples.
        batch_size: examples per optimizer step.
        optimizer: optimizer of torch.optim, with its defaults; sgd has momentum 0.9.
        lr: learning rate.
        schedule: learning-rate schedule; cosine decays to 0 by the end of the run, one-cycle rises
            first, step divides by 10 every --step-epochs.
        step_epochs: epochs between steps, with --schedule step; by default a third of the run,
            rounded up.
        warmup: epochs over which the learning rate rises at the start; by default 0; with one-cycle
            0.3 of the run.
        weight_decay: weight decay of the weights of layers, not of norms, biases and neurons; by
            default the optimizer's own, 0.01 for adamw and 0 for the others.
        decay_all: apply weight decay to all parameters.
        ema: evaluate and save the exponential moving average of the weights, with this decay per
            step, such as 0.999; by default none.
        loss: output to which the criterion applies: the mean over time, the last step, or every
            step (averaged); by default mean; of sequences every.
        criterion: loss of an output and its target: of values the mean squared error, the mean
            absolute error or Huber's, of classes the cross entropy; by default cross-entropy; mse
            for regression and sequences.
        label_smoothing: fraction of the target spread evenly over all classes, in training only.
        rate_penalty: weight of a penalty on the firing rate: spikes per neuron and step, averaged
            over layers.
        patience: stop after this many epochs without a higher validation accuracy; of values,
            without a lower loss; by default never.
        clip: clip the gradient of all parameters to this norm; by default none.
        shift: largest random shift of a training image, in pixels; by default 1 for images and
            frames in classification, otherwise 0.
        flip: mirror half of the training images at random.
        trivial_augment: change each training image by a random operation of random strength.
        cutout: side of a random square of a training image that is set to zero, in pixels; by
            default none.
        erase: probability that a random rectangle of a training image is filled with random pixels;
            by default none.
        drop_events: drop events of training recordings at random.
        mixup: mix each example with another one, with weights of Beta(N, N), such as 0.2; by
            default none.
        cutmix: paste a rectangle of another example, with an area of Beta(N, N); with mixup, each
            applies to half of the examples; by default none.
        seed: seed of all random choices.
        precision: floating-point precision: 32, or mixed with bf16 or 16 (float16, CUDA).
        accumulate: microbatches per batch, computed one after the other to save memory.
        tbptt: truncated BPTT: time steps through which gradients flow back; by default all.
        fuse: fuse each batch norm with the neurons that read it.
        memory: what to save for the backward pass (docs/memory.md).
        channels_last: use the channels-last memory format.
        cuda_graph: record the training step as a CUDA graph and replay it; by default on a GPU,
            where possible.
        sync_batch_norm: synchronize batch norm statistics across GPUs, under torchrun.
        classes, shape, converted: no options: what the files of a dataset determine, and whether
            `spikefuse convert` has made the network.

    Raises:
        ConfigError: a value has the wrong type, is out of range, or conflicts with another.
    """

    dataset: str = option("digits", DATASETS)
    model: str = option("conv", MODELS)
    task: str = option("classification", TASKS)
    neuron: str = option("lif", choices.UNITS)
    decay: float | None = option(None, between(0, 1))
    threshold: float = option(None, POSITIVE)
    surrogate: str | None = option(None, choices.SURROGATES)
    reset: str | None = option(None, RESETS)
    detach_reset: bool | None = option(None)
    size: int | None = option(None, AT_LEAST_ONE)
    grey: bool = option(False)
    sensor: str | None = option(None)
    num_steps: int = option(None, AT_LEAST_ONE)
    encoding: str = option("direct", choices.ENCODINGS)
    slicing: str | None = option(None, SLICINGS)
    slice_us: int | None = option(None, AT_LEAST_ONE)
    slice_events: int | None = option(None, AT_LEAST_ONE)
    frames: str = option("counts", CONTENTS)
    capacity: float | None = option(None, up_to(1))
    overflow: str = option("drop", choices.OVERFLOWS)
    activity: float | None = option(None, up_to(0.5))
    activity_weight: float | None = option(None, NOT_NEGATIVE)
    epochs: int = option(20, AT_LEAST_ONE)
    batch_size: int = option(32, AT_LEAST_ONE)
    optimizer: str = option("adam", choices.OPTIMIZERS)
    lr: float = option(1e-3, POSITIVE)
    schedule: str = option("constant", choices.SCHEDULES)
    step_epochs: int | None = option(None, AT_LEAST_ONE)
    warmup: float = option(None, NOT_NEGATIVE)
    weight_decay: float = option(None, NOT_NEGATIVE)
    decay_all: bool = option(False)
    ema: float | None = option(None, BELOW_ONE)
    loss: str = option(None, choices.LOSSES)
    criterion: str = option(None, CRITERIA)
    label_smoothing: float = option(0.0, between(0, 1))
    rate_penalty: float = option(0.0, NOT_NEGATIVE)
    patience: int | None = option(None, AT_LEAST_ONE)
    clip: float | None = option(None, POSITIVE)
    shift: int = option(None, between(0, 8))
    flip: bool = option(False)
    trivial_augment: bool = option(False)
    cutout: int = option(0, NOT_NEGATIVE)
    erase: float = option(0.0, between(0, 1))
    drop_events: bool = option(False)
    mixup: float = option(0.0, NOT_NEGATIVE)
    cutmix: float = option(0.0, NOT_NEGATIVE)
    seed: int = option(0, between(0, choices.SEED_LIMIT - 1))
    precision: str = option("32", choices.PRECISIONS)
    accumulate: int = option(1, AT_LEAST_ONE)
    tbptt: int | None = option(None, AT_LEAST_ONE)
    fuse: bool = option(True)
    memory: str = option("recompute", choices.MEMORY)
    channels_last: bool | None = option(True)
    cuda_graph: bool | None = option(None)
    sync_batch_norm: bool = option(False)

    classes: tuple[str, ...] | None = None
    shape: tuple[int, ...] | None = None
    converted: bool | None = None

    #: The settings that `__post_init__` has set.
    _derived: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        for setting in own.REGISTRIES:
            own.register(setting, getattr(self, setting))
        check_fields(self)
        self._fill_in_defaults()
        for conflict in find_conflicts(self):
            raise ConfigError(conflict)
        if self.on_events:
            self._check_event_neuron()

    def _fill_in_defaults(self) -> None:
        """Set the values whose default depends on other settings."""
        dataset = self.data
        recorded = dataset.kind == "series" or (self.on_events and dataset.kind == "events")
        no_shift = recorded or len(dataset.shape) == 1 or self.task != "classification"
        defaults: dict[str, Any] = {
            "threshold": choices.THRESHOLDS[self.neuron],
            "num_steps": dataset.transform.get("num_steps", choices.DEFAULT_STEPS),
            **({"num_steps": 1} if self.neuron in choices.ACTIVATIONS else {}),
            "shift": 0 if no_shift else 1,
            "loss": "every" if self.task == "sequence" else "mean",
            "criterion": TASKS[self.task][0],
            "warmup": choices.RISE * self.epochs if self.schedule == "one-cycle" else 0.0,
        }
        of_optimizer = inspect.signature(choices.OPTIMIZERS[self.optimizer]).parameters
        defaults["weight_decay"] = float(of_optimizer["weight_decay"].default)
        if self.schedule == "step":
            defaults["step_epochs"] = -(-self.epochs // 3)
        if self.on_events:
            capacity = self.capacity
            defaults["activity"] = (
                choices.EVENT_RATE if capacity is None else min(capacity / 2, 0.5)
            )
            defaults["activity_weight"] = 1.0
        derived = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        vars(self).update(derived, _derived=frozenset(derived))

    def replaced(self, **settings: Any) -> TrainConfig:
        """Return these settings with others; defaults that depend on them are set anew."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self._derived}
        return TrainConfig(**given | settings)

    def _check_event_neuron(self) -> None:
        try:
            neuron: Any = self.make_neuron()
            with_candidates(neuron)(torch.zeros(1, 1, 1), impl="reference")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"neuron is {self.neuron}, but {EVENT_MODEL} needs a neuron with outputs 0 and 1 "
                "and a single surrogate: choose one such as lif, plif or alif"
            ) from error

    def graph_obstacle(self, device: torch.device, num_processes: int) -> str:
        """Why training steps are not recorded as a CUDA graph; empty if they are."""
        if self.cuda_graph is False:
            return "--no-cuda-graph"
        if device.type != "cuda":
            return f"the device is {device.type}"
        if self.on_events:
            return choices.SIZES_VARY
        if self.precision == "16":
            return choices.SCALED_LOSS
        if num_processes > 1 and self.cuda_graph is None:
            # NCCL reports neither errors nor timeouts of what a graph sends.
            return "a replay would wait for a process that has ended (--cuda-graph records it)"
        return ""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Invert `to_dict`, without importing a user's module that `values` name.

        Settings that earlier versions accepted without an effect are dropped.

        Raises:
            ConfigError: an entry is unknown or invalid, or names a model or dataset that this
                process has not imported yet.
        """
        own.refuse_unknown(values)
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}: from another version of spikefuse")
        dropped = set(_without_effect(values))
        return cls(**{name: value for name, value in values.items() if name not in dropped})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def on_events(self) -> bool:
        """Whether the model computes on lists of events."""
        return self.model.startswith(EVENT_MODEL) and not own.is_reference(self.model)

    @property
    def is_recurrent(self) -> bool:
        """Whether the layers of the model feed back."""
        return self.model.startswith(choices.RECURRENT_MODEL) and not own.is_reference(self.model)

    @property
    def changeable(self) -> tuple[str, ...]:
        """The settings that may differ when the run is resumed."""
        # Other schedules depend on the length of the run.
        extended = ("epochs",) if self.schedule == "constant" else ()
        return *extended, "cuda_graph", "fuse", "memory"

    def make_task(self) -> Task:
        num = len(self.data.classes)
        return Task(self.task, self.criterion, self.loss, num, self.label_smoothing)

    def make_neuron(self) -> nn.Module:
        kind = choices.UNITS[self.neuron]
        options: dict[str, Any] = {} if self.decay is None else {"decay": self.decay}
        if self.on_events:
            if "decay" in inspect.signature(kind).parameters:
                options.setdefault("decay", choices.EVENT_DECAY)
            derivative = choices.SURROGATES[self.surrogate or choices.EVENT_SURROGATE]
            options["surrogate"] = derivative(cutoff=choices.EVENT_CUTOFF * self.threshold)
            options["detach_reset"] = True
        elif self.surrogate is not None:
            options["surrogate"] = choices.SURROGATES[self.surrogate]()
        for name in ("reset", "detach_reset"):
            if (value := getattr(self, name)) is not None:
                options[name] = value
        return kind(threshold=self.threshold, **options)

    def make_network(self, neuron: Callable[[], nn.Module] | None = None) -> Temporal:
        """Build the network; its weights come from PyTorch's global random number generator.

        Args:
            neuron: makes a neuron; `make_neuron` by default.
        """
        dataset = self.data
        if not dataset.classes:
            raise ConfigError(
                f"the classes of {self.dataset} are those of its files: load them first, and use "
                "the config of the DataModule"
            )
        channels, height, width = (*dataset.shape, 1, 1)[:3]
        options: dict[str, Any] = {}
        if self.on_events:
            options = {"capacity": self.capacity, "overflow": self.overflow}
        build = MODELS[self.model]
        try:
            neuron = neuron or self.make_neuron
            net = build(neuron, channels, len(dataset.classes), (height, width), **options)
        except ValueError as error:
            if own.is_reference(self.model):  # whose traceback helps
                raise
            raise ConfigError(
                f"model is {self.model}, but {self.dataset} does not suit it: {error}"
            ) from error
        own.check_network(self.model, net)
        if self.channels_last is not False:  # None in older checkpoints
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        temporal = Temporal(net, POLICIES[self.memory])
        if self.converted:
            temporal = spiking(net, dataset.shape)
        return fuse(temporal) if self.fuse else temporal

    @property
    def data(self) -> Dataset:
        """The description of the dataset, with the classes and the shape of the files."""
        dataset = replace(DATASETS[self.dataset], name=self.dataset)
        if self.frames != CONTENTS[0]:
            by = Slicing("time", content=self.frames)
            dataset = replace(dataset, scale=by.scale)
        if self.classes is None or self.shape is None:
            return dataset
        return replace(dataset, classes=self.classes, shape=self.shape)

    @property
    def example(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and the shape of an image, or of all time steps of events or a series."""
        dataset = self.data
        dtype = torch.float32 if dataset.kind == "series" else torch.uint8
        steps = () if dataset.kind == "images" else (self.num_steps,)
        return dtype, (*steps, *dataset.shape)

    def with_files_of(self, dataset: Dataset) -> TrainConfig:
        """Return these settings with the classes and the shape of a dataset's files.

        Raises:
            ConfigError: a checkpoint has other classes.
        """
        if self.classes is not None and self.classes != dataset.classes:
            odd = sorted({*self.classes} ^ {*dataset.classes}) or ["their order"]
            raise ConfigError(
                f"the run has {len(self.classes)} classes, and the files {len(dataset.classes)}: "
                f"they differ in {odd[0]}"
            )
        return self.replaced(classes=dataset.classes, shape=dataset.shape)

    def transform(self) -> dict[str, Any]:
        """Return the options of `spikefuse.data.load`."""
        options: dict[str, Any] = {"size": self.size, "grey": self.grey or None}
        options["sensor"] = self.sensor
        if self.data.kind != "images":
            options |= {"num_steps": self.num_steps, "by": self.slicing, "dt": self.slice_us}
            options["count"] = self.slice_events
            if self.on_events:
                options["bits"] = 1  # several events at a site within a step are one spike
            if self.frames != CONTENTS[0]:
                options |= {"content": self.frames, "bits": 8}
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run; the result does not depend on these options.

    Args:
        out: new folder of the run; by default runs/DATASET-MODEL-N.
        time_ranks: processes that share a sequence, under torchrun.
        data_ranks: processes that share a batch; by default all processes / time-ranks.
        time_chunks: microbatches in which states are sent from one time rank to the next; by
            default 1 on GPUs, which do not wait for states; 4 on CPUs.
        device: auto is CUDA if available.
        logger: Lightning logger in addition to CSV and TensorBoard, such as wandb or mlflow, or
            module:function for one of your own; by default none.
        data_dir: folder of the datasets; by default $SPIKEFUSE_DATA, else see the end of spikefuse
            train --help.
        download: download missing files of mnist, fashion_mnist, cifar10 and cifar100, verifying
            checksums.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    out: Path | None = option(None)
    time_ranks: int = option(1, AT_LEAST_ONE)
    data_ranks: int | None = option(None, AT_LEAST_ONE)
    time_chunks: int | None = option(None, AT_LEAST_ONE)
    device: str = option("auto", DEVICES)
    logger: str | None = option(None)
    data_dir: Path | None = option(None)
    download: bool = option(False)

    def __post_init__(self) -> None:
        check_fields(self)
