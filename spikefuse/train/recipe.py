"""Recipes: YAML files of `spikefuse train` options."""

from __future__ import annotations

import difflib
import re
import reprlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from spikefuse.train.config import RunOptions, TrainConfig
from spikefuse.train.fields import ConfigError, kinds, unknown

# Options of a place or of processes; only the command line accepts them.
PLACE = ("config", "resume", *(f.name for f in fields(RunOptions)))
# Settings that are no options: the files of a dataset determine them. `result.json` has them, too.
NO_OPTIONS = [f.name for f in fields(TrainConfig) if not f.metadata]
# Numbers of one meaning: YAML reads 010 as 8, 1_0 as 10 and 1:30 as 90.
DECIMAL = re.compile(r"[-+]?(0|[1-9]\d*|(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+)", re.ASCII)
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

#: The recipes of this package, by name.
RECIPES = {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}


def read(path: Path) -> dict[str, Any]:
    """Read a recipe; the keys of the result are names of `TrainConfig` fields.

    Of a `result.json`, or another mapping with an entry config, this entry is read.

    Args:
        path: a file, or the name of one of `RECIPES`.

    Raises:
        ConfigError: the file is missing or not YAML, or has an unknown or invalid entry.
    """
    if not path.exists():
        path = RECIPES.get(str(path), path)
    try:
        settings = _settings(path.read_text())
        TrainConfig(**settings)
    except ConfigError as error:
        raise ConfigError(f"config {path}: {error}") from error
    except OSError as error:
        near = difflib.get_close_matches(path.stem, RECIPES, 1, 0.4)
        hint = f"; a recipe is called {near[0]}" if near and not path.exists() else ""
        raise ConfigError(f"cannot read config {path}: {error.strerror or error}{hint}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        place = "" if where is None else f", line {where.line + 1}"
        raise ConfigError(
            f"config {path}{place}: not YAML: expected lines like 'lr: 0.1'"
        ) from error
    return settings


def _settings(text: str) -> dict[str, Any]:
    """Return the settings in a document, which is not constructed as a whole: the last of repeated
    keys would win, and references in lists could expand to any size."""
    document, loader = yaml.compose(text, yaml.SafeLoader), yaml.SafeLoader("")
    if not isinstance(document, yaml.MappingNode) or not document.value:
        raise ConfigError("expected lines like 'lr: 0.1', an option and its value")
    for key, value in document.value:
        if key.value == "config" and isinstance(value, yaml.MappingNode):  # of a result.json
            document = value
            break
    settings: dict[str, Any] = {}
    for key, value in document.value:
        if key.value in NO_OPTIONS:
            continue
        line = f"line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode):
            raise ConfigError(f"{line}: expected one value, as in 'lr: 0.1'")
        name = key.value.replace("-", "_")
        if name in settings:
            raise ConfigError(f"{name} is given twice, again in {line}: remove one")
        if value.tag in NUMBERS and not DECIMAL.fullmatch(value.value):
            raise ConfigError(
                f"{line}: {name} is {reprlib.repr(value.value)}: expected a decimal number, such "
                "as 10 or 1e-3"
            )
        settings[name] = _convert(name, loader.construct_object(value))
    return settings


def _convert(name: str, value: Any) -> Any:
    """Convert a value to the type of its option: YAML reads 1e-3 as a string, 32 as a number."""
    names = [f.name for f in fields(TrainConfig) if f.metadata]
    if name in PLACE:
        raise ConfigError(
            f"{name} is accepted on the command line only: pass --{name.replace('_', '-')}"
        )
    if name not in names:
        raise ConfigError(unknown(name, names))
    kind = kinds(TrainConfig)[name]
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if kind is float and isinstance(value, str) and DECIMAL.fullmatch(value):
        return float(value)
    return value  # TrainConfig reports a wrong type
