"""The command `spikefuse`."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import spikefuse
from spikefuse.data import DataError
from spikefuse.data.files import ENVIRONMENT
from spikefuse.train.config import ConfigError, TrainConfig

USER_ERROR = 2
# For which other processes leave it to the main one to tell a user's error.
PATIENCE_SECONDS = 10.0
EXTRA = ("lightning", "tensorboard", "matplotlib", "tqdm", "yaml")
# What a resumed run may change: it continues to the same result.
RESUMABLE = ("epochs", "cuda_graph", "fuse", "memory", "memory_budget")
# Other spellings of an option, behind its name.
ALIASES = {"dataset": ("--data",)}
# Choices that fit beside an option's name in the help; more are listed below it.
FEW = 4

GROUPS = {
    "what to learn": (
        *("dataset", "model", "neuron", "decay", "threshold", "surrogate"),
        *("num_steps", "encoding", "slicing", "slice_us", "capacity", "overflow", "activity"),
    ),
    "how to learn": (
        *("epochs", "batch_size", "optimizer", "lr", "schedule", "warmup", "weight_decay"),
        *("loss", "label_smoothing", "activity_weight", "clip", "shift", "flip", "seed"),
    ),
    "how to compute": (
        *("precision", "accumulate", "tbptt", "fuse", "memory", "memory_budget"),
        *("channels_last", "cuda_graph", "sync_batch_norm"),
    ),
}

TRAIN_EXAMPLES = f"""\
examples:
  spikefuse train                                   handwritten digits, under a minute on a CPU
  spikefuse train --neuron plif -T 16 --seed 1
  spikefuse train --dataset mnist --download --model resnet18 -T 32 --encoding poisson \\
      --epochs 5 --batch-size 100 --shift 0
  spikefuse train --config configs/temporal-fusion-mnist-resnet18.yaml --download
  spikefuse train --resume runs/digits-conv-1/last.ckpt
  torchrun --nproc_per_node 2 -m spikefuse train --batch-size 64
  torchrun --nproc_per_node 4 -m spikefuse train --time-ranks 2 --data-ranks 2 -T 32
  tensorboard --logdir runs

