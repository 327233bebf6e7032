"""Attack the library with random definitions, networks, events, damaged files, faults and folders.

    python -m tests.attack --minutes 10              # every kind, seeds from the clock
    python -m tests.attack --kinds files --seed 17 --cases 1    # repeats a finding

Each case depends on its kind and seed only. A finding is printed with its seed, and the attack goes
on; the exit status is 1 if there was one. Cases run in processes of their own, so that a crash or
an endless loop is a finding, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.attack.worker import work

KINDS = ("definitions", "networks", "events", "files", "faults", "folders")
SECONDS = 900  # that a case may take on a busy machine: some start trainings, or compile a lot
RENEWED = 300  # cases after which a process ends, with all the kernels that it loaded


class Worker:
    """A process that runs one case at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kind, self.seed, self.began, self.cases = folder, "", 0, 0.0, 0
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, str(self.folder)), daemon=False)
        self.process.start()
        theirs.close()

    def send(self, kind: str, seed: int) -> None:
        self.cases += 1
        if self.cases % RENEWED == 0:
            self.stop()
            self.start()
        self.kind, self.seed, self.began = kind, seed, time.monotonic()
        self.connection.send((kind, seed))

    def result(self) -> list[str]:
        """Return the findings of a case that ended, or whose process did or took too long."""
        late = time.monotonic() - self.began > SECONDS
        try:
            if not late:
                return self.connection.recv()
        except (EOFError, ConnectionError):
            pass
        self.stop()
        code = self.process.exitcode
        self.start()
        return [f"no end within {SECONDS} s" if late else f"the process died with status {code}"]

    def stop(self) -> None:
        self.connection.close()
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Attack:
    """Deals cases to workers, so that every kind gets the same time, and counts them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.start = options, time.monotonic()
        self.counts = dict.fromkeys(options.kinds, 0)
        self.dealt, self.spent = dict(self.counts), dict.fromkeys(options.kinds, 0.0)
        self.findings: list[tuple[str, int]] = []

    def next_case(self) -> tuple[str, int] | None:
        open_kinds = [k for k in self.counts if self.dealt[k] < self.options.cases]
        if not open_kinds or time.monotonic() - self.start > 60 * self.options.minutes:
            return None
        kind = min(open_kinds, key=lambda k: self.spent[k])
        self.dealt[kind] += 1
        self.spent[kind] += 0.1  # until the time is known, so that workers take different kinds
        return kind, self.options.seed + self.dealt[kind] - 1

    def take(self, worker: Worker) -> None:
        found = worker.result()
        self.counts[worker.kind] += 1
        self.spent[worker.kind] += time.monotonic() - worker.began
        if found:
            self.findings.append((worker.kind, worker.seed))
            command = f"--kinds {worker.kind} --seed {worker.seed} --cases 1"
            print(f"\nfinding: python -m tests.attack {command}", *found, sep="\n  ", flush=True)

    def run(self, folder: Path) -> None:
        workers = [Worker(folder) for _ in range(self.options.jobs)]
        busy: dict[Any, Worker] = {}
        try:
            while True:
                for worker in set(workers) - set(busy.values()):
                    if (case := self.next_case()) is not None:
                        worker.send(*case)
                        busy[worker.connection] = worker
                if not busy:
                    return
                ready = wait(list(busy), 1.0)
                late = [c for c, w in busy.items() if time.monotonic() - w.began > SECONDS]
                for connection in {*ready, *late}:
                    self.take(busy.pop(connection))
                self.show()
        finally:
            for worker in workers:
                worker.stop()

    def show(self) -> None:
        if sys.stderr.isatty():
            share = min(1.0, (time.monotonic() - self.start) / (60 * self.options.minutes))
            bar = f"{'#' * int(30 * share):30}"
            print(f"\r[{bar}] {share:4.0%} {self.summary()}", end="", file=sys.stderr, flush=True)

    def summary(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        return f"{counts}: {len(self.findings)} findings"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.attack", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="default 10")
    parser.add_argument("--seed", type=int, help="of the first case of each kind; default random")
    parser.add_argument(
        "--kinds", type=lambda text: text.split(","), default=KINDS, metavar="K,..."
    )
    parser.add_argument("--cases", type=int, default=10**9, help="of each kind, at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    if unknown := set(options.kinds) - {*KINDS}:
        parser.error(f"--kinds: {', '.join(sorted(unknown))}: expected {', '.join(KINDS)}")
    if options.seed is None:
        options.seed = time.time_ns() // 1000 % 10**9
    return options


def main() -> int:
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes the folder
    attack = Attack(parse())
    print(f"seed {attack.options.seed}, {attack.options.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        attack.run(Path(folder))
    print(f"\n{attack.summary()}")
    for kind, seed in attack.findings:
        print(f"  --kinds {kind} --seed {seed} --cases 1")
    return 1 if attack.findings else 0


if __name__ == "__main__":
    sys.exit(main())
