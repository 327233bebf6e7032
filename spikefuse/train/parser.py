"""The options of the command `spikefuse`, and their help."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import spikefuse
from spikefuse.data.files import ENVIRONMENT
from spikefuse.train.config import RunOptions, TrainConfig
from spikefuse.train.fields import describe, kinds

USER_ERROR = 2  # exit code
MEANT = {"--learning-rate": "--lr", "--no-shift": "--shift 0"}
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
recordings (nmnist and ncaltech101 .bin, dvs_gesture and cifar10_dvs .aedat, shd and ssc .h5; after
a run on your own, any format of --dataset events), or sounds (speech_commands .wav).
Images are converted to the network's size and channels: scaled so that the shorter side fits, and
cropped at the centre. Colours are not inverted: mnist and digits have bright digits on black.
Folders are searched recursively. A file with several recordings has one row for each: file[0],
file[1] and so on.

A file that cannot be read is reported, the others are classified, and the exit code is 1.
"""

EXPORT_NOTES = """\
examples:
  spikefuse export runs/digits-conv-1 --format onnx
  spikefuse export runs/digits-conv-1/best.ckpt --format onnx --step -o step.onnx
  spikefuse export runs/digits-conv-1 --format onnx --int8
  spikefuse export runs/digits-conv-1 --format nir --dt 0.001

onnx (pip install "spikefuse[onnx]") and pt2 take inputs as they are in the dataset, such as bytes
of images, and return logits or values, for any batch size. With --step, they take one step of the
encoded input, x, and the states of all neurons, whose values at rest are printed, and return the
output and the next states: net.2.v and next.net.2.v in ONNX, whose metadata has the names of the
classes. With --int8, weights are rounded and stored as int8, with a step for each output; compare
the accuracy. nir (pip install "spikefuse[nir]") has the layers alone.
"""

