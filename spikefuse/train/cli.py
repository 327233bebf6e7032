"""The command `spikefuse`."""

from __future__ import annotations

import argparse
import csv
import difflib
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

import spikefuse
from spikefuse.data import DataError
from spikefuse.data.files import ENVIRONMENT
from spikefuse.train import output, own
from spikefuse.train.config import TrainConfig
from spikefuse.train.fields import ConfigError
from spikefuse.train.run_options import RunOptions

USER_ERROR, FAILURE = 2, 1
# Time for the main process to report a user's error before the others exit.
PATIENCE_SECONDS = 10.0
EXTRA = ("lightning", "tensorboard", "matplotlib", "tqdm", "yaml")
# Settings that a resumed run may change without changing its result.
RESUMABLE = ("epochs", "cuda_graph", "fuse", "memory")
ALIASES = {"num_steps": ("-T",), "dataset": ("--data",)}
# More choices than this are listed below an option instead of beside its name.
MAX_INLINE_CHOICES = 4

# Titles of groups of options, by the field of TrainConfig with which a group begins.
GROUPS = {"dataset": "model and data", "epochs": "training", "precision": "computation"}

TRAIN_EXAMPLES = f"""\
examples:
  spikefuse train                                   handwritten digits, under a minute on a CPU
  spikefuse train --neuron plif -T 16 --seed 1
  spikefuse train --dataset mnist --download --model resnet18 -T 32 --encoding poisson \\
      --epochs 5 --batch-size 100 --shift 0
  spikefuse train --config temporal-fusion-mnist-resnet18 --download
  spikefuse train --model my_code:small --dataset my_code:shapes          code in my_code.py, here
  spikefuse train --dataset folder --data-dir photos --size 64                   images of your own
  spikefuse train --dataset events --data-dir recordings --model resnet18    recordings of your own
  spikefuse train --resume runs/digits-conv-1
  torchrun --nproc_per_node 2 -m spikefuse train --batch-size 64
  torchrun --nproc_per_node 4 -m spikefuse train --time-ranks 2 --data-ranks 2 -T 32
  tensorboard --logdir runs

A run writes last.ckpt, best.ckpt (highest validation accuracy, or for values the lowest loss),
metrics.csv and TensorBoard logs to its folder, and at the end curves.png, raster.png and
result.json. A tenth of the training examples is used for validation, unless the dataset has a
validation set. The test examples are used once, at the end, with the best epoch. Ctrl-C saves a
checkpoint and prints the command that resumes the run.

The digits come with scikit-learn. All other datasets are read from --data-dir, else ${ENVIRONMENT},
else the folder data/ of a source checkout of spikefuse, else the user's cache.
"""

PREDICT_NOTES = """\
examples:
  spikefuse predict runs/digits-conv-1/best.ckpt three.png
  spikefuse predict runs/digits-conv-1/best.ckpt --top 3 --csv photos > classes.csv
  spikefuse predict runs/nmnist-conv-1/best.ckpt data/nmnist/Test/7

Files must be of the kind that the network was trained on: images (PNG, JPEG and others), event
recordings (nmnist and ncaltech101 .bin, dvs_gesture and cifar10_dvs .aedat, shd and ssc .h5), or
sounds (speech_commands .wav).
Images are converted to the network's size and channels: scaled so that the shorter side fits, and
cropped at the centre. Colours are not inverted: mnist and digits have bright digits on black.
Folders are searched recursively. A file with several recordings has one row for each: file[0],
file[1] and so on.

A file that cannot be read is reported, the others are classified, and the exit code is 1.
"""


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, and suggests the nearest option for an unknown one."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, *arguments: Any, **keywords: Any) -> Any:
        namespace, unknown = super().parse_known_args(*arguments, **keywords)
        if unknown:
            option = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(option, self._option_string_actions, 1, cutoff=0.75)
            hint = f", did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks, and names with hyphens whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


