"""The command `spikefuse`."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import spikefuse
from spikefuse.data import DataError
from spikefuse.train import output
from spikefuse.train.config import RunOptions, TrainConfig
from spikefuse.train.fields import AT_LEAST_ONE, ConfigError, check
from spikefuse.train.parser import USER_ERROR, make_parser

FAILURE = 1
# Time for the main process to report a user's error before the others exit.
PATIENCE_SECONDS = 10.0
# The extra of the package that has a module.
EXTRAS = {
    **dict.fromkeys(("lightning", "tensorboard", "matplotlib", "tqdm", "yaml"), "train"),
    **{"onnx": "onnx", "onnxscript": "onnx", "nir": "nir"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    output.open_closed_streams()
    arguments = make_parser().parse_args(argv)
    command = f"spikefuse {arguments.command}"
    try:
        commands = {"train": _train, "eval": _eval, "predict": _predict, "export": _export}
        commands["convert"] = _convert
        code = commands[arguments.command](arguments)
        sys.stdout.flush()
        return code
    except (ConfigError, DataError) as error:
        if _main_process():
            output.complain(f"{command}: error: {_as_typed(str(error))}")
        else:
            # torchrun stops all processes when one exits: let the main one report the error first.
            time.sleep(PATIENCE_SECONDS)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        missing = f'{error.name} is not installed: pip install "spikefuse[{extra}]"'
        output.complain(f"{command}: error: {missing}")
    except KeyboardInterrupt:
        output.complain(f"{command}: interrupted")
        return 130
    except BrokenPipeError:  # the reader of the output, such as head, has all it wants
        output.flush()
        return FAILURE
    except (OSError, FloatingPointError) as error:
        output.flush()
        output.complain(f"{command}: error: {error}")
        return FAILURE
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        output.complain(
            f"{command}: error: out of memory: lower the batch size or the number of steps"
        )
        return FAILURE
    return USER_ERROR


def _as_typed(message: str) -> str:
    """Name options as on the command line: "batch_size is 0" becomes "--batch-size is 0"."""
    if message.startswith("config "):  # of a recipe, which names settings as fields
        return message
    names = [f.name for kind in (TrainConfig, RunOptions) for f in fields(kind)]
    long = "|".join(name for name in names if "_" in name)
    first = rf"^(?:{'|'.join(names)})(?= (?:is|are|needs) )"
    option = rf"(?<![\w/.'-])(?:{long})(?![\w/.'=(])"
    return re.sub(f"{first}|{option}", lambda m: f"--{m[0].replace('_', '-')}", message)


def _out_of_memory(error: Exception) -> bool:
    known = "can't allocate memory", "out of memory", "Storage size calculation overflowed"
    return isinstance(error, MemoryError) or any(text in str(error) for text in known)


def _train(arguments: argparse.Namespace) -> int:
    given = {f.name: getattr(arguments, f.name) for f in fields(TrainConfig) if f.name in arguments}
    if arguments.config is not None:
        from spikefuse.train import recipe

        given = {**recipe.read(arguments.config), **given}
    config = TrainConfig(**given)  # reports errors before the slow imports
    if _main_process():
        output.show(f"spikefuse {spikefuse.__version__}, PyTorch {torch.__version__}: starting")
    from spikefuse.train import checkpoint, folder, run
    from spikefuse.train.processes import PeerLost
    from spikefuse.train.signals import RunInterrupted

    _resume_after_restart(arguments, checkpoint.LAST)
    resumed = None
    if arguments.resume is not None:
        arguments.resume = checkpoint.in_folder(arguments.resume, checkpoint.LAST)
        resumed = checkpoint.load(arguments.resume)
        config = _resumed_config(resumed.config, given, arguments)
    options = _run_options(arguments)
    try:
        run.train(config, options, resumed)
    except RunInterrupted as stop:
        if _main_process():
            saved = "stopped before anything was saved"
            if (last := stop.checkpoint) is not None:
                command = f"{_program()} train {folder.resuming(last, config, options)}"
                saved = f"stopped; saved {last}; resume with:\n  {command}"
            output.complain(saved)
        return 128 + stop.signum
    except PeerLost as loss:
        print(f"spikefuse train: {loss}", file=sys.stderr, flush=True)
        # An orderly exit would wait for connections and the GPU.
        os._exit(1)
    return 0


def _resume_after_restart(arguments: argparse.Namespace, last: str) -> None:
    """Resume the run if torchrun --max-restarts has restarted this command."""
    if arguments.resume is not None or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return
    if arguments.out is None:
        raise ConfigError("a run that torchrun may restart needs a fixed folder: add --out DIR")
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and (arguments.out / last).is_file():
        arguments.resume, arguments.out = arguments.out / last, None


def _resumed_config(
    saved: TrainConfig, given: dict[str, Any], arguments: argparse.Namespace
) -> TrainConfig:
    if arguments.out is not None:
        raise ConfigError("out is given with resume: a resumed run continues in its own folder")
    for name, value in given.items():
        if name not in saved.changeable and value != getattr(saved, name):
            raise ConfigError(
                f"{name} is {value}, but {arguments.resume} was trained with "
                f"{getattr(saved, name)}: remove it, or start a new run without --resume"
            )
    return replace(saved, **given)


def _eval(arguments: argparse.Namespace) -> int:
    from spikefuse.train import checkpoint, predict

    loaded = checkpoint.load(arguments.checkpoint, _own_names(arguments))
    if "fuse" in arguments:
        # Evaluation has no backward pass, so the memory policy of training need not apply.
        own = {"fuse": arguments.fuse, "memory": "recompute"}
        loaded = replace(loaded, config=replace(loaded.config, **own))
    metrics = predict.evaluate_checkpoint(loaded, _run_options(arguments))
    if _main_process():
        described = loaded.config.make_task().describe(metrics)
        print(f"test {described}, loss {metrics['loss']:.4f} ({loaded.config.dataset})")
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    """Print predictions as they are computed, JSON at the end; return 1 if a file failed."""
    from spikefuse.train import predict

    for name in ("top", "batch_size"):
        check(name, getattr(arguments, name), int, AT_LEAST_ONE)
    network = predict.load(arguments.checkpoint, arguments.device, **_own_names(arguments))
    failed = []

    def report(error: str) -> None:
        failed.append(error)
        output.write(f"spikefuse predict: error: {error}", file=sys.stderr)

    files = predict.find_files(network, arguments.files)
    examples = predict.read_examples(network, output.progress(files, "predict"), report)
    rows = predict.predict(network, examples, arguments.batch_size, arguments.top)
    keys = "file", *network.task.columns
    if arguments.json:
        output.write(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1))
    elif arguments.csv:
        table = SimpleNamespace(write=partial(output.write, end=""))
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(keys)
        writer.writerows(rows)
    else:
        number_format = "11.4f" if network.task.of_classes else "11.4g"
        width, label_width = (max(map(len, map(str, w))) for w in (files, network.classes))
        for i, (file, *step, label, value) in enumerate(rows):
            if i == 0:
                head = "".join(f"{key:>6}" for key in keys[1:-2])
                output.write(f"{'file':<{width}}{head}  {keys[-2]:<{label_width}}  {keys[-1]:>11}")
            steps = "".join(f"{number:6}" for number in step)
            output.write(f"{file:<{width}}{steps}  {label:<{label_width}}  {value:{number_format}}")
    return 1 if failed else 0


def _export(arguments: argparse.Namespace) -> int:
    from spikefuse.train import checkpoint, export, predict

    path = checkpoint.in_folder(arguments.checkpoint, checkpoint.BEST)
    network = predict.load(path, "cpu", **_own_names(arguments))
    options = {name: getattr(arguments, name) for name in ("step", "dt", "int8")}
    suffix = "-int8" * arguments.int8 + "-step" * arguments.step
    out = _beside(path, arguments, f"{path.stem}{suffix}.{arguments.format}")
    text = export.export(network, arguments.format, out, **options)
    output.write(f"wrote {out}\n{text}")
    return 0


def _beside(path: Path, arguments: argparse.Namespace, name: str) -> Path:
    """Return where to write a file; checkpoints that come with spikefuse are in its own folder.

    Raises:
        ConfigError: it is a folder, or in none.
    """
    out = arguments.out or (path.parent if arguments.checkpoint.exists() else Path()) / name
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: give --out the name of a file")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} for {out.name}: make it, or set --out")
    return out


def _convert(arguments: argparse.Namespace) -> int:
    from spikefuse.train import checkpoint, convert

    for name in ("num_steps", "samples"):
        check(name, getattr(arguments, name), int, AT_LEAST_ONE)
    loaded = checkpoint.load(arguments.checkpoint, _own_names(arguments))
    out = _beside(loaded.path, arguments, f"{loaded.path.stem}-spiking.ckpt")
    convert.convert(loaded, arguments, _run_options(arguments), out)
    return 0


def _run_options(arguments: argparse.Namespace) -> RunOptions:
    names = [f.name for f in fields(RunOptions) if f.name in arguments]
    return RunOptions(**{name: getattr(arguments, name) for name in names})


def _own_names(arguments: argparse.Namespace) -> dict[str, str | None]:
    return {"model": arguments.model, "dataset": arguments.dataset}


def _main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _program() -> str:
    """Return the command that started this program, for the user to repeat."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return f"torchrun --nproc_per_node {os.environ['LOCAL_WORLD_SIZE']} -m spikefuse"
    called = sys.argv[0]
    if Path(called).name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m spikefuse"
    return "spikefuse" if shutil.which("spikefuse") == called else shlex.quote(called)