CONVERT_NOTES = """\
examples:
  spikefuse train --neuron relu --model conv --out runs/relu
  spikefuse convert runs/relu                       writes runs/relu/best-spiking.ckpt
  spikefuse convert runs/relu -T 32 --share 0.999 --per-channel -o spiking.ckpt
  spikefuse eval runs/relu/best-spiking.ckpt

The network must have been trained with --neuron relu, or with --neuron qcfs, a ReLU of 4 levels
that needs only -T 4. Thresholds are chosen on training examples. The report lists for each layer of
neurons the threshold, the share of activations above it, the rate of spikes and the error of the
mean output; then, after 1, 2, 4, ... steps, the error of the network's output and the accuracy on
the test examples. The commands eval, predict and export read the result, and sf.load in Python.
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks, and names with hyphens whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, and suggests the nearest option for an unknown one.

    Options have to be written in full.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, *arguments: Any, **keywords: Any) -> Any:
        namespace, unknown = super().parse_known_args(*arguments, **keywords)
        if unknown:
            option = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(option, self._option_string_actions, 1, cutoff=0.75)
            near = [MEANT[option]] if option in MEANT else near
            hint = f", did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="spikefuse", description="Train and use spiking neural networks.")
    parser.add_argument("--version", action="version", version=f"spikefuse {spikefuse.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_eval(commands)
    _add_predict(commands)
    _add_export(commands)
    _add_convert(commands)
    return parser


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train and test a network",
        usage="%(prog)s [OPTION ...]",
        description="Train a spiking neural network on images, event data, sounds or series.",
        epilog=TRAIN_EXAMPLES,
    )
    for f in fields(TrainConfig):
        if f.name in GROUPS:
            group = train.add_argument_group(GROUPS[f.name])
        if f.metadata:  # other fields are no options
            _add_options(group, TrainConfig, f.name)
    group = train.add_argument_group("files, devices and processes")
    text = "file of options, or the name of a recipe; the command line overrides it"
    group.add_argument("--config", type=Path, metavar="YAML", help=text)
    text = "checkpoint, or folder, of the run to continue"
    group.add_argument("--resume", type=Path, metavar="CKPT", help=text)
    _add_options(group, RunOptions, *(f.name for f in fields(RunOptions)))


def _add_options(group: Any, options: type, *names: str, shown: str = "") -> None:
    """Add fields of a dataclass; the namespace lacks those of `TrainConfig` that are not given."""
    for f in fields(options):
        if f.name not in names:
            continue
        kind, (text, default) = kinds(options)[f.name], describe(options)[f.name]
        values: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if kind is not bool:
            choices = (f.metadata["allowed"] or ()) if kind is str else ()
            plain = {Path: "PATH", str: "NAME"}.get(kind, "N")
            metavar = "|".join(choices) or plain
            if len(choices) > MAX_INLINE_CHOICES:
                metavar, text = "NAME", f"{text}; one of {', '.join(choices)}"
            values = {"type": kind, "metavar": metavar}
        group.add_argument(
            f"--{f.name.replace('_', '-')}",
            *ALIASES.get(f.name, ()),
            default=argparse.SUPPRESS if options is TrainConfig else f.default,
            help=f"{text} (default: {shown or default})",
            **values,
        )


def _add_eval(commands: Any) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="test a checkpoint",
        description="Print the loss and the metrics of a checkpoint on the test samples.",
        epilog="example:\n  spikefuse eval runs/digits-conv-1/best.ckpt",
    )
    _add_checkpoint(evaluate)
    _add_options(evaluate, TrainConfig, "fuse", shown="as in training")
    _add_options(evaluate, RunOptions, "device", "data_dir", "download")


def _add_checkpoint(command: argparse.ArgumentParser) -> None:
    """Add the checkpoint, and the options that allow it to use a user's own code."""
    command.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="best.ckpt or last.ckpt of a run, or its folder, for best.ckpt; or a network that "
        "comes with spikefuse, such as digits-conv",
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
    )
    _add_checkpoint(predict)
    predict.add_argument("files", type=Path, nargs="+", metavar="FILE", help="files or folders")
    values: dict[str, Any] = {"type": int, "metavar": "N"}
    text = "classes per example, the most probable first; all values are shown (default: 1)"
    predict.add_argument("--top", default=1, help=text, **values)
    text = "examples per batch (default: 32)"
    predict.add_argument("--batch-size", default=32, help=text, **values)
    form = predict.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON array instead of a table")
    form.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    _add_options(predict, RunOptions, "device")


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a trained network for other programs",
        usage="%(prog)s CHECKPOINT --format onnx|pt2|nir [OPTION ...]",
        description="Write the network of a checkpoint to a file that needs no spikefuse.",
        epilog=EXPORT_NOTES,
    )
    _add_checkpoint(export)
    formats: dict[str, Any] = {"choices": ("onnx", "pt2", "nir"), "metavar": "NAME"}
    add = export.add_argument
    add("--format", required=True, help="onnx, pt2 for torch.export, or nir", **formats)
    add("--step", action="store_true", help="export one time step, with all states of neurons")
    add("--int8", action="store_true", help="round weights to int8, as sf.quantize does")
    add("--dt", type=float, metavar="N", help="seconds of a step, for nir (default: 0.0001)")
    text = "file to write (default: beside the checkpoint, best.onnx or best-step.onnx)"
    add("-o", "--out", type=Path, metavar="FILE", help=text)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="turn a trained ReLU network into a spiking one",
        usage="%(prog)s [OPTION ...] CHECKPOINT",
        description="Turn the ReLU network of a checkpoint into a spiking one, by sf.from_ann.",
        epilog=CONVERT_NOTES,
    )
    _add_checkpoint(convert)
    values: dict[str, Any] = {"type": int, "metavar": "N"}
    add = convert.add_argument
    add("-T", "--num-steps", default=8, help="time steps to convert for (default: 8)", **values)
    add("--samples", default=512, help="training examples to use (default: 512)", **values)
    text = "of the activations that a threshold exceeds (default: the threshold of least error)"
    add("--share", type=float, metavar="N", help=text)
    add("--per-channel", action="store_true", help="choose a threshold for each channel")
    text = "checkpoint to write (default: best-spiking.ckpt beside best.ckpt)"
    add("-o", "--out", type=Path, metavar="FILE", help=text)
    _add_options(convert, RunOptions, "device", "data_dir", "download")