# Options have to be written in full.
_EXACT: dict[str, Any] = {"formatter_class": _Formatter, "allow_abbrev": False}


def make_parser() -> argparse.ArgumentParser:
    text = "Train and use spiking neural networks."
    parser = _Parser(prog="spikefuse", description=text, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"spikefuse {spikefuse.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_eval(commands)
    _add_predict(commands)
    return parser


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train and test a network",
        usage="%(prog)s [OPTION ...]",
        description="Train a spiking neural network on images, event data, sounds or series.",
        epilog=TRAIN_EXAMPLES,
        **_EXACT,
    )
    for f in fields(TrainConfig):
        if f.metadata["kind"] is tuple:  # found in the files
            continue
        if f.name in GROUPS:
            group = train.add_argument_group(GROUPS[f.name])
        _add_option(group, f.name, f.metadata)
    group = train.add_argument_group("files, devices and processes")
    group.add_argument(
        "--config",
        type=Path,
        metavar="YAML",
        help="file of options, or the name of a recipe; the command line overrides it",
    )
    group.add_argument(
        "--resume", type=Path, metavar="CKPT", help="checkpoint, or folder, of the run to continue"
    )
    _add_run_options(group, *(f.name for f in fields(RunOptions)))


def _add_run_options(group: Any, *names: str) -> None:
    for f in fields(RunOptions):
        if f.name in names:
            _add_option(group, f.name, f.metadata, f.default)


def _add_option(
    group: Any, name: str, option: Mapping[str, Any], default: Any = argparse.SUPPRESS
) -> None:
    """Add an option; without a default, the namespace lacks it unless it is given."""
    text, kind = option["help"], option["kind"]
    values: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if kind is not bool:
        choices = (option["allowed"] or ()) if kind is str else ()
        plain = {Path: "PATH", str: "NAME"}.get(kind, "N")
        metavar = "|".join(choices) or plain
        if len(choices) > MAX_INLINE_CHOICES:
            metavar, text = "NAME", f"{text}: {', '.join(choices)}"
        values = {"type": kind, "metavar": metavar}
    group.add_argument(
        f"--{name.replace('_', '-')}",
        *ALIASES.get(name, ()),
        default=default,
        help=f"{text} (default: {option['shown']})",
        **values,
    )


def _add_eval(commands: Any) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="test a checkpoint",
        description="Print the loss and the metrics of a checkpoint on the test samples.",
        epilog="example:\n  spikefuse eval runs/digits-conv-1/best.ckpt",
        **_EXACT,
    )
    _add_checkpoint(evaluate)
    (fuse,) = (f.metadata for f in fields(TrainConfig) if f.name == "fuse")
    _add_option(evaluate, "fuse", {**fuse, "shown": "as in training"})
    _add_run_options(evaluate, "device", "data_dir", "download")


def _add_checkpoint(command: argparse.ArgumentParser) -> None:
    """Add the checkpoint, and the options that allow it to use a user's own code."""
    command.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="best.ckpt or last.ckpt of a run, or its folder, for best.ckpt",
    )
    for name, form in (("model", "module:builder"), ("dataset", "module:dataset")):
        text = f"your own {name} of the run, which is imported and so executes code"
        command.add_argument(f"--{name}", metavar=form, help=text)


