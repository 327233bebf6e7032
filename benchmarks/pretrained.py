"""Train the networks that come with spikefuse, and write their files.

    python -m benchmarks.pretrained --data-dir DIR
    python -m benchmarks.pretrained --names digits-conv

Each is trained by the command line, as users do, on a CPU. Its file holds settings and weights,
without what resuming a run needs. Rates and operations are those of the first 500 test examples;
energy is the estimate of `sf.report`. Quick runs train for one epoch, and replace no file.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import spikefuse as sf
from benchmarks import record, runner
from benchmarks.runner import Record
from spikefuse.train import checkpoint
from spikefuse.train.batches import encode

FASTER = ("--batch-size", "128", "--schedule", "one-cycle", "--lr", "0.004", "-T", "4")
# Options of `spikefuse train`, and the licence of the data.
NETWORKS: dict[str, tuple[tuple[str, ...], str]] = {
    "digits-conv": (("--dataset", "digits"), "CC BY 4.0"),
    "mnist-conv": (("--dataset", "mnist", "--epochs", "4", *FASTER), "CC BY-SA 3.0"),
    "fashion-mnist-conv": (
        ("--dataset", "fashion_mnist", "--epochs", "6", *FASTER),
        "MIT",
    ),
}
IMAGES = 500  # test examples of the report


def main(argv: list[str] | None = None) -> Path:
    parser = runner.make_parser("pretrained", __doc__)
    parser.add_argument("--names", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--data-dir", type=Path, help="folder of the datasets")
    args = runner.parse(parser, argv)
    args.device = "cpu"
    if args.quick:
        args.names = ["digits-conv"]
    return runner.write_rows(args, rows(args), {"names": args.names})


def rows(args: argparse.Namespace) -> Iterator[Record]:
    for name in args.names:
        options, licence = NETWORKS[name]
        with tempfile.TemporaryDirectory(prefix="spikefuse-training-") as folder:
            command = [sys.executable, "-m", "spikefuse", "train", *options, "--device", "cpu"]
            command += ["--seed", "0", "--out", folder]
            if args.data_dir is not None and not name.startswith("digits"):
                command += ["--data-dir", str(args.data_dir.expanduser().resolve())]
            start = time.perf_counter()
            subprocess.run([*command, *("--epochs", "1") * args.quick], cwd=record.ROOT, check=True)
            seconds = time.perf_counter() - start
            target = Path(folder) if args.quick else checkpoint.PRETRAINED
            path = stripped(Path(folder) / checkpoint.BEST, target / f"{name}.ckpt")
            shown = ["spikefuse", "train", *options, "--seed", "0"]
            row = {"row": name, "licence": licence, "command": shown, "seconds": round(seconds, 1)}
            yield row | facts(path, args)


def stripped(run: Path, path: Path) -> Path:
    """Write the settings and weights of a run's checkpoint."""
    content = torch.load(run, weights_only=True)
    entry = content[checkpoint.KEY]
    kept = {name: entry[name] for name in ("format", "version", "config", "history")}
    path.parent.mkdir(exist_ok=True)
    torch.save({checkpoint.KEY: kept, "state_dict": content["state_dict"]}, path)
    return path


def facts(path: Path, args: argparse.Namespace) -> Record:
    """Return the test accuracy, and rates, operations and energy per example."""
    net = sf.load(path)
    *_, test = sf.data.load(net.config.dataset, args.data_dir)
    with torch.no_grad():
        parts = [test[i : i + IMAGES] for i in range(0, len(test), IMAGES)]
        right = sum(int((net(part.pixels).argmax(1) == part.labels).sum()) for part in parts)
        report = sf.report(net.net, [encode(parts[0].pixels, net.config)])
    content = path.read_bytes()
    return {
        "dataset": net.config.dataset,
        "accuracy": right / len(test),
        "parameters": sum(p.numel() for p in net.parameters()),
        "T": net.config.num_steps,
        "rates": [round(rate, 4) for rate in report.rates.values()],
        "accumulates": report.accumulates,
        "multiplies": report.multiplies,
        "joules": report.energy,
        "ann_joules": report.ann_energy,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


if __name__ == "__main__":
    main()
