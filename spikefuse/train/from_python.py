"""Training from Python, as `spikefuse train` does it."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spikefuse.data import Dataset
from spikefuse.train import own, run
from spikefuse.train.checkpoint import LAST, load
from spikefuse.train.config import RunOptions, TrainConfig
from spikefuse.train.fields import ConfigError, unknown

Builder = Callable[..., nn.Module]
# Settings that the files of a dataset determine, which are lists in JSON.
OF_FILES = ("classes", "shape")


def fit(
    config: TrainConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    model: str | Builder | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a network, test it, and write checkpoints, metrics and plots into a folder.

    It is the same run as that of `spikefuse train` with the same options. Kernels that one call
    has compiled serve the next ones in the process.

    Example::

        result = sf.train.fit(dataset="digits", model="conv", epochs=2, out="runs/digits")
        print(result["test_accuracy"])
        net = sf.load("runs/digits")

    Args:
        config: the settings; those of `TrainConfig()` by default.
        out: new folder of the run; by default `runs/DATASET-MODEL-N`.
        resume: finish the run in `out`, if there is one with these settings; if it is complete,
            return its result. More `epochs` extend a run with a constant schedule; `cuda_graph`,
            `fuse` and `memory` may differ.
        model: a name, as `--model` takes it, or a builder `f(neuron, in_channels, num_classes,
            size)`, which checkpoints know as `module:name`.
        settings: fields of `TrainConfig`, such as `epochs=3`, which take the place of those of
            `config`, and options of the run: `device`, `data_dir`, `download`, `logger`.

    Returns:
        The content of `result.json`.

    Warns:
        UserWarning: `model` has the name of another function of an earlier run.

    Raises:
        ConfigError, DataError: a setting or a file is invalid, or the run in `out` has other
            settings.
        TypeError: there is no such setting.
        FloatingPointError, OSError, RunInterrupted: as documented in docs/training.md.
    """
    names = {f.name for f in fields(RunOptions)}
    known = [*names, *(f.name for f in fields(TrainConfig))]
    for name in settings.keys() - {*known}:
        raise TypeError(unknown(name, known))
    options = RunOptions(
        out=None if out is None else Path(out),
        **{name: settings.pop(name) for name in names & settings.keys()},
    )
    if isinstance(settings.get("dataset"), Dataset):
        raise ConfigError(
            "dataset is a Dataset: name it as module:dataset, for checkpoints, or for files of "
            "your own choose folder or events, with data_dir"
        )
    if model is not None:
        settings["model"] = model if isinstance(model, str) else _registered(model)
    if not isinstance(config, TrainConfig | None):
        raise ConfigError(f"config is {config!r:.80}: expected a TrainConfig, or fit(dataset=...)")
    config = TrainConfig(**settings) if config is None else config.replaced(**settings)
    if resume and options.out is not None and options.out.exists():
        result, last = options.out / "result.json", options.out / LAST
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text())
            of_files = {name: tuple(found["config"].get(name) or ()) or None for name in OF_FILES}
            stored = TrainConfig.from_dict({**found["config"], **of_files})
            _check(stored, config, options.out)
            if config.epochs == stored.epochs:
                return found
        if result.exists() or last.exists():
            loaded = load(last)
            config = _check(loaded.config, config, options.out)
            return _train(config, replace(options, out=None), loaded)
        shutil.rmtree(options.out)  # the run ended in its first epoch
    return _train(config, options)


def _train(*arguments: Any) -> dict[str, Any]:
    """Train, and then restore PyTorch's random generators, such as for a random search."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        return run.train(*arguments)


def _registered(builder: Builder) -> str:
    own.check("model", f"{builder!r:.80}", builder)
    if not hasattr(builder, "__qualname__"):  # such as functools.partial
        raise ConfigError(f"model is {builder!r:.80}, which has no name: define a function")
    name = f"{builder.__module__}:{builder.__qualname__}"
    if getattr(sys.modules.get(builder.__module__), builder.__qualname__, None) is not builder:
        own.imported.discard(name)  # its name stands for another one
    before = own.REGISTRIES["model"].get(name, builder)
    if _content(before) != _content(builder):
        warnings.warn(
            f"{name} now is another function than in an earlier run: sf.load would build the "
            "network of that run with the new one; give functions names of their own",
            stacklevel=3,
        )
    own.REGISTRIES["model"][name] = builder
    return name


def _content(builder: Any) -> tuple[Any, ...]:
    """Return what tells a function from another one of its name: a notebook may repeat it."""
    if not inspect.isfunction(builder):
        return (id(builder),)
    cells = tuple(repr(cell.cell_contents) for cell in builder.__closure__ or ())
    return builder.__code__, repr(builder.__defaults__), cells


def _check(stored: TrainConfig, config: TrainConfig, out: Path) -> TrainConfig:
    """Return the settings, with what the files of the run in `out` have determined.

    Raises:
        ConfigError: the run has others that it cannot change.
    """
    found = {name: getattr(stored, name) for name in OF_FILES if getattr(config, name) is None}
    config = config.replaced(**found)
    for field in fields(TrainConfig):
        before, now = getattr(stored, field.name), getattr(config, field.name)
        if before != now and field.name not in stored.changeable:
            raise ConfigError(
                f"the run in {out} has {field.name} {before}, not {now}: choose another folder"
            )
    return config
