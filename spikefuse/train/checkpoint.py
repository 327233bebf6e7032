"""Checkpoint files, written atomically and validated when loaded, and the lock of their folder."""

from __future__ import annotations

import contextlib
import io
import os
import pickletools
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor, nn

try:
    import fcntl
except ImportError:  # on Windows, where runs are not locked
    fcntl = None  # type: ignore[assignment]

import spikefuse
from spikefuse.train import own
from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError

# Key of this library's entry in a Lightning checkpoint.
KEY = "spikefuse"
# Stored in that entry: increase it when this version cannot read what the next one saves.
FORMAT = 1
# Settings that checkpoints of earlier versions lack, with what they did.
EARLIER = {"decay_all": True}
LAST = "last.ckpt"
BEST = "best.ckpt"
LOCK = ".lock"
# Networks that come with spikefuse: files NAME.ckpt.
PRETRAINED = Path(spikefuse.__file__).parent / "models" / "weights"

# Entries of an archive of torch.save, below a folder; and what a pickle in it may name. PyTorch
# allows more, such as torch.Tensor(size) and bytearray(size), which allocate any size, and storages
# without a dtype, which tensors of rare dtypes (uint16, float8) need: such are not read.
ENTRY = re.compile(
    r"([^/]+)/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment"
    r"|\.data/serialization_id)"
)
GLOBAL = re.compile(
    r"collections (OrderedDict|Counter)|builtins set"
    r"|torch\._utils _rebuild_(tensor_v2|parameter)"
    r"|torch (\w+Storage|Size|device|b?float\d\w*|u?int\d+|bool)"
)

EpochMetrics = dict[str, float]


