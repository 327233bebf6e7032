"""What defines a training run: one dataclass, from which the command line is made too."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from spikefuse.data import DATASETS
from spikefuse.events.candidates import with_candidates
from spikefuse.memory.policies import POLICIES
from spikefuse.models import MODELS
from spikefuse.neurons import surrogate
from spikefuse.nn import Temporal, zoo
from spikefuse.transforms.fuse import fuse

# Every model of the zoo that fires; lif first, as the default.
NEURONS: dict[str, type] = {
    name.lower(): getattr(zoo, name)
    for name in zoo.__all__
    if "threshold" in inspect.signature(getattr(zoo, name)).parameters
}
SURROGATES: dict[str, type] = {
    name.lower(): kind
    for name, kind in vars(surrogate).items()
    if inspect.isclass(kind)
    and issubclass(kind, surrogate.Surrogate)
    and kind not in (surrogate.Surrogate, surrogate.Custom, surrogate.StraightThrough)
}
# What a neuron learns as a fraction may not begin at 0 or 1.
FRACTIONS = {"plif": ("decay",), "gatedlif": ("decay", "threshold")}
ENCODINGS = ("direct", "poisson")
SLICINGS = ("number", "time", "duration")
OPTIMIZERS = ("adam", "adamw", "sgd", "row_adam")
SCHEDULES = ("constant", "cosine")
LOSSES = ("mean", "last", "every")
PRECISIONS = ("32", "bf16", "16")
MEMORY = (*POLICIES, "auto")
EVENT_MODEL = "event-mlp"
OVERFLOWS = ("drop", "dense", "raise")
# Of the network on events: the poster's decay, surrogate, and gradient threshold over threshold.
EVENT_DECAY, EVENT_SURROGATE, EVENT_CUTOFF = 0.95, "fastsigmoid", -0.1
EVENT_RATE = 0.01
SEED_LIMIT = 2**63
DEFAULT_STEPS = 8


class ConfigError(ValueError):
    """A setting is wrong; the message is one line that names it and the fix."""


def option(
    default: Any,
    help: str,
    choices: Collection[str] | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    positive: bool = False,
    shown: str | None = None,
    kind: type | None = None,
) -> Any:
    """A field of `TrainConfig`, with what its check and its command-line option need.

    Args:
        default: its default; None stands for a value that may be left out.
        help: one line for `--help`.
        choices: the values allowed (more can be added later), or None for a number in [low, high].
        positive: 0 and less are not allowed.
        shown: the default as `--help` shows it, where `default` does not tell.
        kind: the type of its values, where `default` does not tell; float if that is None.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "low": low,
        "high": high,
        "positive": positive,
        "kind": kind or (float if default is None else type(default)),
        "optional": default is None,
        "shown": str(default) if shown is None else shown,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that the result of a run depends on, and nothing else.

    Raises:
        ConfigError: a value of the wrong type, out of range, or unknown.
    """

    dataset: str = option("digits", "the data to learn", DATASETS)
    model: str = option("conv", "the architecture", MODELS)
    neuron: str = option("lif", "the neuron model", NEURONS)
    decay: float | None = option(
        None,
        "factor of the potential from step to step, where plif begins; some neurons have none",
        low=0.0,
        high=1.0,
        shown="the neuron's own",
    )
    threshold: float = option(1.0, "firing threshold", positive=True)
    surrogate: str | None = option(
        None,
        "surrogate derivative of the spike, with its default values",
        SURROGATES,
        shown="the neuron's own",
        kind=str,
    )
    num_steps: int = option(
        None, "time steps", low=1, shown="8, of event data the data set's own", kind=int
    )
    encoding: str = option(
        "direct",
        "of images; direct: the same image at each step; poisson: random spikes",
        ENCODINGS,
    )
    slicing: str | None = option(
        None,
        "event data into frames; by number of events, by equal times, by duration of slice_us",
        SLICINGS,
        shown="the data set's own",
        kind=str,
    )
    slice_us: int | None = option(
        None, "microseconds of a frame", low=1, shown="the data set's own", kind=int
    )
    capacity: float | None = option(
        None,
        "of event-mlp: largest share of a layer's neurons whose spikes are used in a step",
        positive=True,
        high=1.0,
        shown="no limit",
    )
    overflow: str = option(
        "drop", "of event-mlp: what becomes of events above the capacity", OVERFLOWS
    )
    activity: float | None = option(
        None,
        "of event-mlp: share of the neurons that fire in a step at the beginning",
        positive=True,
        high=0.5,
        shown="half of capacity, or 0.01",
    )
    activity_weight: float | None = option(
        None,
        "of event-mlp: weight of the penalty on activity above half of capacity",
        low=0.0,
        shown="1",
    )
    epochs: int = option(20, "passes over the training images", low=1)
    batch_size: int = option(32, "images per step of the optimizer", low=1)
    optimizer: str = option(
        "adam",
        "the optimizer; adamw decouples the weight decay, sgd has momentum 0.9, row_adam is for "
        "event-mlp and leaves alone what had no input",
        OPTIMIZERS,
    )
    lr: float = option(1e-3, "learning rate", positive=True)
    schedule: str = option(
        "constant", "of the learning rate; cosine: falls to 0 along half a period", SCHEDULES
    )
    warmup: float = option(0.0, "epochs over which the learning rate first rises linearly", low=0.0)
    weight_decay: float = option(0.0, "decay of all parameters towards 0", low=0.0)
    loss: str = option(
        "mean",
        "cross entropy of the mean output over time, of the last step's output, or, averaged, of "
        "every step's",
        LOSSES,
    )
    label_smoothing: float = option(
        0.0, "share of the target spread over all classes, in training", low=0.0, high=1.0
    )
    clip: float | None = option(
        None, "largest norm of the gradient of all parameters", positive=True, shown="none"
    )
    accumulate: int = option(
        1, "parts of a batch computed one after the other, for less memory", low=1
    )
    tbptt: int | None = option(
        None,
        "time steps through which a gradient flows back: truncated BPTT in chunks of so many",
        low=1,
        shown="all",
        kind=int,
    )
    shift: int = option(
        None,
        "move each training image by up to this many pixels, at random",
        low=0,
        high=8,
        shown="1, without rows and columns 0",
        kind=int,
    )
    flip: bool = option(False, "mirror half of the training images, at random", shown="no")
    precision: str = option("32", "32, or mixed precision: bf16, 16 (float16, CUDA)", PRECISIONS)
    fuse: bool = option(True, "batch norm and the neuron after it as one", shown="yes")
    memory: str = option("recompute", "what is kept for backward (docs/memory.md)", MEMORY)
    memory_budget: float | None = option(
        None, "GB that may be kept for backward, with memory auto", positive=True, shown="none"
    )
    channels_last: bool | None = option(
        None, "keep channels innermost in memory", shown="on a GPU", kind=bool
    )
    cuda_graph: bool = option(
        False, "replay the training step as one CUDA graph, once recorded", shown="no"
    )
    sync_batch_norm: bool = option(
        False, "batch normalization over the GPUs of a run under torchrun", shown="no"
    )
    seed: int = option(0, "seed of all random choices", low=0, high=SEED_LIMIT - 1)

    def __post_init__(self) -> None:
        for f in fields(self):
            _check(f.name, getattr(self, f.name), f.metadata)
        self._check_data()
        parameters = inspect.signature(NEURONS[self.neuron]).parameters
        if self.surrogate is not None and not {"surrogate", "firing"} & parameters.keys():
            raise ConfigError(
                f"surrogate is given, but the neuron {self.neuron} takes none: leave it out"
            )
        has_decay = "decay" in parameters
        if self.decay is not None and not has_decay:
            raise ConfigError(
                f"decay is given, but the neuron {self.neuron} has none: leave it out"
            )
        for name in FRACTIONS.get(self.neuron, ()):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ConfigError(
                    f"{name} is {value}: expected a number between 0 and 1 for {self.neuron}"
                )
        self._check_training()
        if self.on_events:
            self._check_event_neuron()

    def _check_data(self) -> None:
        """Also fill in what is left to the data set."""
        dataset, flat = DATASETS[self.dataset], len(DATASETS[self.dataset].shape) == 1
        own: dict[str, Any] = {
            "num_steps": dataset.transform.get("num_steps", DEFAULT_STEPS),
            "shift": 0 if flat or (self.on_events and dataset.kind == "events") else 1,
        }
        if self.on_events:
            capacity = self.capacity
            own["activity"] = EVENT_RATE if capacity is None else min(capacity / 2, 0.5)
            own["activity_weight"] = 1.0
        for name, value in own.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if flat and (self.shift or self.flip):
            name = "shift" if self.shift else "flip"
            raise ConfigError(f"{name} is given, but {self.dataset} has no rows and columns")
        if flat and "mlp" not in self.model:
            raise ConfigError(
                f"model is {self.model}, but {self.dataset} has no rows and columns: choose mlp"
            )
        for name in ("slicing", "slice_us"):
            if getattr(self, name) is not None and dataset.kind != "events":
                raise ConfigError(f"{name} is given, but {self.dataset} is no event data")
        self._check_slicing()
        self._check_events(dataset.kind == "events")

    def _check_events(self, recorded: bool) -> None:
        """What the network on events cannot do, and what only it can."""
        if not self.on_events:
            for name in ("capacity", "overflow", "activity", "activity_weight"):
                if getattr(self, name) not in (None, OVERFLOWS[0]):
                    raise ConfigError(f"{name} is given, but the model is not {EVENT_MODEL}")
            if self.optimizer == "row_adam":
                raise ConfigError(f"optimizer is row_adam, which is for {EVENT_MODEL}: choose adam")
            return
        activity, capacity = self.activity or 0.0, self.capacity or 1.0
        if activity > capacity:
            raise ConfigError(f"activity is {activity:g}, above capacity, {capacity:g}: lower it")
        if self.optimizer == "row_adam" and self.weight_decay:
            raise ConfigError("weight_decay is given, but row_adam has none: choose adamw")
        if not recorded and self.encoding != "poisson":
            raise ConfigError(
                f"encoding is {self.encoding}, but {EVENT_MODEL} reads spikes: choose poisson"
            )
        if recorded and (self.shift or self.flip):
            name = "shift" if self.shift else "flip"
            raise ConfigError(f"{name} is given, but {EVENT_MODEL} has no pictures: leave it out")
        if self.accumulate > 1 or self.tbptt is not None:
            name = "tbptt" if self.accumulate == 1 else "accumulate"
            raise ConfigError(f"{name} is given, but {EVENT_MODEL} takes whole batches")
        if self.cuda_graph:
            raise ConfigError(f"cuda_graph is given, but {EVENT_MODEL} has no fixed sizes")
        if self.precision != "32":
            raise ConfigError(f"precision is {self.precision}: {EVENT_MODEL} computes in 32")
        if self.memory == "checkpoint":
            raise ConfigError(f"memory is checkpoint, which {EVENT_MODEL} cannot do: choose bits")

    def _check_event_neuron(self) -> None:
        try:
            neuron: Any = self.make_neuron()
            with_candidates(neuron)(torch.zeros(1, 1, 1), impl="reference")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"neuron is {self.neuron}, but {EVENT_MODEL} needs one that fires 0 or 1 by one "
                "surrogate: choose one such as lif, plif or alif"
            ) from error

    def _check_slicing(self) -> None:
        own = DATASETS[self.dataset].transform
        slicing = self.slicing or own.get("by")
        if self.slice_us is not None and slicing != "duration":
            raise ConfigError(
                f"slice_us is given, but slicing is {slicing}: leave it out, or choose duration"
            )
        if slicing == "duration" and self.slice_us is None and own["dt"] is None:
            raise ConfigError(
                f"slicing is duration, and {self.dataset} has no duration of its own: give slice_us"
            )

    def _check_training(self) -> None:
        parts = f"accumulate is {self.accumulate}"
        if self.accumulate > self.batch_size:
            raise ConfigError(
                f"{parts}: expected at most batch_size, {self.batch_size}, the images to part"
            )
        smallest = self.batch_size // self.accumulate
        steps = self.num_steps if self.tbptt is None else min(self.num_steps, self.tbptt)
        last = self.num_steps % steps or steps
        if last * smallest < 2:
            limit = "num_steps and batch_size are both 1"
            if (self.accumulate, last) != (1, self.num_steps):
                limit = f"{parts} and tbptt {self.tbptt}, which leaves one step of one image"
            raise ConfigError(
                f"{limit}: batch normalization needs two values to train on, so raise one of them"
            )
        if (self.memory == "auto") != (self.memory_budget is not None):
            budget = "no memory_budget" if self.memory_budget is None else "a memory_budget"
            raise ConfigError(
                f"memory is {self.memory}, with {budget}: auto and memory_budget need each other"
            )
        if self.warmup >= self.epochs:
            raise ConfigError(
                f"warmup is {self.warmup:g}: expected fewer than epochs, {self.epochs}"
            )
        if self.label_smoothing == 1:
            raise ConfigError("label_smoothing is 1, which leaves nothing to learn: lower it")
        if self.cuda_graph and self.precision == "16":
            raise ConfigError(
                "cuda_graph is given with precision 16, whose loss scale decides anew whether to "
                "step: choose bf16 or 32"
            )
        if self.memory == "checkpoint" and (self.tbptt is not None or not self.fuse):
            given = "fuse is false" if self.tbptt is None else f"tbptt is {self.tbptt}"
            raise ConfigError(
                f"memory is checkpoint and {given}: it trains fused networks on whole sequences; "
                "leave that out, or choose recompute"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: an entry that is unknown or wrong.
        """
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}: from another version of spikefuse")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def on_events(self) -> bool:
        return self.model.startswith(EVENT_MODEL)

    def make_neuron(self) -> nn.Module:
        options: dict[str, Any] = {} if self.decay is None else {"decay": self.decay}
        if self.on_events:
            parameters = inspect.signature(NEURONS[self.neuron]).parameters
            if "decay" in parameters:
                options.setdefault("decay", EVENT_DECAY)
            kind = SURROGATES[self.surrogate or EVENT_SURROGATE]
            options["surrogate"] = kind(cutoff=EVENT_CUTOFF * self.threshold)
            return NEURONS[self.neuron](threshold=self.threshold, detach_reset=True, **options)
        if self.surrogate is not None:
            options["surrogate"] = SURROGATES[self.surrogate]()
        return NEURONS[self.neuron](threshold=self.threshold, **options)

    def make_network(self) -> Temporal:
        """The network with new weights, from PyTorch's random numbers."""
        dataset = DATASETS[self.dataset]
        channels, *size = dataset.shape if len(dataset.shape) == 3 else (*dataset.shape, 1, 1)
        height, width = size
        options: dict[str, Any] = {}
        if self.on_events:
            sparse = self.optimizer == "row_adam"
            options = {"capacity": self.capacity, "overflow": self.overflow, "sparse_grad": sparse}
        build = MODELS[self.model]
        net = build(self.make_neuron, channels, len(dataset.classes), (height, width), **options)
        temporal = Temporal(net, POLICIES.get(self.memory, self.memory), self.memory_budget)
        return fuse(temporal) if self.fuse else temporal

    def transform(self) -> dict[str, Any]:
        """What `spikefuse.data.load` is to be told."""
        if DATASETS[self.dataset].kind != "events":
            return {}
        options = {"num_steps": self.num_steps, "by": self.slicing, "dt": self.slice_us}
        if self.on_events:
            options["bits"] = 1  # several events of a site in a step are one spike
        return {name: value for name, value in options.items() if value is not None}


def _check(name: str, value: Any, rule: Mapping[str, Any]) -> None:
    choices, kind, low, high = (rule[key] for key in ("choices", "kind", "low", "high"))
    if value is None and rule["optional"]:
        return
    if choices is not None:
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"unknown {name} {value!r}: {hint}choose one of {', '.join(choices)}")
        return
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}: expected true or false")
        return
    noun = "whole number" if kind is int else "number"
    numeric = isinstance(value, int if kind is int else int | float)
    if not numeric or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}: expected a {noun}")
    if rule["positive"] and value <= 0:
        raise ConfigError(f"{name} is {value!r}: expected a positive {noun}")
    if not low <= value <= high:
        least = "above 0, at most" if rule["positive"] else f"from {low:g} to"
        bounds = f"{least} {high:g}" if high < math.inf else f"of at least {low:g}"
        raise ConfigError(f"{name} is {value!r}: expected a {noun} {bounds}")
