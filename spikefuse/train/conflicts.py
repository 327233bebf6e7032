"""Conflicts between the settings of a training run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from torch import nn

from spikefuse.neurons import Neuron
from spikefuse.train import choices, own
from spikefuse.train.choices import EVENT_MODEL
from spikefuse.train.tasks import TASKS

# Which imports this module.
TrainConfig = Any


def find_conflicts(config: TrainConfig) -> Iterator[str]:
    """Yield what is wrong with settings whose own values are valid, naming the fix."""
    yield from _task_conflicts(config)
    yield from _data_conflicts(config)
    yield from _event_model_conflicts(config)
    yield from _neuron_conflicts(config)
    yield from _training_conflicts(config)


def _task_conflicts(config: TrainConfig) -> Iterator[str]:
    task, dataset = f"task is {config.task}", config.data
    if config.criterion not in TASKS[config.task]:
        names = " or ".join(TASKS[config.task])
        yield f"criterion is {config.criterion}, but {task}: choose {names}"
    if config.task == "sequence" and config.loss != "every":
        yield f"loss is {config.loss}, but {task}, whose steps all have targets: choose every"
    if config.task != "classification":
        yield from _given(config, task, "mixup", "cutmix")
    if config.criterion != "cross-entropy":
        yield from _given(config, f"criterion is {config.criterion}", "label_smoothing")
    elif len(dataset.classes) == 1:
        yield f"{config.dataset} has one class: add another, or choose task regression"


def _data_conflicts(config: TrainConfig) -> Iterator[str]:
    dataset = config.data
    slicing = config.slicing or dataset.transform.get("by")
    for name in ("size", "grey", "sensor"):
        if name not in dataset.transform:
            yield from _given(config, f"{config.dataset} has no such option", name)
    if dataset.describe is None:
        yield from _given(config, f"{config.dataset} has its own", "classes", "shape")
    elif config.classes is not None and (
        not config.classes or len(config.shape or ()) not in (1, 3)
    ):
        yield f"classes are {config.classes} and shape is {config.shape}: damaged"
    if len(dataset.shape) == 1:
        names = (*choices.OF_PLANES, *choices.OF_IMAGES)
        yield from _given(config, f"{config.dataset} has no rows and columns", *names)
        of_vectors = "mlp" in config.model or config.is_recurrent
        if not of_vectors and not own.is_reference(config.model):
            yield (
                f"model is {config.model}, but {config.dataset} is one-dimensional: choose mlp or "
                "recurrent"
            )
    if dataset.kind != "images":
        of_images = "encoding", *choices.OF_IMAGES
        yield from _given(config, f"{config.dataset} has no images", *of_images)
    if dataset.kind != "events":
        of_events = ("slicing", "slice_us", "slice_events", "frames", "drop_events")
        yield from _given(config, f"{config.dataset} is not event data", *of_events)
    else:
        if dataset.scale != 1:
            yield from _given(config, f"{config.dataset} holds levels, not events", "drop_events")
        if config.frames == "voxel_grid" and slicing != "time":
            yield f"frames is voxel_grid, but slicing is {slicing}: choose time"
    if config.trivial_augment and dataset.shape[0] not in (1, 3):
        yield f"trivial_augment is given, but {config.dataset} is neither grey nor RGB: remove it"
    side = min(dataset.shape[-2:])
    if config.cutout >= side and (
        dataset.describe is None or config.shape is not None
    ):  # it would often leave nothing of an image
        yield (
            f"cutout is {config.cutout}: expected less than the {side} rows or columns of "
            f"{config.dataset}"
        )
    if config.slice_us is not None and slicing != "duration":
        yield f"slice_us is given, but slicing is {slicing}: remove it, or choose duration"
    if config.slice_events is not None and slicing != "events":
        yield f"slice_events is given, but slicing is {slicing}: remove it, or choose events"
    if slicing == "events" and config.slice_events is None:
        yield "slicing is events, but slice_events is not given: set it"
    if dataset.scale != 1 and config.frames == "counts" and slicing != "duration":
        yield f"slicing is {slicing}, but {config.dataset} has no events to count: remove it"
    if slicing == "duration" and not (config.slice_us or dataset.transform.get("dt")):
        yield f"slicing is duration, but {config.dataset} has no default duration: set slice_us"


def _given(config: TrainConfig, reason: str, *names: str) -> Iterator[str]:
    """Yield what is wrong with each setting that does not apply, and has not its default."""
    defaults = {f.name: f.default for f in fields(config)}
    for name in names:
        value, default = getattr(config, name), defaults[name]
        if value and value != default:
            shown = value if isinstance(default, str) else "given"
            yield f"{name} is {shown}, but {reason}: remove it"


def _event_model_conflicts(config: TrainConfig) -> Iterator[str]:
    if not config.on_events:
        of_model = ("capacity", "overflow", "activity", "activity_weight")
        yield from _given(config, f"the model is not {EVENT_MODEL}", *of_model)
        return
    activity, capacity = config.activity or 0.0, config.capacity or 1.0
    if activity > capacity:
        yield f"activity is {activity:g}: expected at most capacity, {capacity:g}"
    if config.capacity is None:
        why = f"{EVENT_MODEL} has no capacity"
        yield from _given(config, why, "overflow")
        if config.activity_weight != 1:
            yield f"activity_weight is {config.activity_weight:g}, but {why}: remove it"
    dataset = config.data
    if dataset.kind == "series":
        yield f"{EVENT_MODEL} reads events, but {config.dataset} holds values: choose mlp"
    elif dataset.kind == "events":
        yield from _given(config, f"{EVENT_MODEL} reads packed frames", *choices.OF_FRAMES)
        if dataset.scale != 1:
            yield f"{EVENT_MODEL} reads events, but {config.dataset} holds levels: choose mlp"
        if "bits" not in dataset.transform:
            yield f"{EVENT_MODEL} reads frames of one bit, but {config.dataset} has no bits"
    elif config.encoding != "poisson":
        yield f"encoding is {config.encoding}, but {EVENT_MODEL} reads spikes: choose poisson"
    yield from _given(config, f"{EVENT_MODEL} computes whole batches", "accumulate")
    yield from _given(config, f"{EVENT_MODEL} computes whole sequences", "tbptt")
    yield from _given(config, f"{EVENT_MODEL} has activity_weight", "rate_penalty")
    yield from _given(config, choices.SIZES_VARY, "cuda_graph")
    yield from _given(config, f"{EVENT_MODEL} computes in float32", "precision")


def _activation_conflicts(config: TrainConfig) -> Iterator[str]:
    why = f"the neuron {config.neuron} does not spike"
    yield from _given(config, why, "encoding", "rate_penalty", "tbptt")
    if config.data.kind != "images":
        yield f"dataset is {config.dataset}, but {why}: choose images, constant in time"
    if config.num_steps != 1 and not config.converted:
        found = f"num_steps is {config.num_steps}"
        yield f"{found}, but {why}: remove it, and give it to spikefuse convert"
    if config.on_events or config.is_recurrent:
        yield f"model is {config.model}, but {why}: choose a model without events and recurrence"
    if config.neuron == "relu" and config.threshold != choices.THRESHOLDS["relu"]:
        yield f"threshold is {config.threshold:g}, but {why}: remove it"


def _neuron_conflicts(config: TrainConfig) -> Iterator[str]:
    if config.neuron in choices.ACTIVATIONS:
        yield from _activation_conflicts(config)
    elif config.converted:
        yield f"converted is given, but the neuron {config.neuron} is not converted: damaged"
    parameters = inspect.signature(choices.UNITS[config.neuron]).parameters
    if config.neuron == "ternarylif":
        yield from _given(config, "the spikes of ternarylif have signs", "rate_penalty")
    for name in ("surrogate", "reset", "detach_reset"):
        if not {name, "firing"} & parameters.keys() and getattr(config, name) is not None:
            yield f"{name} is given, but the neuron {config.neuron} takes none: remove it"
    learns = config.is_recurrent and config.neuron in ("adlif", "seadlif")
    if config.decay is not None and (learns or "decay" not in parameters):
        why = f"learns its own in {config.model}" if learns else "has none"
        yield f"decay is given, but the neuron {config.neuron} {why}: remove it"
    for name in choices.SIGMOID_PARAMETERS.get(config.neuron, ()):
        if (value := getattr(config, name)) is not None and not 0 < value < 1:
            yield f"{name} is {value}: expected a number between 0 and 1 for {config.neuron}"


def ignored_neuron(config: TrainConfig) -> Iterator[str]:
    """Yield what is wrong with options of the neuron if the model's builder does not call it."""
    for f in fields(config):
        default = choices.THRESHOLDS[config.neuron] if f.name == "threshold" else f.default
        if f.name in choices.OF_NEURONS and getattr(config, f.name) != default:
            why = f"{config.model} does not call its argument neuron"
            yield f"{f.name} is given, but {why}: call it there, or remove the option"


