"""The values that the settings of a training run choose from, and constants of their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn

from spikefuse import neurons
from spikefuse.memory.policies import POLICIES
from spikefuse.neurons import surrogate
from spikefuse.nn import QCFS

# All spiking models; lif comes first and is the default.
NEURONS: dict[str, type] = {
    name.lower(): getattr(neurons, name)
    for name in neurons.__all__
    if "threshold" in inspect.signature(getattr(neurons, name)).parameters
}
# What networks without spikes have instead, which `spikefuse convert` turns into spiking ones.
ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "relu": lambda threshold=1.0: nn.ReLU(),
    "qcfs": QCFS,
}
UNITS: dict[str, Callable[..., nn.Module]] = {**NEURONS, **ACTIVATIONS}
# Of a neuron by default.
THRESHOLDS: dict[str, float] = {
    name: inspect.signature(unit).parameters["threshold"].default for name, unit in UNITS.items()
}
SURROGATES: dict[str, type] = {
    name.lower(): kind
    for name, kind in vars(surrogate).items()
    if inspect.isclass(kind)
    and issubclass(kind, surrogate.Surrogate)
    and kind not in (surrogate.Surrogate, surrogate.Custom, surrogate.StraightThrough)
}
# Parameters that a neuron learns through a sigmoid: their initial values exclude 0 and 1.
SIGMOID_PARAMETERS = {"plif": ("decay",), "gatedlif": ("decay", "threshold")}
OF_NEURONS = ("neuron", "decay", "threshold", "surrogate", "reset", "detach_reset")
ENCODINGS = ("direct", "poisson")
# Classes of torch.optim whose step a CUDA graph can hold.
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): getattr(torch.optim, name)
    for name in ("Adam", "AdamW", "RAdam", "Adamax", "RMSprop", "SGD")
}
SCHEDULES = ("constant", "cosine", "one-cycle", "step")
# Part of a one-cycle run in which the learning rate rises.
RISE = 0.3
LOSSES = ("mean", "last", "every")
PRECISIONS = ("32", "bf16", "16")
MEMORY = (*POLICIES,)
EVENT_MODEL, RECURRENT_MODEL = "event-mlp", "recurrent"
OVERFLOWS = ("drop", "dense", "raise")
# Defaults of event models (Finkbeiner and Neftci); the cutoff is relative to the threshold.
EVENT_DECAY, EVENT_SURROGATE, EVENT_CUTOFF = 0.95, "fastsigmoid", -0.1
EVENT_RATE = 0.01
# Augmentations of images alone, of inputs with rows and columns, and of all that event data takes.
OF_IMAGES, OF_PLANES = ("trivial_augment", "erase"), ("shift", "flip", "cutout", "cutmix")
OF_FRAMES = (*OF_PLANES, "mixup", "drop_events")
SEED_LIMIT = 2**63
DEFAULT_STEPS = 8
SIZES_VARY = f"the tensors of {EVENT_MODEL} vary in size"
SCALED_LOSS = "the loss scaling of precision 16 may skip steps"
