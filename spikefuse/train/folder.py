"""The folder of a run."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import shutil
from pathlib import Path
from typing import Any

from spikefuse.data import DataError
from spikefuse.train import own
from spikefuse.train.checkpoint import BEST, LAST, LoadedRun, locked
from spikefuse.train.config import RunOptions, TrainConfig
from spikefuse.train.fields import ConfigError
from spikefuse.train.processes import Processes

RUNS = Path("runs")


def make(
    config: TrainConfig,
    options: RunOptions,
    resumed: LoadedRun | None,
    processes: Processes,
    held: contextlib.ExitStack,
) -> Path:
    """Return the folder of the run; the main process creates it if it is new, and locks it."""
    outcome: Any = None
    if processes.main:
        place = resumed.path.parent if resumed else options.out or RUNS
        try:
            str(place).encode()
            if resumed is None:
                outcome = _new_directory(config, options)
            else:
                outcome = _resumed_directory(config, resumed)
            held.enter_context(locked(outcome))
        except ConfigError as error:
            outcome = error
        except UnicodeEncodeError:
            outcome = ConfigError(
                f"the name of the folder {str(place)!r} is not UTF-8, which TensorBoard needs: "
                "rename it, or choose another with --out"
            )
        except OSError as error:
            what = f"cannot make the folder {place}, or write to it ({error.strerror})"
            outcome = ConfigError(f"{what}: choose another with --out")
    outcome = processes.broadcast(outcome)
    if isinstance(outcome, ConfigError):
        raise outcome
    return outcome


def _resumed_directory(config: TrainConfig, resumed: LoadedRun) -> Path:
    directory = resumed.path.parent
    if not resumed.resumable:
        raise ConfigError(
            f"{resumed.path} comes with spikefuse, was converted, or was saved by an earlier "
            "version: it can be tested, but not resumed; start a new run"
        )
    if resumed.history and not (directory / BEST).is_file():
        raise ConfigError(
            f"{directory / BEST} is missing: resume a run in the folder in which it started"
        )
    if config.epochs < len(resumed.history):
        raise ConfigError(
            f"epochs is {config.epochs}: {resumed.path} has done {len(resumed.history)} already"
        )
    return directory


def _new_directory(config: TrainConfig, options: RunOptions) -> Path:
    out = options.out
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists already: choose a new folder with --out")
        out.mkdir(parents=True, exist_ok=True)
        return out
    for number in itertools.count(1):
        name = f"{config.dataset}-{config.model}-{number}".replace(":", ".")
        directory = RUNS / name
        with contextlib.suppress(FileExistsError):
            directory.mkdir(parents=True)
            return directory
    raise AssertionError


def remove(directory: Path, existed: bool) -> None:
    """Delete what a run without a checkpoint wrote, except a folder that existed before it."""
    for path in directory.iterdir() if existed else [directory]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def resuming(last: Path, config: TrainConfig, options: RunOptions) -> str:
    """Return the options of `spikefuse train` that continue a run."""
    words = ["--resume", str(last), *own.options(config)]
    for name in ("device", "logger", "data_dir"):
        if (value := getattr(options, name)) not in (None, "auto"):  # the defaults
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def with_advice(
    error: Exception, config: TrainConfig, options: RunOptions, directory: Path
) -> Exception:
    """Return an error of a run, with what was saved, and the options that resume from it."""
    kinds = DataError, FloatingPointError, OSError
    kind = next(kind for kind in kinds if isinstance(error, kind))
    last = directory / LAST
    if not last.exists():
        return kind(f"{error}; nothing was saved")
    return kind(f"{error}; saved {last}: continue with {resuming(last, config, options)}")
