"""Checkpoint files, written atomically and validated when loaded."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import nn

import spikefuse
from spikefuse.train.config import ConfigError, TrainConfig

# Key of this library's entry in a Lightning checkpoint.
KEY = "spikefuse"
# Stored in that entry: increase it when this version cannot read what the next one saves.
FORMAT = 1
LAST = "last.ckpt"
BEST = "best.ckpt"
# Errors of torch.load for files that are not checkpoints.
UNREADABLE = (
    *(RuntimeError, ValueError, LookupError, TypeError, EOFError, OSError),
    *(pickle.UnpicklingError, BadZipFile),
)

EpochMetrics = dict[str, float]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class LoadedRun:
    """A checkpoint in memory.

    Args:
        history: metrics of each finished epoch.
        weights: state dict of the Lightning module.
        resumable: whether the file contains the step count that resuming needs.
    """

    path: Path
    config: TrainConfig
    history: list[EpochMetrics]
    weights: dict[str, Any]
    resumable: bool


def load(path: Path) -> LoadedRun:
    """Load a checkpoint without executing any code in it.

    Raises:
        ConfigError: the file is missing, damaged, not a checkpoint of spikefuse, or saved by a
            newer version.
    """
    hint = f"expected {LAST} or {BEST} from a run of spikefuse train"
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"checkpoint {path} {what}: {hint}")
    try:
        file = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read checkpoint {path}: {error.strerror or error}") from error
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise TypeError("not a checkpoint of Lightning")
        own = content[KEY]
        if own.get("format", FORMAT) > FORMAT:
            raise ConfigError(
                f"it was saved by spikefuse {own['version']}, and this is {spikefuse.__version__}: "
                "pip install --upgrade spikefuse"
            )
        config, history = TrainConfig.from_dict(own["config"]), list(own["history"])
        return LoadedRun(path, config, history, content["state_dict"], "step" in own)
    except ConfigError as error:
        raise ConfigError(f"checkpoint {path}: {error}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path} is damaged or not a checkpoint of spikefuse: {hint}") from error


def load_weights(module: nn.Module, loaded: LoadedRun) -> None:
    """Copy the weights of a checkpoint into a module whose attribute `net` is the network.

    Raises:
        ConfigError: they do not fit.
    """
    try:
        module.load_state_dict(loaded.weights)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"the weights in {loaded.path} do not fit the model {loaded.config.model}: they come "
            "from another version of spikefuse"
        ) from error