def constant_norm(config: TrainConfig, net: nn.Module, processes: int) -> Iterator[str]:
    """Yield what is wrong if a batch norm reads the same values in each step of a single image,
    which it makes zeros."""
    if config.sync_batch_norm:
        processes = 1
    examples = config.batch_size // processes // config.accumulate
    if examples > 1 or config.data.kind != "images" or config.encoding != "direct":
        return
    # Convolutions over positions have several values; after a neuron, steps differ.
    kinds = Neuron, nn.Conv1d, nn.BatchNorm1d
    first = next((m for m in net.modules() if isinstance(m, kinds)), None)
    if isinstance(first, nn.BatchNorm1d):
        yield (
            f"batch_size is {config.batch_size}, accumulate {config.accumulate}, with {processes} "
            f"processes, which leaves one image at a time: a batch norm of {config.model} needs at "
            "least two, as an image is the same in all steps, so change one of them, or choose "
            "encoding poisson"
        )


def _training_conflicts(config: TrainConfig) -> Iterator[str]:
    accumulate, tbptt = f"accumulate is {config.accumulate}", config.tbptt
    if tbptt is not None and tbptt > config.num_steps:
        yield f"tbptt is {tbptt}: expected at most num_steps, {config.num_steps}"
    if config.accumulate > config.batch_size:
        yield f"{accumulate}: expected at most batch_size, {config.batch_size}"
    steps = min(config.num_steps, tbptt or config.num_steps)
    last = config.num_steps % steps or steps
    if last * (config.batch_size // config.accumulate) < 2:
        cause = "num_steps and batch_size are both 1"
        if (config.accumulate, last) != (1, config.num_steps):
            cause = f"{accumulate} and tbptt {tbptt}, which leaves one step of one example"
        yield f"{cause}: batch normalization needs at least two values, so change one of them"
    if config.warmup >= config.epochs:
        yield f"warmup is {config.warmup:g}: expected fewer than epochs, {config.epochs}"
    if config.decay_all and config.weight_decay == 0:
        yield "decay_all is given, but weight_decay is 0: set it, or remove decay_all"
    if config.step_epochs is not None and config.schedule != "step":
        yield f"step_epochs is given, but schedule is {config.schedule}: choose step"
    if config.batch_size == 1:
        yield from _given(config, "batch_size is 1", "mixup", "cutmix")
    if config.label_smoothing == 1:
        yield "label_smoothing is 1, which leaves nothing to learn: lower it"
    if config.cuda_graph and config.precision == "16":
        yield f"cuda_graph is given, but {choices.SCALED_LOSS}: choose precision bf16 or 32"
