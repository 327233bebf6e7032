"""Recipes: YAML files of `spikefuse train` options."""

from __future__ import annotations

import difflib
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from spikefuse.train.config import ConfigError, TrainConfig

# Options that depend on the machine; only the command line accepts them.
PLACE = ("config", "data_dir", "device", "download", "out", "resume")


def read(path: Path) -> dict[str, Any]:
    """Read a recipe; the keys of the result are names of `TrainConfig` fields.

    Raises:
        ConfigError: the file is missing or not YAML, or has an unknown or invalid entry.
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
    try:
        settings = {}
        for key, value in content.items():
            name = str(key).replace("-", "_")
            settings[name] = _convert(name, value)
        TrainConfig(**settings)
    except ConfigError as error:
        raise ConfigError(f"config {path}: {error}") from error
    return settings


def _convert(name: str, value: Any) -> Any:
    """Convert a value to the type of its option: YAML reads 1e-3 as a string, 32 as a number."""
    kinds = {f.name: f.metadata["kind"] for f in fields(TrainConfig)}
    if name in PLACE:
        raise ConfigError(
            f"{name} is accepted on the command line only: pass --{name.replace('_', '-')}"
        )
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, 1)
        hint = f": did you mean {near[0]}?" if near else "; see spikefuse train --help"
        raise ConfigError(f"unknown option {name!r}{hint}")
    kind = kinds[name]
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if kind is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value  # TrainConfig reports it
    return value