def _add_predict(commands: Any) -> None:
    predict = commands.add_parser(
        "predict",
        help="apply a trained network to files",
        usage="%(prog)s [OPTION ...] CHECKPOINT FILE [FILE ...]",
        description="Print the class of each file and its probability, or the predicted values.",
        epilog=PREDICT_NOTES,
        **_EXACT,
    )
    _add_checkpoint(predict)
    predict.add_argument("files", type=Path, nargs="+", metavar="FILE", help="files or folders")
    for name, default, text in (
        ("--top", 1, "classes per example, the most probable first; all values are shown"),
        ("--batch-size", 32, "examples per batch"),
    ):
        text += f" (default: {default})"
        predict.add_argument(name, type=int, default=default, metavar="N", help=text)
    form = predict.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    form.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    _add_run_options(predict, "device")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    output.open_closed_streams()
    arguments = make_parser().parse_args(argv)
    command = f"spikefuse {arguments.command}"
    try:
        commands = {"train": _train, "eval": _eval, "predict": _predict}
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
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        missing = f'{error.name} is not installed: pip install "spikefuse[train]"'
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
    from spikefuse.train import checkpoint, run
    from spikefuse.train.processes import PeerLost
    from spikefuse.train.signals import RunInterrupted

    _resume_after_restart(arguments, checkpoint.LAST)
    resumed = None
    if arguments.resume is not None:
        arguments.resume = checkpoint.in_folder(arguments.resume, checkpoint.LAST)
        resumed = checkpoint.load(arguments.resume)
        config = _resumed_config(resumed.config, given, arguments)
    options = RunOptions(**{f.name: getattr(arguments, f.name) for f in fields(RunOptions)})
    try:
        run.train(config, options, resumed)
    except RunInterrupted as stop:
        if _main_process():
            output.complain(_how_to_resume(stop.checkpoint, arguments, own.options(config)))
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
        fixed = name not in RESUMABLE
        if name == "epochs":
            fixed = saved.schedule != "constant"  # other schedules depend on the run's length
        if fixed and value != getattr(saved, name):
            raise ConfigError(
                f"{name} is {value}, but {arguments.resume} was trained with "
                f"{getattr(saved, name)}: remove it, or start a new run without --resume"
            )
    return replace(saved, **given)


def _eval(arguments: argparse.Namespace) -> int:
    from spikefuse.train import checkpoint, predict

    path = checkpoint.in_folder(arguments.checkpoint, checkpoint.BEST)
    loaded = checkpoint.load(path, _own_names(arguments))
    if "fuse" in arguments:
        # Evaluation has no backward pass, so the memory policy of training need not apply.
        own = {"fuse": arguments.fuse, "memory": "recompute"}
        loaded = replace(loaded, config=replace(loaded.config, **own))
    options = RunOptions(
        device=arguments.device, data_dir=arguments.data_dir, download=arguments.download
    )
    metrics, config = predict.evaluate_checkpoint(loaded, options), loaded.config
    if _main_process():
        described = config.make_task().describe(metrics)
        print(f"test {described}, loss {metrics['loss']:.4f} ({config.dataset})")
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    """Print predictions as they are computed, JSON at the end; return 1 if a file failed."""
    from spikefuse.train import predict

    for name in ("top", "batch_size"):
        if (value := getattr(arguments, name)) < 1:
            raise ConfigError(f"{name} is {value}: expected a whole number of at least 1")
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


def _own_names(arguments: argparse.Namespace) -> dict[str, str | None]:
    return {"model": arguments.model, "dataset": arguments.dataset}


def _how_to_resume(
    checkpoint: Path | None, arguments: argparse.Namespace, options: list[str]
) -> str:
    if checkpoint is None:
        return "stopped before anything was saved"
    command = [*_program(), "train", "--resume", str(checkpoint), *options]
    if arguments.device != "auto":
        command += ["--device", arguments.device]
    if arguments.logger is not None:
        command += ["--logger", arguments.logger]
    if arguments.data_dir is not None:
        command += ["--data-dir", str(arguments.data_dir)]
    return f"stopped; saved {checkpoint}; resume with:\n  {shlex.join(command)}"


def _main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _program() -> list[str]:
    """Return the command that started this program, for the user to repeat."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return ["torchrun", "--nproc_per_node", os.environ["LOCAL_WORLD_SIZE"], "-m", "spikefuse"]
    called = sys.argv[0]
    if Path(called).name == "__main__.py":
        return [sys.executable, "-m", "spikefuse"]
    return ["spikefuse" if shutil.which("spikefuse") == called else called]
