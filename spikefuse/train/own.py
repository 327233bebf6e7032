"""A user's own models and datasets, named by `module:attribute` or by an entry point.

Importing a module executes its code. Names that a user gives are imported; a name in a checkpoint
is used only after a user has given it too. Entry points belong to packages that the user installed
for this purpose, and are imported wherever they are named.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
import sys
import traceback
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from spikefuse.data import DATASETS, DataError, Dataset
from spikefuse.models import MODELS
from spikefuse.nn import Temporal
from spikefuse.nn.losses import IGNORED
from spikefuse.train.fields import ConfigError

# What `register` adds to, by the name of the setting.
REGISTRIES: dict[str, dict[str, Any]] = {"model": MODELS, "dataset": DATASETS}
# The names that it has added, of modules that a user may import anew.
imported: set[str] = set()
BUILDER = "a builder, called as builder(neuron, in_channels, num_classes, size)"
ROWS = 1024  # of series that are checked at once, since they may be in a file
DATASET = "a spikefuse.data.Dataset(shape, classes, read)"


def is_reference(name: Any) -> bool:
    """Whether `name` has the form module:attribute."""
    return isinstance(name, str) and ":" in name


def register(setting: str, name: Any) -> None:
    """Import the model or dataset `name` into the registry of `setting`, unless it is there by
    other means.

    Names that are neither references nor entry points are left to the check of the setting.

    Raises:
        ConfigError: it cannot be imported, or is neither a builder nor a `Dataset`.
    """
    registry = REGISTRIES[setting]
    if not isinstance(name, str) or (name in registry and name not in imported):
        return
    reference = name
    if not is_reference(name):
        points = entry_points(group=f"spikefuse.{setting}s", name=name)
        if not points:
            return
        reference = next(iter(points)).value
    found = import_attribute(setting, reference)
    check(setting, reference, found)
    registry[name] = found
    imported.add(name)


def check(setting: str, name: str, found: Any) -> None:
    """Raise ConfigError unless what `name` stands for is a builder or a `Dataset`."""
    is_model = setting == "model"
    if wrong := _wrong_builder(found) if is_model else _wrong_dataset(found):
        expected = BUILDER if is_model else DATASET
        raise ConfigError(f"{setting} is {name}, {wrong}: expected {expected}")


def refuse_unknown(settings: dict[str, Any]) -> None:
    """Refuse references in the settings of a checkpoint that the user has not given too."""
    for setting, registry in REGISTRIES.items():
        name = settings.get(setting)
        if is_reference(name) and name not in registry:
            raise ConfigError(
                f"its {setting} is {name!r}, and importing that would execute code named by a "
                f"file: if you trust it, add --{setting} {name}, or {setting}={name!r} in Python"
            )


def options(settings: Any) -> list[str]:
    """Return the command-line options that a checkpoint with these settings needs to be loaded."""
    names = {setting: getattr(settings, setting) for setting in REGISTRIES}
    return [word for s, n in names.items() if is_reference(n) for word in (f"--{s}", n)]


def import_attribute(setting: str, reference: str) -> Any:
    """Import `module:attribute`, where modules are found as `python -m` finds them.

    Raises:
        ConfigError: the module or the attribute does not exist, or importing it failed.
    """
    module_name, _, attribute = reference.partition(":")
    given = f"{setting} is {reference}"
    names = [*module_name.split("."), *attribute.split(".")]
    if ".py:" in reference or not all(name.isidentifier() for name in names):
        raise ConfigError(f"{given}: expected module:name, such as my_code:small for my_code.py")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{given}, but {folder} and the installed packages have no module {missing}: start "
                f"in the folder of {module_name.replace('.', '/')}.py, or install its package"
            ) from error
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{given}, but importing {module_name} failed at line {place.lineno} of "
            f"{place.filename} ({what}): correct it"
        ) from error
    try:
        return attrgetter(attribute)(module)
    except AttributeError as error:
        near = difflib.get_close_matches(attribute, dir(module), 1)
        hint = f"did you mean {near[0]}?" if near else "define it there"
        where = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{given}, but {where} has no {attribute}: {hint}") from error


def _wrong_builder(found: Any) -> str:
    if isinstance(found, nn.Module) or not callable(found):
        return f"which is {_kind(found)}"
    try:
        inspect.signature(found).bind(None, 1, 1, (1, 1))
    except TypeError as error:
        return f"which does not take four arguments ({error})"
    except ValueError:  # of a function without a signature, such as one written in C
        pass
    return ""


def _wrong_dataset(found: Any) -> str:
    if not isinstance(found, Dataset):
        return f"which is {_kind(found)}"
    if len(found.shape) not in (1, 3) or not all(isinstance(n, int) and n > 0 for n in found.shape):
        return f"whose shape {found.shape} is not (C, H, W) or (W,)"
    if found.kind != "images" and "num_steps" not in found.transform:
        return f"which holds {found.kind} but has no num_steps in its transform"
    return ""


def _kind(found: Any) -> str:
    return "a function" if inspect.isroutine(found) else f"an object of type {type(found).__name__}"


def check_examples(config: Any, parts: Any) -> None:
    """Check what the `read` of the dataset of a `TrainConfig` has returned.

    Raises:
        DataError: the number of parts, a shape, a dtype, a label or a value of series is wrong.
    """
    dataset, task = config.data, config.make_task()
    read = f"the dataset {dataset.name} has read"
    if not isinstance(parts, tuple):
        wrong = [_kind(parts)]
    elif len(parts) not in (2, 3):
        wrong = [f"a tuple of {len(parts)} set{'' if len(parts) == 1 else 's'}"]
    else:
        wrong = [_kind(part) for part in parts if not hasattr(part, "labels")]
    if wrong:
        raise DataError(
            f"{read} {wrong[0]}: expected (training, test) or (training, validation, test) "
            "examples, each such as Images(pixels, labels)"
        )
    names = ("training", "test") if len(parts) == 2 else ("training", "validation", "test")
    for part, what in zip(parts, names, strict=True):
        labels = part.labels
        dtype, (_, *sizes) = task.target(len(part), config.num_steps)
        if labels.dtype != dtype or labels.shape != (len(part), *sizes) or len(part) == 0:
            expected = ", ".join(map(str, (len(part) or "N", *sizes)))
            of_steps = task.per_step and not task.of_classes and not labels.is_floating_point()
            hint = "; for classes, add --criterion cross-entropy" if of_steps else ""
            raise DataError(
                f"{read} {what} labels {labels.dtype} {list(labels.shape)}: expected {dtype} "
                f"[{expected}], one for each example, or another --task than {task.name}{hint}"
            )
        ignores = task.of_classes and task.per_step
        counted = labels[labels != IGNORED] if ignores else labels
        if counted.numel() == 0:
            raise DataError(f"{read} {what} labels of class {IGNORED} only: add others")
        low, high = counted.min().item(), counted.max().item()
        if not math.isfinite(low + high):
            raise DataError(f"{read} {what} labels from {low} to {high}: expected finite values")
        if task.of_classes and (low < 0 or high >= len(dataset.classes)):
            hint = "; leave out examples without a class" if low == IGNORED else ""
            hint = f", or {IGNORED} for steps that do not count" if ignores else hint
            raise DataError(
                f"{read} {what} labels from {low} to {high}: expected 0 to "
                f"{len(dataset.classes) - 1}, for its {len(dataset.classes)} classes{hint}"
            )
        pixels = part[:1].pixels
        dtype, shape = config.example
        if pixels.dtype != dtype or pixels.shape[1:] != shape:
            sizes = ("N", *pixels.shape[1:]), ("N", *shape)
            found, expected = (", ".join(map(str, names)) for names in sizes)
            raise DataError(
                f"{read} {what} {pixels.dtype} [{found}]: expected {dtype} [{expected}]"
            )
        for start in range(0, len(part) if dataset.kind == "series" else 0, ROWS):
            low, high = (v.item() for v in part[start : start + ROWS].pixels.aminmax())
            if not math.isfinite(low + high):
                raise DataError(f"{read} {what} values from {low} to {high}: expected finite ones")


def check_network(name: str, net: Any) -> None:
    """Check that a builder has returned a module for one time step, with values."""
    if not isinstance(net, nn.Module) or isinstance(net, Temporal):
        raise ConfigError(
            f"the builder {name} has returned {_kind(net)}: expected a torch.nn.Module for one "
            "time step, which the trainer wraps in Temporal"
        )
    for part, module in net.named_modules():
        if any(is_lazy(x) for x in (*module.parameters(False), *module.buffers(False))):
            raise ConfigError(
                f"the builder {name} has returned a network whose {part or 'layer'} is "
                f"{type(module).__name__}, without weights before its first call: give the sizes "
                "of its input, which follow from the arguments in_channels and size"
            )


def body_of(net: Any) -> nn.Module:
    """Return the network within a `Temporal`, or a module around some itself.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(net, Temporal):
        return net.net
    if isinstance(net, nn.Module) and any(isinstance(m, Temporal) for m in net.modules()):
        return net
    raise ConfigError(
        f"make_network has returned {_kind(net)}: expected a Temporal, or a module around some; "
        "wrap a network for one time step in spikefuse.Temporal, and in it layers that see all "
        "steps in spikefuse.OverTime"
    )
