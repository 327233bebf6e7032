"""Recipes: YAML files whose entries are options of `spikefuse train`."""

from __future__ import annotations

import difflib
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from spikefuse.train.config import ConfigError, TrainConfig

# Options of `spikefuse train` that say where a run takes place, not what it is.
PLACE = ("config", "data_dir", "device", "download", "out", "resume")


def read(path: Path) -> dict[str, Any]:
    """The settings in a recipe, under the names of `TrainConfig`'s fields.

    Raises:
        ConfigError: the file is missing or no YAML, or has an entry that is unknown or wrong.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f", line {where.line + 1}"
        raise ConfigError(
            f"config {path}{line}: not YAML: expected lines like 'lr: 0.1'"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"config {path}: expected lines like 'lr: 0.1', an option and its value")
    settings = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        settings[name] = _typed(name, value, path)
    try:
        TrainConfig(**settings)
    except ConfigError as error:
        raise ConfigError(f"config {path}: {error}") from error
    return settings


def _typed(name: str, value: Any, path: Path) -> Any:
    """A value as the command line would read it: YAML takes 1e-3 for a text, 32 for a number."""
    kinds = {f.name: f.metadata["kind"] for f in fields(TrainConfig)}
    if name in PLACE:
        raise ConfigError(
            f"config {path}: {name} is an option of the command line alone: give it there, as "
            f"--{name.replace('_', '-')}"
        )
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, 1)
        hint = f": did you mean {near[0]}?" if near else "; see spikefuse train --help"
        raise ConfigError(f"config {path}: unknown option {name!r}{hint}")
    kind = kinds[name]
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if kind is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value  # refused by TrainConfig, with its reason
    return value