A run's folder receives last.ckpt, best.ckpt (highest validation accuracy), metrics.csv, TensorBoard
logs, and at the end curves.png, raster.png and result.json. The test images are used once, at the
end, on the best epoch; validation images are a tenth of the training images. Ctrl-C saves and says
how to resume. Data sets other than digits are looked for in --data-dir, else in ${ENVIRONMENT},
else in the user's cache.
"""


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class Command(Parser):
    """Of one command, which says itself what it does not know: its help lists the options."""

    def parse_known_args(self, *arguments: Any, **keywords: Any) -> Any:
        found, unknown = super().parse_known_args(*arguments, **keywords)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="spikefuse", description="Train spiking neural networks.")
    parser.add_argument("--version", action="version", version=f"spikefuse {spikefuse.__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Command
    )
    _add_train(commands)
    _add_eval(commands)
    return parser


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a network, test it, draw pictures",
        usage="%(prog)s [OPTION ...]",
        description="Train a spiking network to classify images or event data.",
        epilog=TRAIN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options = {f.name: f.metadata for f in fields(TrainConfig)}
    for title, names in GROUPS.items():
        group = train.add_argument_group(title)
        for name in names:
            _add_option(group, name, options[name])
    where = train.add_argument_group("where")
    where.add_argument(
        "--config", type=Path, metavar="YAML", help="a file of options; those given here come first"
    )
    where.add_argument(
        "--out", type=Path, metavar="DIR", help="a new folder (default: runs/DATASET-MODEL-N)"
    )
    where.add_argument(
        "--resume", type=Path, metavar="CKPT", help="continue the run of this checkpoint"
    )
    where.add_argument(
        "--time-ranks",
        type=int,
        metavar="N",
        default=1,
        help="processes of torchrun that share a sequence (default: %(default)s)",
    )
    where.add_argument(
        "--data-ranks", type=int, metavar="N", help="that share a batch (default: all others)"
    )
    where.add_argument(
        "--time-chunks",
        type=int,
        metavar="N",
        help="parts of a batch in which states go from one to the next (default: 1 on GPUs, where "
        "they do not wait for them, 4 on CPUs)",
    )
    _add_place(where)


def _add_option(group: Any, name: str, rule: Mapping[str, Any]) -> None:
    """An option that is absent unless given: a resumed run has to tell what was asked for."""
    flags = ["-T"] if name == "num_steps" else []
    text, choices = rule["help"], rule["choices"] or ()
    values: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if rule["kind"] is not bool:
        metavar = "|".join(choices) or "N"
        if len(choices) > FEW:
            metavar, text = "NAME", f"{text}: {', '.join(choices)}"
        values = {"type": rule["kind"], "metavar": metavar}
    group.add_argument(
        *flags,
        f"--{name.replace('_', '-')}",
        *ALIASES.get(name, ()),
        default=argparse.SUPPRESS,
        help=f"{text} (default: {rule['shown']})",
        **values,
    )


def _add_eval(commands: Any) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="test a checkpoint",
        description="Print loss and accuracy of a checkpoint on its data set's test images.",
        epilog="example:\n  spikefuse eval runs/digits-conv-1/best.ckpt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    evaluate.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="best.ckpt or last.ckpt of a run"
    )
    (rule,) = (f.metadata for f in fields(TrainConfig) if f.name == "fuse")
    _add_option(evaluate, "fuse", {**rule, "shown": "as in training"})
    _add_place(evaluate)


def _add_place(group: Any) -> None:
    group.add_argument(
        "--device",
        metavar="auto|cpu|cuda",
        default="auto",
        help="auto is cuda where there is one (default: %(default)s)",
    )
    group.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of the data sets")
    group.add_argument(
        "--download", action="store_true", help="fetch missing data, with checksum (default: no)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    try:
        return (_eval if arguments.command == "eval" else _train)(arguments)
    except (ConfigError, DataError) as error:
        if _main_process():
            print(f"spikefuse {arguments.command}: error: {error}", file=sys.stderr)
        else:
            # The first to end ends all: that is to be the one that says why.
            time.sleep(PATIENCE_SECONDS)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in EXTRA:
            raise
        print(
            f"spikefuse {arguments.command}: error: {error.name} is not installed: "
            'pip install "spikefuse[train]"',
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print(f"spikefuse {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return USER_ERROR


def _train(arguments: argparse.Namespace) -> int:
    given = {f.name: getattr(arguments, f.name) for f in fields(TrainConfig) if f.name in arguments}
    if arguments.config is not None:
        from spikefuse.train import recipe

        given = {**recipe.read(arguments.config), **given}
    config = TrainConfig(**given)  # before the slow imports
    from spikefuse.train import checkpoint, run
    from spikefuse.train.interruption import Interrupted
    from spikefuse.train.processes import PeerLost

    _go_on_after_restart(arguments, checkpoint.LAST)
    resumed = None
    if arguments.resume is not None:
        resumed = checkpoint.load(arguments.resume)
        config = _resumed_config(resumed.config, given, arguments)
    place = run.Place(
        *(arguments.device, arguments.data_dir, arguments.download, arguments.out),
        *(arguments.time_ranks, arguments.data_ranks, arguments.time_chunks),
    )
    try:
        run.train(config, place, resumed)
    except Interrupted as stop:
        if _main_process():
            print(_how_to_continue(stop.checkpoint, arguments), file=sys.stderr)
        return 128 + stop.signum
    except PeerLost as loss:
        print(f"spikefuse train: {loss}", file=sys.stderr, flush=True)
        # Not by an orderly exit, in which connections and the GPU wait for who is gone.
        os._exit(1)
    return 0


def _go_on_after_restart(arguments: argparse.Namespace, last: str) -> None:
    """Resume what this command began, if torchrun --max-restarts has started it again."""
    if arguments.resume is not None or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return
    if arguments.out is None:
        raise ConfigError("torchrun restarts a run from its folder: name one with --out")
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and (arguments.out / last).is_file():
        arguments.resume, arguments.out = arguments.out / last, None


def _resumed_config(
    saved: TrainConfig, given: dict[str, Any], arguments: argparse.Namespace
) -> TrainConfig:
    if arguments.out is not None:
        raise ConfigError("out is given with resume: a resumed run goes on in its own folder")
    for name, value in given.items():
        fixed = name not in RESUMABLE
        if name == "epochs":
            fixed = saved.schedule != "constant"  # which ends with the run
        if fixed and value != getattr(saved, name):
            raise ConfigError(
                f"{name} is {value}, but {arguments.resume} was trained with "
                f"{getattr(saved, name)}: leave it out, or train anew without --resume"
            )
    if given.get("memory", "auto") != "auto":
        given = {"memory_budget": None, **given}  # the saved one was for auto
    return replace(saved, **given)


def _eval(arguments: argparse.Namespace) -> int:
    from spikefuse.train import checkpoint, run

    loaded = checkpoint.load(arguments.checkpoint)
    if "fuse" in arguments:
        # Nothing is kept for backward, so that no policy stands against it.
        own = {"fuse": arguments.fuse, "memory": "recompute", "memory_budget": None}
        loaded = replace(loaded, config=replace(loaded.config, **own))
    place = run.Place(arguments.device, arguments.data_dir, arguments.download)
    loss, accuracy = run.evaluate(loaded, place)
    print(f"test accuracy {100 * accuracy:.2f} %, loss {loss:.4f} ({loaded.config.dataset})")
    return 0


def _how_to_continue(checkpoint: Path | None, arguments: argparse.Namespace) -> str:
    if checkpoint is None:
        return "stopped before anything was saved"
    command = [*_program(), "train", "--resume", str(checkpoint)]
    if arguments.device != "auto":
        command += ["--device", arguments.device]
    if arguments.data_dir is not None:
        command += ["--data-dir", str(arguments.data_dir)]
    return f"stopped; saved {checkpoint}; continue with:\n  {shlex.join(command)}"


def _main_process() -> bool:
    """Whether this is the one process that prints, of those that torchrun may have started."""
    return os.environ.get("RANK", "0") == "0"


def _program() -> list[str]:
    """How this program was called, for a command that can be pasted."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return ["torchrun", "--nproc_per_node", os.environ["LOCAL_WORLD_SIZE"], "-m", "spikefuse"]
    called = sys.argv[0]
    if Path(called).name == "__main__.py":
        return [sys.executable, "-m", "spikefuse"]
    return ["spikefuse" if shutil.which("spikefuse") == called else called]