def best_epoch(history: list[EpochMetrics]) -> EpochMetrics:
    """Return the first epoch with the highest validation accuracy and, among those, lowest loss.

    Of values, it is the one with the lowest loss.
    """
    return max(history, key=lambda row: (row.get("val_accuracy", 0.0), -row["val_loss"]))


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the folder of a run, and delete what a killed run left half written in it.

    The lock is advisory, and ends with the process, however it ends.

    Raises:
        ConfigError: another process holds it.
        OSError: the folder is not writable.
    """
    with contextlib.ExitStack() as held:
        path = directory / LOCK
        while True:
            file = held.enter_context(path.open("a+"))
            if not _lock(file.fileno()):
                file.seek(0)
                owner = file.readline().strip() or "another process"
                raise ConfigError(f"{directory} is in use by {owner}: wait for its end, or stop it")
            with contextlib.suppress(FileNotFoundError):
                # Otherwise its last owner has deleted it since it was opened.
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    break
        held.callback(path.unlink, missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        for partial in directory.glob(".*.partial"):
            partial.unlink(missing_ok=True)
        yield


def _lock(descriptor: int) -> bool:
    """Lock a file; return False if another process has."""
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return True


@dataclass(frozen=True)
class LoadedRun:
    """A checkpoint in memory.

    Args:
        history: metrics of each finished epoch.
        weights: state dict of the Lightning module.
        resumable: whether the file contains the step count that resuming needs.
        labels: checksums of the labels of each part of the examples; None if unknown.
    """

    path: Path
    config: TrainConfig
    history: list[EpochMetrics]
    weights: dict[str, Any]
    resumable: bool
    labels: list[int] | None = None


def entry(config: TrainConfig, history: list[EpochMetrics]) -> dict[str, Any]:
    """Return what each checkpoint has under `KEY`."""
    about = {"format": FORMAT, "version": spikefuse.__version__}
    return {**about, "config": config.to_dict(), "history": history}


def in_folder(path: Path, name: str) -> Path:
    """Return the checkpoint of a name in a run's folder, or the path itself if it is no folder.

    A path that does not exist may be the name of a network that comes with spikefuse.
    """
    if path.is_dir():
        return path / name
    pretrained = PRETRAINED / f"{path.name}.ckpt"
    known = len(path.parts) == 1 and not path.exists() and pretrained.is_file()
    return pretrained if known else path


def load(path: Path, names: Mapping[str, str | None] | None = None) -> LoadedRun:
    """Load a checkpoint without executing any code in it, or named by it.

    Args:
        path: as for `in_folder`, where the name is `BEST`.
        names: model and dataset to use in place of those that it names, if they are not None; a
            user's own are imported.

    Raises:
        ConfigError: the file is missing, damaged (the checksums of its entries are verified), not a
            checkpoint of spikefuse, or saved by a newer version; or its model or dataset is a
            user's own that this process has not imported, and not in `names`.
    """
    given = {setting: name for setting, name in (names or {}).items() if name is not None}
    for setting in given:
        own.register(setting, given[setting])
    path = in_folder(path, BEST)
    hint = f"expected {LAST} or {BEST} from a run of spikefuse train"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PRETRAINED.glob("*.ckpt")))
        raise ConfigError(f"checkpoint {path} does not exist: {hint}, or one of {known}")
    try:
        file = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read checkpoint {path}: {error.strerror or error}") from error
    try:
        if name := _damaged_entry(file):
            raise ConfigError(
                f"it is damaged: the checksum of {name} is wrong; use an intact copy, or another "
                "checkpoint of the run"
            )
        content = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise TypeError("not a checkpoint of Lightning")
        entry = content[KEY]
        if entry.get("format", FORMAT) > FORMAT:
            raise ConfigError(
                f"it was saved by spikefuse {entry['version']}, and this is "
                f"{spikefuse.__version__}: pip install --upgrade spikefuse"
            )
        settings = {**EARLIER, **entry["config"], **given}
        if settings.pop("memory_budget", None) is not None:  # of a policy that chose by itself
            settings["memory"] = "recompute"
        config, history = TrainConfig.from_dict(settings), entry["history"]
        _check_mapping(content["state_dict"], Tensor)
        if not isinstance(history, list):
            raise TypeError(f"history is {type(history).__name__}")
        for row in history:
            _check_mapping(row, float, int)
        if resumable := "step" in entry:
            _check_mapping(entry.get("tally", {}), list, float, int)
        labels = entry.get("labels")
        if labels is not None:
            _check_mapping({str(i): value for i, value in enumerate(labels)}, int)
        return LoadedRun(path, config, history, content["state_dict"], resumable, labels)
    except ConfigError as error:
        raise ConfigError(f"checkpoint {path}: {error}") from error
    except Exception as error:  # a damaged or foreign pickle may raise anything
        raise ConfigError(f"{path} is damaged or not a checkpoint of spikefuse: {hint}") from error


def _damaged_entry(file: io.BytesIO) -> str | None:
    """Return the name of an entry with a wrong checksum: torch.load does not verify them.

    Raises:
        ValueError: the file is not as torch.save writes it, so that torch.load might see another
            content than is checked here, or it calls what may allocate any size.
    """
    with ZipFile(file) as archive:
        entries = archive.infolist()
        stored = all(entry.compress_type == ZIP_STORED for entry in entries)
        if not stored or sum(entry.file_size for entry in entries) > file.getbuffer().nbytes:
            raise ValueError("its content is larger than the file")
        names = [ENTRY.fullmatch(entry.filename) for entry in entries]
        parts = {(name[1], name[2]) for name in names if name}
        if len(parts) < len(entries) or len({root for root, _ in parts}) != 1:
            raise ValueError("it has entries of other names, or several of one name")
        if _directory_offset(file.getvalue()) != archive.start_dir:
            raise ValueError("it holds several archives")
        for entry in entries:
            if entry.filename.endswith("/data.pkl"):
                _check_pickle(archive.read(entry))
        name = archive.testzip()
    file.seek(0)
    return name


def _directory_offset(content: bytes) -> int:
    """Return where the directory of an archive begins, as its last bytes say, or -1."""
    if content[:4] != b"PK\3\4" or content[-22:-18] != b"PK\5\6":
        return -1
    if content[-42:-38] != b"PK\6\7":
        return int.from_bytes(content[-6:-2], "little")
    is_adjacent = int.from_bytes(content[-34:-26], "little") == len(content) - 98
    return int.from_bytes(content[-50:-42], "little") if is_adjacent else -1


def _check_pickle(content: bytes) -> None:
    """Refuse calls and classes that torch.load allows, but no checkpoint has."""
    for opcode, argument, _ in pickletools.genops(content):
        is_name = opcode.name in ("GLOBAL", "INST")
        if opcode.proto > 2 or (is_name and not GLOBAL.fullmatch(str(argument))):
            raise ValueError(f"{opcode.name} {argument}")


def same_types(saved: Any, known: Any) -> bool:
    """Whether the entries of nested dicts have the types of those that are `known`."""
    if isinstance(known, dict):
        return isinstance(saved, dict) and all(
            same_types(saved[name], value) for name, value in known.items() if name in saved
        )
    return known is None or type(saved) is type(known)


def _check_mapping(values: Any, *kinds: type) -> None:
    if not isinstance(values, dict):
        raise TypeError(f"expected a dict, got {type(values).__name__}")
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, kinds):
            raise TypeError(f"{name!r} is {type(value).__name__}")


def load_weights(module: nn.Module, loaded: LoadedRun) -> None:
    """Copy the weights of a checkpoint into a module whose attribute `net` is the network.

    Raises:
        ConfigError: they do not fit.
    """
    try:
        module.load_state_dict(loaded.weights)
    except (RuntimeError, TypeError) as error:
        model = loaded.config.model
        cause = "they are of another model or dataset, or of another version of spikefuse"
        if own.is_reference(model):
            cause = "it is another model, or its code has changed since"
        raise ConfigError(
            f"the weights in {loaded.path} do not fit the model {model}: {cause}"
        ) from error
