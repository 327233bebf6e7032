"""Checkpoint files: written whole or not at all, and checked when read."""

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

from spikefuse.train.classifier import KEY, Row
from spikefuse.train.config import ConfigError, TrainConfig

LAST = "last.ckpt"
BEST = "best.ckpt"
# What torch.load raises on files that are not what it expects.
UNREADABLE = (
    *(RuntimeError, ValueError, LookupError, TypeError, EOFError, OSError),
    *(pickle.UnpicklingError, BadZipFile),
)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place if the block succeeds."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory.

    Args:
        path: where it was read.
        config: of its run.
        history: one row per epoch that its run had finished.
        weights: the state of the Lightning module.
        resumable: whether it counts its steps as this version does.
    """

    path: Path
    config: TrainConfig
    history: list[Row]
    weights: dict[str, Any]
    resumable: bool


def load(path: Path) -> Loaded:
    """Read a checkpoint, executing nothing that it may contain.

    Raises:
        ConfigError: it is missing, damaged, or not one of this library's.
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
        if not isinstance(content, dict) or KEY not in content:
            raise ValueError("not a checkpoint of this library")
        own = content[KEY]
        config, history = TrainConfig.from_dict(own["config"]), list(own["history"])
        return Loaded(path, config, history, content["state_dict"], "step" in own)
    except ConfigError as error:
        raise ConfigError(f"checkpoint {path}: {error}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path} is damaged or no checkpoint of spikefuse: {hint}") from error
