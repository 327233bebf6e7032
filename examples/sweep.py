"""Search for a learning rate and a decay: one run of the trainer for each pair, and one table.

python examples/sweep.py                 # a grid of nine pairs
python examples/sweep.py --random 20     # pairs drawn at random from the same ranges

After an interruption, the same command continues with the run that was interrupted. With more
--epochs, it extends all runs.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
from pathlib import Path
from typing import Any

import spikefuse as sf
from spikefuse.train.signals import RunInterrupted

LEARNING_RATES = (1e-3, 3e-3, 1e-2)
DECAYS = (0.25, 0.5, 0.75)
# What all runs have in common: options of `spikefuse train`.
COMMON: dict[str, Any] = {"dataset": "digits", "model": "conv", "num_steps": 4, "batch_size": 64}
RESULTS = ("validation_accuracy", "test_accuracy", "best_epoch")

Settings = dict[str, Any]


def grid() -> list[Settings]:
    return [{"lr": lr, "decay": d} for lr, d in itertools.product(LEARNING_RATES, DECAYS)]


def drawn(count: int, seed: int = 0) -> list[Settings]:
    """Pairs from the ranges of the grid: learning rates log-uniform, decays uniform."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        factor = (LEARNING_RATES[-1] / LEARNING_RATES[0]) ** rng.random()
        decay = rng.uniform(DECAYS[0], DECAYS[-1])
        found.append({"lr": round(LEARNING_RATES[0] * factor, 6), "decay": round(decay, 4)})
    return found


def run(settings: Settings, epochs: int, folder: Path) -> dict[str, Any]:
    """Return the result of a run: read it, finish the run, or start it."""
    out = folder / "-".join(f"{name}-{value:g}" for name, value in settings.items())
    return sf.train.fit(**COMMON, **settings, epochs=epochs, out=out, resume=True)


def write(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


def show(rows: list[dict[str, Any]]) -> None:
    print(" ".join(f"{name:>20}" for name in rows[0]))
    for row in rows:
        print(" ".join(f"{value:>20.4g}" for value in row.values()))


def main(folder: str, epochs: int, count: int | None = None) -> list[dict[str, Any]]:
    """Run all settings; return the rows of the table, the best first.

    The accuracy on the validation set decides. That on the test set is not for choosing: after a
    search, only the one of the first row is an estimate for new data.
    """
    place, rows = Path(folder), []
    place.mkdir(parents=True, exist_ok=True)
    for settings in grid() if count is None else drawn(count):
        result = run(settings, epochs, place)
        rows.append(settings | {name: result[name] for name in RESULTS})
        rows.sort(key=lambda row: -row["validation_accuracy"])
        write(rows, place / "results.csv")  # after each run, so that it can be watched
    show(rows)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="sweep", help="of the runs and of results.csv")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--random", type=int, dest="count", help="number of random pairs")
    try:
        main(**vars(parser.parse_args()))
    except RunInterrupted:
        raise SystemExit("stopped: the same command continues") from None
